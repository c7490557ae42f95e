"""The disk store of text embeddings, in data.cache_dir or, by default, in the user's cache.

The user's cache has separate folders per text encoder, device and torch version, so that a run never reads embeddings
computed with other software. Folders that no run has opened for UNUSED_S seconds are removed.
"""

from __future__ import annotations

import hashlib
import logging
import shutil

import torch

from wfm_ds.data.caption_cache import user_cache_dir
from wfm_ds.errors import DataError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage.tensor_store import TensorStore, canonical_json

log = logging.getLogger(__name__)

TEXT_FOLDER = "text"  # folder name in the user's cache and in data.cache_dir
LAST_USE_FILE = "opened"  # file in the folder; its mtime is when a run last opened the folder
UNUSED_S = 90 * 24 * 3600.0


def create_text_store(recipe: Recipe, model: DiffusionModel) -> TensorStore | None:
    """Return the disk store for this model's text embeddings, or None if the recipe disables it."""
    if recipe.data.cache_dir is not None:
        return TensorStore(recipe.data.cache_dir / TEXT_FOLDER)
    if recipe.data.cache_text == "off" or recipe.data.streaming:  # the number of texts in a stream is unknown
        return None
    return TensorStore(user_cache_dir() / TEXT_FOLDER / software_key(model))


def software_key(model: DiffusionModel) -> str:
    """Return a hash of everything that an embedding depends on besides the text, including device and torch version."""
    settings = {**model.text_cache_key(), "device": model.device.type, "torch": torch.__version__}
    return hashlib.sha256(canonical_json(settings).encode()).hexdigest()[:24]


def open_store_folder(store: TensorStore, *, required: bool) -> bool:
    """Create the folder and record its use. On failure raise DataError if `required`, else warn and return False."""
    try:
        store.folder.mkdir(parents=True, exist_ok=True)
        (store.folder / LAST_USE_FILE).touch()
    except OSError as error:
        reason = f"{store.folder} cannot be written ({error.strerror})"
        if required:
            raise DataError(f"{reason}: set data.cache_dir to a writable folder") from error
        log.warning("%s: embeddings and text encoders stay in memory; set WFM_CACHE or data.cache_dir", reason)
        return False
    return True


def remove_unused_folders(now_s: float) -> None:
    """Remove folders in the user's cache that no run has opened for UNUSED_S seconds. now_s: current Unix time."""
    for last_use in (user_cache_dir() / TEXT_FOLDER).glob(f"*/{LAST_USE_FILE}"):
        try:
            if now_s - last_use.stat().st_mtime > UNUSED_S:
                log.info("%s: unused for %d days, removed", last_use.parent, UNUSED_S // 86400)
                shutil.rmtree(last_use.parent)
        except FileNotFoundError:  # another run removed it at the same time
            continue
        except OSError as error:
            log.warning("%s is unused but cannot be removed (%s)", last_use.parent, error.strerror)
