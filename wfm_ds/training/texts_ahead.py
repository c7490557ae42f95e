"""Encode all texts of a run before the engine is built, so that the text encoders can be freed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from wfm_ds.data.datasets import TrainingData
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.world import World, ranks_per_node
from wfm_ds.errors import DataError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.captions import Text
from wfm_ds.models.text_cache import TextCache
from wfm_ds.models.text_store import remove_unused
from wfm_ds.recipe.derived import Derived, derive
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.activations import text_bytes
from wfm_ds.training.caches import drop_idle_encoders, needed_texts, text_cache

log = logging.getLogger(__name__)

MAX_BYTES = 64 * 2**30  # largest size on disk of the embeddings that are precomputed automatically
MAX_UNREAD = 2  # texts per sample that the run draws; above this, precomputing wastes time
ASK = "set data.cache_dir and run python -m wfm_ds.data.prepare"


def texts_of(recipe: Recipe, model: DiffusionModel, data: TrainingData, derived: Derived, world: World) -> TextCache:
    """Open the run's text cache, encode missing texts and free the text encoders, or log why they stay in memory.

    Call after `mark_frozen_layers` and before the engine is built. Collective.
    """
    texts: TextCache = world.checked(lambda: text_cache(recipe, model, data))
    if texts.folder is None:
        return texts

    def open_on_disk() -> bool:
        can_be_written = texts.opened(required=recipe.data.cache_dir is not None)
        if can_be_written and world.local_rank == 0:
            remove_unused(time.time())
        return can_be_written

    if world.any(not world.checked(open_on_disk)):
        texts = world.checked(lambda: text_cache(recipe, model, data, in_memory=True))
        return texts
    if recipe.data.streaming:
        log.info("texts are encoded on demand: the texts of a stream are not known in advance")
        return texts
    needed = needed_texts(recipe, model, data)
    if recipe.data.cache_text == "auto" and (reason := too_many(recipe, model, needed, derived)) is None:
        num_new = world.sums({"new": float(world.checked(lambda: encode_share(texts, needed, world)))})["new"]
        if num_new:
            log.info("encoded %d texts into %s", num_new, texts.folder)
        model.drop_text_encoders()  # all texts of this node are cached; no need to check each one again
    else:
        if recipe.data.cache_text == "auto":
            log.info("texts are encoded on demand: %s", reason)
        if not drop_idle_encoders(model, texts, needed):
            return texts
    log.info("all %d texts are cached in %s: text encoders freed", len(needed), texts.folder)
    return texts


def keeps_encoders(recipe: Recipe, model: DiffusionModel, data: TrainingData, world_size: int) -> bool:
    """Predict whether the run keeps its text encoders in memory. Ignores already cached texts."""
    if recipe.data.streaming:
        return True
    if recipe.data.cache_text == "off":
        return recipe.data.cache_dir is None
    return too_many(recipe, model, needed_texts(recipe, model, data), derive(recipe, world_size)) is not None


def too_many(recipe: Recipe, model: DiffusionModel, needed: Sequence[Text], derived: Derived) -> str | None:
    """Return why these texts are too many to precompute automatically; None if they are not."""
    num_draws = recipe.run.steps * (recipe.rl.rollout.prompts_per_step if recipe.is_rl else derived.samples_per_step)
    if len(needed) > MAX_UNREAD * num_draws + recipe.validation.num_prompts:
        return f"{len(needed)} texts but the run draws only {num_draws} samples; to precompute all texts, {ASK}"
    size = len(needed) * text_bytes(model.text_shapes(), model.text_dtype)
    if size > MAX_BYTES:
        return (
            f"the embeddings of {len(needed)} texts take {size / 2**30:.1f} GiB, more than the limit of "
            f"{MAX_BYTES / 2**30:.0f} GiB; to precompute all texts, {ASK}"
        )
    return None


def encode_share(texts: TextCache, needed: Sequence[Text], world: World) -> int:
    """Encode this rank's shard of its node's texts into the cache and return the number of new ones.

    Raises DataError if the disk is full.
    """
    shard = needed[world.local_rank :: ranks_per_node(world.size)]
    missing = [text for text in shard if not texts.stored(text)]
    for text in missing:
        LIVENESS.advance("encoding texts")
        try:
            texts.encode([text])
        except OSError as error:
            raise DataError(f"{texts.folder} cannot be written: {error}. Free space or set data.cache_dir") from error
    return len(missing)
