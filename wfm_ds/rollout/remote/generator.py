"""Generates the chunks of a rollout worker. Each device generates one chunk at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.rollout.groups import Group, stack_conditioning_frames
from wfm_ds.rollout.histories import HistoryLayout, HistoryWalker
from wfm_ds.rollout.remote.packing import ChunkTask
from wfm_ds.rollout.remote.publisher import PolicyManifest
from wfm_ds.rollout.remote.weights import PolicyWeights
from wfm_ds.sampling.denoise import Trajectory
from wfm_ds.transport.worker import ReportProgress, TaskFailed

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedChunk:
    publication: int  # RL step after which the weights of this chunk were published
    group: Group  # with the conditioning frames of the samples
    trajectory: Trajectory
    images: npt.NDArray[np.uint8]  # [n,H,W,3] or [n,T,H,W,3]
    is_finite: Sequence[bool]


class ChunkGenerator:
    """Generates chunks for a rollout worker. All threads of the worker share one object."""

    def __init__(
        self,
        model: DiffusionModel,
        texts: TextCache,
        settings: SamplingRecipe,
        algorithm: RlAlgorithm,
        weights: PolicyWeights,
        joint_rows: Mapping[str, int],
        on_chunk_start: Callable[[], None] | None = None,
        layout: HistoryLayout | None = None,
    ) -> None:
        """joint_rows: passed to Sampler as `max_joint_rows`.

        layout: layout of histories and recordings. None: the run has neither.
        on_chunk_start: function that is called after the weights of a chunk are loaded.
        """
        self._forward = CountingForward(model.denoise)
        self.sampler = Sampler(
            model=model,
            text_cache=texts,
            settings=settings,
            forward=self._forward_with_progress,
            max_joint_rows=joint_rows,
        )
        self.algorithm, self.weights, self._on_chunk_start = algorithm, weights, on_chunk_start
        self.walker = None
        if layout is not None:
            self.walker = HistoryWalker(self.sampler, layout, self.sampler.decode_to_uint8)
        self._progress: ReportProgress | None = None  # of the current chunk
        self._lock = threading.Lock()

    @torch.no_grad()
    def generate_chunk(self, task: ChunkTask, manifest: PolicyManifest, progress: ReportProgress) -> GeneratedChunk:
        """Denoise and decode a task's samples as one batch. Thread-safe.

        progress: function that is called with the number of completed forward passes.
        Raises TaskFailed if the task has a history or a recording, but this worker has no layout.
        """
        group = task.samples[0].group
        if self.walker is None and (group.history_seeds or group.recording is not None):
            raise TaskFailed("the task has a history or a recording, but this worker's recipe has none", fatal=True)
        with self._lock:
            self._progress = progress
            self._forward.reset_counts()
            publication = self.weights.load_publication(manifest)
            if self._on_chunk_start is not None:
                self._on_chunk_start()
            samples, plan = task.samples, self.algorithm.plan(task.step)
            if group.data is not None:
                group = replace(group, data=group.data.to(self.sampler.model.device))
            if self.walker is not None:
                group = self.walker.add_reference(self.walker.start_samples({0: group}, plan)[0])
            trajectory = self.sampler.generate(
                "rollout",
                [group.prompt] * len(samples),
                [sample.noise_seed for sample in samples],
                plan,
                seeds=[sample.seed for sample in samples],
                conditional_frames=stack_conditioning_frames([group] * len(samples)),
            )
            decoding = self.sampler.start_decoding(trajectory.clean_latents)
        images, is_finite = decoding.wait()  # on a GPU this overlaps with the next lane's denoising
        return GeneratedChunk(
            publication=publication, group=group, trajectory=trajectory, images=images, is_finite=is_finite
        )

    def _forward_with_progress(
        self, purpose: str, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None, /
    ) -> Tensor:
        done = self._forward.counts.total() + 1
        assert self._progress is not None
        self._progress(done, done)  # otherwise the trainer would requeue the chunk
        return self._forward(purpose, latents, sigma, conditioning, expert)
