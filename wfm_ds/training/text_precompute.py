"""Encode all texts of a run before the engine is built, so that the text encoders can be freed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from wfm_ds.data.datasets import TrainingData
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.world import World, ranks_per_node
from wfm_ds.errors import DataError
from wfm_ds.memory.activations import text_bytes
from wfm_ds.models.assets.text_cache import Text, TextCache, remove_unused_folders
from wfm_ds.models.base import DiffusionModel
from wfm_ds.recipe.run_sizes import RunSizes, derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.training.caches import collect_run_texts, drop_unused_encoders, open_text_cache

log = logging.getLogger(__name__)

MAX_EMBEDDING_BYTES = 64 * 2**30  # largest size on disk of the embeddings that are precomputed automatically
MAX_TEXTS_PER_DRAW = 2  # texts per sample that the run draws; above this, precomputing wastes time
PRECOMPUTE_HINT = "set data.cache_dir and run wfm data prepare"


def precompute_texts(
    recipe: Recipe, model: DiffusionModel, data: TrainingData, derived: RunSizes, world: World
) -> TextCache:
    """Open the run's text cache, encode missing texts and free the text encoders, or log why they stay in memory.

    Call after `mark_frozen_layers` and before the engine is built. Collective.
    """
    texts: TextCache = world.run_checked(lambda: open_text_cache(recipe, model, data))
    if texts.folder is None:
        return texts

    def open_on_disk() -> bool:
        can_be_written = texts.open_folder(required=recipe.data.cache_dir is not None)
        if can_be_written and world.local_rank == 0:
            remove_unused_folders(time.time())
        return can_be_written

    if world.any_rank(not world.run_checked(open_on_disk)):
        texts = world.run_checked(lambda: open_text_cache(recipe, model, data, in_memory=True))
        return texts
    if recipe.data.streaming:
        log.info("texts are encoded on demand: the texts of a stream are not known in advance")
        return texts
    needed = collect_run_texts(recipe, model, data)
    if recipe.data.cache_text == "auto" and (reason := precompute_objection(recipe, model, needed, derived)) is None:
        num_new = world.sum_over_ranks(
            {"new": float(world.run_checked(lambda: encode_local_texts(texts, needed, world)))}
        )["new"]
        if num_new:
            log.info("encoded %d texts into %s", num_new, texts.folder)
        model.drop_text_encoders()  # all texts of this node are cached; no need to check each one again
    else:
        if recipe.data.cache_text == "auto":
            log.info("texts are encoded on demand: %s", reason)
        if not drop_unused_encoders(model, texts, needed):
            return texts
    log.info("all %d texts are cached in %s: text encoders freed", len(needed), texts.folder)
    return texts


def keeps_text_encoders(recipe: Recipe, model: DiffusionModel, data: TrainingData, world_size: int) -> bool:
    """Return whether the run would keep its text encoders in memory if no text were cached yet."""
    if recipe.data.streaming:
        return True
    if recipe.data.cache_text == "off":
        return recipe.data.cache_dir is None
    return (
        precompute_objection(
            recipe, model, collect_run_texts(recipe, model, data), derive_run_sizes(recipe, world_size)
        )
        is not None
    )


def precompute_objection(
    recipe: Recipe, model: DiffusionModel, needed: Sequence[Text], derived: RunSizes
) -> str | None:
    """Return why these texts should not be precomputed (too few are used, or too much disk space), or None."""
    num_draws = recipe.run.steps * (recipe.rl.rollout.prompts_per_step if recipe.is_rl else derived.samples_per_step)
    if len(needed) > MAX_TEXTS_PER_DRAW * num_draws + recipe.validation.num_prompts:
        return (
            f"{len(needed)} texts but the run draws only {num_draws} samples; to precompute all texts, "
            f"{PRECOMPUTE_HINT}"
        )
    size = len(needed) * text_bytes(model.text_shapes(), model.text_dtype)
    if size > MAX_EMBEDDING_BYTES:
        return (
            f"the embeddings of {len(needed)} texts take {size / 2**30:.1f} GiB, more than the limit of "
            f"{MAX_EMBEDDING_BYTES / 2**30:.0f} GiB; to precompute all texts, {PRECOMPUTE_HINT}"
        )
    return None


def encode_local_texts(texts: TextCache, needed: Sequence[Text], world: World) -> int:
    """Encode this rank's shard of `needed` into its node's cache. Returns the number of texts that were missing.

    Raises DataError if the cache cannot be written, for example because the disk is full.
    """
    shard = needed[world.local_rank :: ranks_per_node(world.size)]
    missing = [text for text in shard if not texts.is_stored(text)]
    for text in missing:
        LIVENESS.record_progress("encoding texts")
        try:
            texts.encode([text])
        except OSError as error:
            raise DataError(f"{texts.folder} cannot be written: {error}. Free space or set data.cache_dir") from error
    return len(missing)
