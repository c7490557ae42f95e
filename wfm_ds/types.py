"""Data types shared by data loading, rollouts, rewards and training. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Conditioning: TypeAlias = "dict[str, Tensor]"
"""{name: tensor [B, ...]}: text embeddings, masks and other inputs of the denoiser for B samples."""
FIRST_FRAME = "first_frame"
SOURCE = "source"
SOURCES = (SOURCE, "source_2", "source_3")  # inputs of editing models: images that the prompt refers to
MASK = "mask"  # image for rewards; an edit may change the white pixels
IMAGE_INPUTS = frozenset({*SOURCES, MASK})
CONTROL = "control"  # input video that guides the generated video, such as edges, depth or a video to fill in
CONTROL_MASK = "control_mask"  # input video; bright pixels are generated, dark pixels keep `control`
VIDEO_INPUTS = frozenset({CONTROL, CONTROL_MASK})
MEDIA_INPUTS = IMAGE_INPUTS | VIDEO_INPUTS  # inputs with pixels, which are large
DEFAULT_ADAPTER = "default"  # the adapter that a LoRA run trains and exports


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A text prompt with its metadata and other conditioning inputs."""

    id: str  # stable across runs, such as "ocr/train/17"
    text: str
    negative_text: str | None = None
    viewpoint: str | None = None  # position of the camera in the model's caption (data.viewpoint)
    metadata: Mapping[str, Any] = field(default_factory=dict)  # OCR target, GenEval spec, ...; passed to the rewards
    inputs: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict, compare=False)
    """Conditioning inputs in addition to the text, for F frames and D numbers per action.

    For example: actions [F-1,D], c2w [F,4,4] and intrinsics [F,4], all float32. FIRST_FRAME: pixels [H,W,3] of the
    first frame, float32 from 0 to 255, for networks that are conditioned on pixels. IMAGE_INPUTS: uint8 pixels [h,w,3].
    VIDEO_INPUTS: uint8 pixels [F,H,W,3].
    """


@dataclass(frozen=True, slots=True)
class SoundClip:
    """The frames of a video clip and their sound."""

    frames: npt.NDArray[np.uint8]  # [F,H,W,3]
    sound: npt.NDArray[np.float32]  # [2, samples], stereo, in [-1, 1]; as long as the frames


