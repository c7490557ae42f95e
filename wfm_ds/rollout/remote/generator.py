"""Generates the chunks of a rollout worker. Each device generates one chunk at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedChunk:
    publication: int  # RL step after which the weights of this chunk were published
    group: Group  # with the conditioning frames of the samples
    trajectory: Trajectory
    images: npt.NDArray[np.uint8]  # [n,H,W,3] or [n,T,H,W,3]
    is_finite: Sequence[bool]
    sound: npt.NDArray[np.float32] | None  # [n, channels, samples], see Sampler.decode_sound. None: not decoded


class CompletedForwards:
    """Reports how many forward passes of a chunk the device has completed.

    The launch of a forward pass does not count as progress: with CUDA graphs, the host launches a whole chunk within
    milliseconds and then waits until the device has computed it.
    """

    def __init__(self, device: torch.device, report: ReportProgress) -> None:
        self._device, self._report = device, report
        self._launched: deque[Any] = deque()  # one CUDA event for the end of each forward pass
        self._num_completed = 0

    def add_launch(self) -> None:
        """Add a forward pass that was launched just now. Reports completed forward passes without waiting."""
        if self._device.type != "cuda":
            self._report_one()
            return
        cuda: Any = torch.cuda  # its events are untyped
        event = cuda.Event(blocking=True)  # a wait for it does not keep a CPU core busy
        event.record(cuda.current_stream(self._device))
        self._launched.append(event)
        while self._launched and self._launched[0].query():
            self._launched.popleft()
            self._report_one()

    def wait(self) -> None:
        """Wait for all launched forward passes. Reports each one as soon as the device has completed it."""
        while self._launched:
            self._launched.popleft().synchronize()
            self._report_one()

    def _report_one(self) -> None:
        self._num_completed += 1
        self._report(self._num_completed, self._num_completed)


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
        """joint_rows: `max_joint_rows` of Sampler.

        on_chunk_start: function that is called after the weights of a chunk are loaded.
        layout: layout of histories and recordings, or None if the run has neither.
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
            self.walker = HistoryWalker(self.sampler, layout, self._decode_history)
        self._completed: CompletedForwards | None = None  # of the current chunk
        self._lock = threading.Lock()

    @torch.no_grad()
    def generate_chunk(
        self, task: ChunkTask, manifest: PolicyManifest, progress: ReportProgress, *, with_sound: bool = False
    ) -> GeneratedChunk:
        """Denoise and decode a task's samples as one batch. Thread-safe.

        progress: function that is called with the number of completed forward passes.
        with_sound: whether to decode the sound too.

        Raises TaskFailed if the task has a history or a recording, but this worker has no layout.
        """
        group = task.samples[0].group
        if self.walker is None and (group.history_seeds or group.recording is not None):
            raise TaskFailed("the task has a history or a recording, but this worker's recipe has none", fatal=True)
        with self._lock:
            completed = self._completed = CompletedForwards(self.sampler.model.device, progress)
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
            if with_sound:
                completed.wait()  # decoding of sound waits for the latents
            sound = self.sampler.decode_sound(trajectory.clean_latents) if with_sound else None
        # On a GPU, the next lane denoises in the meantime.
        completed.wait()
        images, is_finite = decoding.wait()
        return GeneratedChunk(
            publication=publication, group=group, trajectory=trajectory, images=images, is_finite=is_finite, sound=sound
        )

    def _forward_with_progress(self, purpose: str, *arguments: Any) -> Tensor:
        """Run a forward pass. arguments: the arguments of `denoise`."""
        velocity = self._forward(purpose, *arguments)
        assert self._completed is not None
        self._completed.add_launch()  # without reports, the trainer would requeue the chunk
        return velocity

    def _decode_history(self, latents: Tensor) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        assert self._completed is not None
        self._completed.wait()
        return self.sampler.decode_to_uint8(latents)
