"""All texts of a run encoded before its engine is built, so that the text encoders can leave the memory."""

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

MAX_BYTES = 64 * 2**30  # of a run's embeddings on disk
MAX_UNREAD = 2  # texts for each sample that the run draws: more would cost time for nothing
ASK = "set data.cache_dir and run python -m wfm_ds.data.prepare"


def texts_of(recipe: Recipe, model: DiffusionModel, data: TrainingData, derived: Derived, world: World) -> TextCache:
    """Open the run's text cache, encode what it lacks and drop the encoders, or say why they stay. Collective; before
    the engine is built and after freeze_base."""
    texts: TextCache = world.checked(lambda: text_cache(recipe, model, data))
    if texts.folder is None:
        return texts

    def ready() -> bool:
        can_be_written = texts.opened(required=recipe.data.cache_dir is not None)
        if can_be_written and world.local_rank == 0:
            remove_unused(time.time())
        return can_be_written

    if world.any(not world.checked(ready)):
        texts = world.checked(lambda: text_cache(recipe, model, data, in_memory=True))
        return texts
    if recipe.data.streaming:
        log.info("texts are encoded as they are needed: those of a stream are not known before")
        return texts
    needed = needed_texts(recipe, model, data)
    if recipe.data.cache_text == "auto" and (reason := too_many(recipe, model, needed, derived)) is None:
        num_new = world.sums({"new": float(world.checked(lambda: encode_share(texts, needed, world)))})["new"]
        if num_new:
            log.info("%d texts were encoded into %s", num_new, texts.folder)
        model.drop_text_encoders()  # the ranks of this node have all texts now, without asking for each again
    else:
        if recipe.data.cache_text == "auto":
            log.info("texts are encoded as they are needed: %s", reason)
        if not drop_idle_encoders(model, texts, needed):
            return texts
    log.info("all %d texts are in %s: the text encoders are not kept in memory", len(needed), texts.folder)
    return texts


def keeps_encoders(recipe: Recipe, model: DiffusionModel, data: TrainingData, world_size: int) -> bool:
    """Tell, before the run, if its text encoders will stay in memory; without asking what is cached already."""
    if recipe.data.streaming:
        return True
    if recipe.data.cache_text == "off":
        return recipe.data.cache_dir is None
    return too_many(recipe, model, needed_texts(recipe, model, data), derive(recipe, world_size)) is not None


def too_many(recipe: Recipe, model: DiffusionModel, needed: Sequence[Text], derived: Derived) -> str | None:
    """Say why these texts are too many to be encoded unasked; None if they are not."""
    drawn = recipe.run.steps * (recipe.rl.rollout.prompts_per_step if recipe.is_rl else derived.samples_per_step)
    if len(needed) > MAX_UNREAD * drawn + recipe.validation.num_prompts:
        return f"the run draws {drawn} samples and there are {len(needed)} texts; to encode them all ahead, {ASK}"
    size = len(needed) * text_bytes(model.text_shapes(), model.text_dtype)
    if size > MAX_BYTES:
        return (
            f"the embeddings of {len(needed)} texts take {size / 2**30:.1f} GiB, and no more than "
            f"{MAX_BYTES / 2**30:.0f} GiB are written unasked; to have them all, {ASK}"
        )
    return None


def encode_share(texts: TextCache, needed: Sequence[Text], world: World) -> int:
    """Encode this rank's share of its node's texts into the cache; how many were new. Raises
    DataError when the disk is full."""
    mine = needed[world.local_rank :: ranks_per_node(world.size)]
    missing = [text for text in mine if not texts.stored(text)]
    for text in missing:
        LIVENESS.advance("the encoding of texts")
        try:
            texts.encode([text])
        except OSError as error:
            raise DataError(f"{texts.folder} cannot be written: {error}; make room or set data.cache_dir") from error
    return len(missing)
