"""The things that flow between data, rollout, rewards and training. No torch at import time, checks only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    Conditioning: TypeAlias = dict[str, Tensor]
    """Text embeddings and masks by name, batch first."""


FIRST_FRAME = "first_frame"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A description of what a sample shall show."""

    id: str  # stable over runs, e.g. "ocr/train/17"
    text: str
    negative_text: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)  # OCR target, GenEval spec, ...: travels to the rewards
    inputs: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict, compare=False)
    """What a sample is told besides the text (data/inputs.py): actions [F-1,D], c2w [F,4,4], intrinsics [F,4], ..., and
    under FIRST_FRAME the levels [H,W,3], 0 to 255, that its video begins with, for networks that are told pixels."""


@dataclass(frozen=True, slots=True)
class ConditionalFrames:
    """The first counts[i] latent frames of latents[i] are known, not noisy, to sample i (conditional_frames.py)."""

    latents: Tensor  # [B,C,T,h,w] float32
    counts: Tensor  # [B] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One stochastic denoise step of a sample, kept for training; float32."""

    index: int  # of the step in the rollout's plan
    latents: Tensor  # [C,h,w] or [C,T,h,w] before the step; the next transition's is often the same memory
    next_latents: Tensor  # after it, as drawn
    log_prob: Tensor  # [], of next_latents under the policy that drew it: a mean over elements
    mean: Tensor | None = None  # of the Gaussian that next_latents was drawn from, if the algorithm needs it


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One generated sample, as the training step needs it."""

    sample_id: str  # made of (run, step, prompt, member): equal ids mean equal work
    group_id: str  # siblings: one prompt in one RL step
    prompt: Prompt
    seed: int  # the sample's own: what is drawn for it alone follows from it
    noise_seed: int  # of its initial noise
    clean_latents: Tensor  # [C,h,w] or [C,T,h,w] float32
    transitions: Sequence[Transition] = ()  # at the steps that the algorithm's plan stores, ascending
    states: Mapping[int, Tensor] = field(default_factory=dict)  # by step: the latents that the denoiser saw, float32
    data: Tensor | None = None  # clean latents of the medium that its prompt is the caption of, shaped like its own
    num_conditional_frames: int = 0  # first latent frames of `data` that it was given (models/conditional_frames.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one sample by one reward: a finite number or the reason why there is none, never both."""

    sample_id: str
    reward: str
    value: float | None = None
    failure: str | None = None
    seconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.value is None) == (self.failure is None):
            raise ValueError(
                f"{self.sample_id}: a score has a value or a failure, got {self.value!r}, {self.failure!r}"
            )
        if self.value is not None and not np.isfinite(self.value):
            raise ValueError(f"{self.sample_id}: the value {self.value} of {self.reward} is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One image (T = 1) or video of a batch."""

    sample_id: str
    frames: npt.NDArray[np.uint8]  # [T,H,W,3]
    fps: float | None
    prompt: str
    metadata: Mapping[str, Any]
    reward: str = ""  # filled in by the scorer: the name under which scores are returned
    inputs: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # what the sample was told: actions, ..

    def scored(self, value: float, **parts: float) -> Score:
        """A score with this value; a value that is not finite becomes a failure that names it."""
        if not np.isfinite(value):
            return self.failed(f"the value {value} is not finite")
        return Score(sample_id=self.sample_id, reward=self.reward, value=float(value), parts=parts)

    def failed(self, reason: str) -> Score:
        return Score(sample_id=self.sample_id, reward=self.reward, failure=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaBatch:
    """Images [B,H,W,3] or videos [B,T,H,W,3], uint8, with what was asked for. Iterates its items in order."""

    media: npt.NDArray[np.uint8]
    sample_ids: Sequence[str]
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    fps: float | None = None
    reward: str = ""
    inputs: Sequence[Mapping[str, npt.NDArray[np.float32]]] = ()  # of each item, or of none

    def __post_init__(self) -> None:
        count = len(self.sample_ids)
        if self.media.dtype != np.uint8 or self.media.ndim not in (4, 5) or self.media.shape[-1] != 3:
            raise ValueError(f"media must be uint8 [B,H,W,3] or [B,T,H,W,3], got {self.media.dtype} {self.media.shape}")
        if not len(self.prompts) == len(self.metadata) == len(self.media) == count:
            raise ValueError(
                f"{len(self.media)} media, {count} sample ids, {len(self.prompts)} prompts and "
                f"{len(self.metadata)} metadata do not belong together"
            )
        if len(self.inputs) not in (0, count):
            raise ValueError(f"{len(self.inputs)} inputs do not belong to {count} samples")

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __iter__(self) -> Iterator[MediaItem]:
        for i, sample_id in enumerate(self.sample_ids):
            frames = self.media[i] if self.media.ndim == 5 else self.media[i][None]
            yield MediaItem(
                sample_id=sample_id,
                frames=frames,
                fps=self.fps,
                prompt=self.prompts[i],
                metadata=self.metadata[i],
                reward=self.reward,
                inputs=self.inputs[i] if self.inputs else {},
            )
