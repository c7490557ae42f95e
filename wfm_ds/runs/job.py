"""Objects that the training loop and its helpers share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from wfm_ds.distributed.lifecycle import StopFlag
from wfm_ds.distributed.world import World
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.export.loading_code import loading_lines
from wfm_ds.export.target import ExportInfo, ExportTarget
from wfm_ds.export.weights import export_weights
from wfm_ds.models.assets.latent_cache import LatentCache
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.monitoring.meters import Stopwatch
from wfm_ds.monitoring.monitor import Monitor
from wfm_ds.monitoring.trackers import open_trackers
from wfm_ds.recipe.run_sizes import RunSizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.mirror import Mirror

if TYPE_CHECKING:
    from wfm_ds.data.pixels import Framing
    from wfm_ds.data.samples import Media
    from wfm_ds.engine.flop_counter import FlopCount

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class CommonJob(ABC):
    """Objects that the training loop and its helpers share on one rank, for diffusion and vision-language models."""

    recipe: Recipe
    run_sizes: RunSizes
    world: World
    stop_flag: StopFlag
    engine: DenoiserEngine
    monitor: Monitor
    mirror: Mirror | None = None  # rank 0 only, with checkpoint.storage
    timer: Stopwatch = field(init=False)

    artifact_kind: ClassVar[str] = "pipeline"  # kind of a full export in result.json
    num_experts: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self.timer = Stopwatch(self.world.device)

    @property
    def evaluation_policy(self) -> str:
        """Name of the policy used for validation, samples and exports."""
        return "ema" if self.recipe.ema is not None else "train"

    def should_stop(self) -> bool:
        """Return whether any rank has received a stop signal. All ranks must call this once per step."""
        return self.world.any_rank(self.stop_flag.is_set)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of exported weights."""

    @property
    @abstractmethod
    def export_spec(self) -> ExportInfo:
        """Settings that an export needs in addition to the engine's weights."""

    @abstractmethod
    def export_weights(self, out: Path) -> Path:
        """Export the evaluation policy to `out` and return the folder to load. All ranks must call this."""

    @abstractmethod
    def loading_lines(self, folder: Path) -> str:
        """Return Python code that loads the exported folder."""

    def pop_forward_counts(self) -> Mapping[str, float]:
        return {}

    def pop_work(self) -> FlopCount | None:
        """Return the FLOPs of rank 0's forward passes since the last call. Other ranks get None."""
        return self.engine.pop_flop_count()


@dataclass(kw_only=True)
class Job(CommonJob):
    """Objects that the training loop of a diffusion model and its helpers share on one rank."""

    model: DiffusionModel
    text_cache: TextCache
    latent_cache: LatentCache | None = None  # of training images and videos, if cached
    forward: CountingForward = field(init=False)  # all forward passes of the denoiser, with the engine's active policy
    sampler: Sampler = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_experts = len(self.model.sigma_ranges)
        one_size = self.recipe.data.buckets is None  # with buckets each replica has its own height and width
        self.forward = CountingForward(self.model.denoise, self.engine, one_size=one_size)
        self.sampler = Sampler(
            model=self.model,
            text_cache=self.text_cache,
            settings=self.recipe.sampling,
            forward=self.forward,
            max_joint_rows=self.recipe.joint_guidance_batches,
        )

    @property
    def read_cached_latents(self) -> Callable[[Media, Framing], Tensor | None] | None:
        """Function that returns the cached latents of an image or video. None if the run has no latent cache."""
        return None if self.latent_cache is None else self.latent_cache.read

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def export_spec(self) -> ExportTarget:
        return ExportTarget.from_model(self.model, self.recipe.sampling)

    def export_weights(self, out: Path) -> Path:
        return export_weights(
            self.export_spec,
            self.engine,
            out,
            policy=self.evaluation_policy,
            dtype=self.dtype,
            is_main=self.world.is_main,
        )

    def loading_lines(self, folder: Path) -> str:
        return loading_lines(self.model.path, folder, self.engine.uses_lora)

    def pop_forward_counts(self) -> Mapping[str, float]:
        forward = self.forward
        counts = {f"perf/forwards_{name}": float(count) for name, count in sorted(forward.counts.items())}
        counts |= {f"perf/forward_samples_{name}": float(count) for name, count in sorted(forward.num_samples.items())}
        forward.reset_counts()
        return counts


def open_monitor(recipe: Recipe, world: World, resumed_at: int | None, unit: str, resources: ExitStack) -> Monitor:
    """Open the run's metrics and trackers, and close them with `resources`. All ranks must call this.

    resumed_at: last optimizer step of the checkpoint, or None for a new run. unit: what the progress display counts,
    such as images.
    """
    trackers = world.run_checked(lambda: open_trackers(recipe, resumed_at), on="main")
    monitor = Monitor(
        recipe.run.output_dir,
        is_main=world.is_main,
        console=recipe.logging.console,
        total_steps=recipe.run.steps,
        unit=unit,
        trackers=trackers or (),
    )
    resources.callback(monitor.close)
    return monitor
