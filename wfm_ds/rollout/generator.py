"""A rollout worker's work on one chunk: the weights, the denoise loop, the media. One at a time on the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.engine.forward import CountedForward
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.sampler import Sampler
from wfm_ds.models.text_cache import TextCache
from wfm_ds.pipes.worker import Progress
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.rollout.groups import conditional_latents
from wfm_ds.rollout.packing import ChunkWork
from wfm_ds.rollout.publisher import Manifest
from wfm_ds.rollout.weights import PolicyWeights
from wfm_ds.sampling.denoise import Trajectory
from wfm_ds.types import ConditionalFrames

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    publication: int  # of the weights behind every step of every sample
    trajectory: Trajectory
    media: npt.NDArray[np.uint8]  # [n,H,W,3] or [n,T,H,W,3]
    finite: Sequence[bool]


class Generator:
    """Shared by a worker's lanes; `make` may be called from any of them."""

    def __init__(
        self,
        model: DiffusionModel,
        texts: TextCache,
        settings: SamplingRecipe,
        algorithm: RlAlgorithm,
        weights: PolicyWeights,
        joint_rows: Mapping[str, int],
        begin: Callable[[], None] | None = None,
    ) -> None:
        """joint_rows: see Sampler. begin: called before each chunk's forwards, when its weights are there."""
        self._forward = CountedForward(model.denoise)
        self.sampler = Sampler(
            model=model, texts=texts, settings=settings, forward=self._reported, joint_rows=joint_rows
        )
        self.algorithm, self.weights, self._begin = algorithm, weights, begin
        self._progress: Progress | None = None  # of the chunk in hand
        self._lock = threading.Lock()

    @torch.no_grad()
    def make(self, work: ChunkWork, manifest: Manifest, progress: Progress) -> Generated:
        """Denoise and decode all members as one batch under one publication. `progress` counts forwards."""
        with self._lock:
            self._progress = progress
            self._forward.clear()
            publication = self.weights.use(manifest)
            if self._begin is not None:
                self._begin()
            members, device = work.samples, self.sampler.model.device
            given = conditional_latents([m.group for m in members])
            if given is not None:
                given = ConditionalFrames(given.latents.to(device), given.counts)
            trajectory = self.sampler.generate(
                "rollout",
                [m.prompt for m in members],
                [m.noise_seed for m in members],
                self.algorithm.plan(work.step),
                seeds=[m.seed for m in members],
                conditional_frames=given,
            )
            decoding = self.sampler.decoding(trajectory.clean)
        media, finite = decoding.wait()  # beside the next lane's denoising, on a GPU
        return Generated(publication=publication, trajectory=trajectory, media=media, finite=finite)

    def _reported(
        self, purpose: str, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None, /
    ) -> Tensor:
        """A forward of which the trainer hears: a chunk without progress is given to another worker."""
        done = self._forward.counts.total() + 1
        assert self._progress is not None
        self._progress(done, done)
        return self._forward(purpose, latents, sigma, conditioning, expert)
