"""Objects that every training loop works with, built once per run. No loop and no algorithm in here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from wfm_ds.distributed.lifecycle import StopFlag
from wfm_ds.distributed.world import World
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.engine.forward import CountedForward
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.latent_cache import LatentCache
from wfm_ds.models.sampler import Sampler
from wfm_ds.models.text_cache import TextCache
from wfm_ds.monitoring.monitor import Monitor
from wfm_ds.monitoring.stopwatch import Stopwatch
from wfm_ds.recipe.derived import Derived
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.mirror import Mirror

if TYPE_CHECKING:
    from wfm_ds.data.pixels import Framing
    from wfm_ds.data.samples import Media

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Job:
    """One run on one rank."""

    recipe: Recipe
    derived: Derived
    world: World
    stop: StopFlag
    model: DiffusionModel
    engine: DenoiserEngine
    texts: TextCache
    latents: LatentCache | None = None  # of training media, if they are kept
    monitor: Monitor
    mirror: Mirror | None = None  # rank 0's, if the run is copied to a storage
    timer: Stopwatch = field(init=False)
    forward: CountedForward = field(init=False)  # every forward of the denoiser, under the engine's active policy
    sampler: Sampler = field(init=False)

    def __post_init__(self) -> None:
        self.timer = Stopwatch(self.world.device)
        one_size = self.recipe.data.buckets is None  # else height and width are each replica's own
        self.forward = CountedForward(self.model.denoise, self.engine, one_size=one_size)
        self.sampler = Sampler(
            model=self.model,
            texts=self.texts,
            settings=self.recipe.sampling,
            forward=self.forward,
            joint_rows=self.recipe.joint_rows,
        )

    @property
    def cached_latents(self) -> Callable[[Media, Framing], Tensor | None] | None:
        """The kept latents of a medium, for a source of batches; None if the run keeps none."""
        return None if self.latents is None else self.latents.read

    @property
    def evaluation_policy(self) -> str:
        """The weights that are validated, shown and exported."""
        return "ema" if self.recipe.ema is not None else "train"

    def should_stop(self) -> bool:
        """Return whether any rank was asked to stop; collective, called once per step by all."""
        return self.world.any(self.stop.is_set)