@dataclass(frozen=True, slots=True)
class ConditioningFrames:
    """Clean latent frames that condition samples: sample i sees the first counts[i] frames of latents[i]."""

    latents: Tensor  # [B,C,T,h,w] float32
    counts: Tensor  # [B] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One stochastic denoising step of a sample, stored for training. All tensors are float32."""

    index: int  # of the step in the sampling plan
    latents: Tensor  # [C,h,w] or [C,T,h,w] before the step; may share memory with `next_latents` of the step before
    next_latents: Tensor  # after the step, as sampled
    log_prob: Tensor  # scalar: log-probability of next_latents under the rollout policy, mean over elements
    mean: Tensor | None = None  # mean of the Gaussian from which next_latents is drawn; None if it is not needed
    passes: Mapping[str, Tensor] = field(default_factory=dict)  # {guidance pass: its prediction at `latents`}, if kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One generated sample with the data that training needs."""

    sample_id: str  # derived from (run, step, prompt, index in the group)
    group_id: str  # shared by the samples of one prompt in one RL step
    prompt: Prompt
    seed: int  # seed of all random numbers of the sample
    noise_seed: int  # seed of the initial noise; may be shared by a group
    clean_latents: Tensor  # [C,h,w] or [C,T,h,w] float32
    transitions: Sequence[Transition] = ()  # at the steps that the sampling plan stores, ascending
    states: Mapping[int, Tensor] = field(default_factory=dict)  # step -> input latents of the denoiser, float32
    predictions: Mapping[int, Tensor] = field(default_factory=dict)  # step -> predicted clean latents, float32
    is_finite: bool = True  # False: the generated latents were not finite, and were replaced
    data_latents: Tensor | None = (
        None  # clean latents of the data sample with this prompt as caption; shape of clean_latents
    )
    num_conditioning_frames: int = 0  # leading latent frames of `data_latents` used as conditioning


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward's score of one sample: a finite value, or the reason why scoring failed."""

    sample_id: str
    reward: str
    value: float | None = None
    failure: str | None = None
    seconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.value is None) == (self.failure is None):
            raise ValueError(
                f"{self.sample_id}: a score needs a value or a failure, got {self.value!r}, {self.failure!r}"
            )
        if self.value is not None and not np.isfinite(self.value):
            raise ValueError(f"{self.sample_id}: non-finite value {self.value} of {self.reward}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One image [1,H,W,3] or video [T,H,W,3] of a MediaBatch, with its prompt and metadata."""

    sample_id: str
    frames: npt.NDArray[np.uint8]  # [T,H,W,3]
    fps: float | None
    prompt: str
    metadata: Mapping[str, Any]
    reward: str = ""  # name of the reward in the returned scores; set by the worker
    inputs: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # conditioning inputs such as actions
    reference: npt.NDArray[np.uint8] | None = None  # [R,H,W,3] recording of the last R frames
    images: Mapping[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """Input images [H,W,3] in the size of the sample, such as `source` and `mask` (IMAGE_INPUTS)."""
    sound: npt.NDArray[np.float32] | None = None  # [channels, samples] of a video with sound, in [-1, 1]
    sound_rate: int | None = None  # samples per second of `sound`

    def score(self, value: float, **parts: float) -> Score:
        """Return a Score with this value, or a failed Score if the value is not finite."""
        if not np.isfinite(value):
            return self.fail(f"non-finite value {value}")
        return Score(sample_id=self.sample_id, reward=self.reward, value=float(value), parts=parts)

    def fail(self, reason: str) -> Score:
        return Score(sample_id=self.sample_id, reward=self.reward, failure=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaBatch:
    """A batch of uint8 images [B,H,W,3] or videos [B,T,H,W,3] with their prompts. Iterating yields MediaItems."""

    media: npt.NDArray[np.uint8]
    sample_ids: Sequence[str]
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    fps: float | None = None
    reward: str = ""
    inputs: Sequence[Mapping[str, npt.NDArray[np.float32]]] = ()  # one per item, or empty
    references: Sequence[npt.NDArray[np.uint8] | None] = ()  # one per item, or empty: recording of its last frames
    images: Sequence[Mapping[str, npt.NDArray[np.uint8]]] = ()  # one per item, or empty: input images [H,W,3] by name
    sounds: Sequence[npt.NDArray[np.float32] | None] = ()  # one per item, or empty: sound [channels, samples]
    sound_rate: int | None = None  # samples per second of `sounds`

    def __post_init__(self) -> None:
        count = len(self.sample_ids)
        if self.media.dtype != np.uint8 or self.media.ndim not in (4, 5) or self.media.shape[-1] != 3:
            raise ValueError(f"media must be uint8 [B,H,W,3] or [B,T,H,W,3], got {self.media.dtype} {self.media.shape}")
        if not len(self.prompts) == len(self.metadata) == len(self.media) == count:
            raise ValueError(
                f"{len(self.media)} media, {count} sample ids, {len(self.prompts)} prompts and "
                f"{len(self.metadata)} metadata do not match"
            )
        sizes = {name: len(getattr(self, name)) for name in ("inputs", "references", "images", "sounds")}
        if not {0, count}.issuperset(sizes.values()):
            found = ", ".join(f"{size} {name}" for name, size in sizes.items())
            raise ValueError(f"{found} do not match {count} samples")

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
                reference=self.references[i] if len(self.references) else None,
                images=self.images[i] if len(self.images) else {},
                sound=self.sounds[i] if len(self.sounds) else None,
                sound_rate=self.sound_rate,
            )
