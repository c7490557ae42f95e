"""The place on disk of a run's text embeddings: in data.cache_dir, else in a folder of the user's cache.

The user's cache has a folder for each text encoder, device and version of torch, so that a run never reads what other
software computed. A folder that no run has opened for UNUSED_S is removed.
"""

from __future__ import annotations

import hashlib
import logging
import shutil

import torch

from wfm_ds.data.caption_cache import user_cache
from wfm_ds.errors import DataError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage.tensor_store import TensorStore, canonical

log = logging.getLogger(__name__)

TEXT = "text"  # the folder's name, there and in data.cache_dir
OPENED = "opened"  # a file in a folder, whose time says when a run began to use it
UNUSED_S = 90 * 24 * 3600.0


def text_store(recipe: Recipe, model: DiffusionModel) -> TensorStore | None:
    """Store of this model's embeddings; None if the recipe keeps none."""
    if recipe.data.cache_dir is not None:
        return TensorStore(recipe.data.cache_dir / TEXT)
    if recipe.data.cache_text == "off" or recipe.data.streaming:  # of a stream nobody knows how many there will be
        return None
    return TensorStore(user_cache() / TEXT / software_key(model))


def software_key(model: DiffusionModel) -> str:
    """Name what the bits of an embedding depend on besides its text."""
    known = {**model.text_identity(), "device": model.device.type, "torch": torch.__version__}
    return hashlib.sha256(canonical(known).encode()).hexdigest()[:24]


def opened(store: TensorStore, *, required: bool) -> bool:
    """Make the folder and note that a run uses it; False, with a warning, if it cannot be written.

    required: raise DataError instead.
    """
    try:
        store.folder.mkdir(parents=True, exist_ok=True)
        (store.folder / OPENED).touch()
    except OSError as error:
        reason = f"{store.folder} cannot be written ({error.strerror})"
        if required:
            raise DataError(f"{reason}: set data.cache_dir to a folder that can") from error
        log.warning("%s: texts and their encoders stay in memory; set WFM_CACHE or data.cache_dir", reason)
        return False
    return True


def remove_unused(now_s: float) -> None:
    """Remove the folders of the user's cache that no run has opened for UNUSED_S."""
    for mark in (user_cache() / TEXT).glob(f"*/{OPENED}"):
        try:
            if now_s - mark.stat().st_mtime > UNUSED_S:
                log.info("%s has not been used for %d days: removed", mark.parent, UNUSED_S // 86400)
                shutil.rmtree(mark.parent)
        except FileNotFoundError:  # another run removes it too
            continue
        except OSError as error:
            log.warning("%s is not used, and cannot be removed (%s)", mark.parent, error.strerror)
