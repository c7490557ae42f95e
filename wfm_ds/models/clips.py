"""Long videos as a sequence of clips. The last frames of a clip are encoded as the first frames of the next clip."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.errors import ModelError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.models.sampler import Sampler
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.sampling.denoise import SamplingPlan
from wfm_ds.seeds import derive_seed
from wfm_ds.types import FIRST_FRAME, ConditioningFrames, Prompt

Videos: TypeAlias = npt.NDArray[np.uint8]
"""Videos as uint8 [batch, frames, height, width, 3]."""
DecodeFunction: TypeAlias = Callable[[Tensor], tuple[Videos, list[bool]]]
"""Decodes latents like Sampler.decode_to_uint8. Returns (videos, flags). A flag is False if a video's latents contain
non-finite values."""


def choose_clip_layout(model: DiffusionModel, settings: SamplingRecipe, num_latents: int = 1) -> ClipLayout:
    """Return the layout of a long video's clips. Each clip is conditioned on the last frames of the previous clip.

    num_latents: number of conditioning frames of a clip, in latent frames.
    Raises ModelError if the model does not support this number, or if the conditioning frames cover the whole clip.
    """
    if num_latents < 1 or num_latents not in model.conditioning_frame_counts:
        raise ModelError(
            f"{model.path}: {model.family} cannot continue a clip, it does not support {num_latents} conditioning "
            "frames: generate one clip"
        )
    shape = model.latent_shape(settings.height, settings.width, settings.num_frames)
    if shape[1] <= num_latents:
        raise ModelError(
            f"clips of {settings.num_frames} frames are too short to be continued: {shape[1]} latent frames, of which "
            f"{num_latents} would be conditioning frames; increase the number of frames"
        )
    frames_per_latent = (settings.num_frames - 1) // (shape[1] - 1)
    return ClipLayout(settings.num_frames, 1 + (num_latents - 1) * frames_per_latent, num_latents)


def encode_last_frames(sampler: Sampler, videos: Videos, layout: ClipLayout) -> Tensor:
    """Encode the last `layout.overlap` frames of each video, as conditioning frames for the next clip.

    Returns float32 latents with the shape of a whole clip, on the model's device. Latent frames after the first
    `layout.num_latents` are zero.
    """
    latents = sampler.model.encode_uint8(list(videos[:, -layout.overlap :]))
    return pad_num_frames(latents, sampler.latent_shape[1])


def condition_on_last_frames(
    sampler: Sampler, prompts: Sequence[Prompt], videos: Videos, layout: ClipLayout
) -> tuple[list[Prompt], ConditioningFrames | None]:
    """Return the prompts and conditioning frames of clips that continue `videos`.

    If `uses_clean_frames` is False, the prompts contain the last frame of each video as the input FIRST_FRAME, and the
    conditioning frames are None.
    """
    if not sampler.model.uses_clean_frames:
        last = videos[:, -1].astype(np.float32)
        return [
            replace(prompt, inputs={**prompt.inputs, FIRST_FRAME: frame})
            for prompt, frame in zip(prompts, last, strict=True)
        ], None
    counts = torch.full((len(prompts),), layout.num_latents, dtype=torch.int64)
    return list(prompts), ConditioningFrames(encode_last_frames(sampler, videos, layout), counts)


def reconstruct_clip(
    sampler: Sampler, recording: npt.NDArray[np.uint8], layout: ClipLayout, clip: int
) -> npt.NDArray[np.uint8]:
    """Encode and decode one clip of a recording with the VAE. Return the frames after the conditioning frames.

    recording: uint8 [frames, height, width, 3]. clip: index of the clip.
    """
    start = layout.first_frame(clip)
    latents = sampler.model.encode_uint8([recording[start : start + layout.num_frames]])
    videos, _ = sampler.decode_to_uint8(latents)
    frames: npt.NDArray[np.uint8] = videos[0, layout.overlap :]
    return frames


def clip_seed(seed: int, clip: int) -> int:
    """Return the noise seed of clip number `clip` in a long video. Clip 0 uses `seed` itself."""
    return seed if clip == 0 else derive_seed(seed, "clip", clip)


@dataclass(frozen=True, slots=True)
class GeneratedClips:
    """One clip of each long video in a batch."""

    prompts: Sequence[Prompt]  # with the inputs of this clip
    pixels: Videos
    is_finite: Sequence[bool]  # False if the latents of this or an earlier clip of the video were not finite
    sound: npt.NDArray[np.float32] | None  # [batch, channels, samples], see Sampler.decode_sound


def generate_clips(
    sampler: Sampler,
    purpose: str,
    prompts: Sequence[Prompt],
    noise_seeds: Sequence[int],
    plan: SamplingPlan,
    layout: ClipLayout,
    num_clips: int,
    conditional_frames: ConditioningFrames | None = None,
    *,
    decode: DecodeFunction | None = None,
) -> Iterator[GeneratedClips]:
    """Generate long videos clip by clip. Yields one clip of all videos at a time.

    prompts: one per long video. Inputs per frame, such as actions, must cover all frames of the long video.
    noise_seeds: one per long video, see `clip_seed`.
    conditional_frames: conditioning frames of the first clip.
    decode: function that decodes latents, by default Sampler.decode_to_uint8. It must return videos on every rank that
    runs the forward passes.
    """
    decode, frames = decode or sampler.decode_to_uint8, conditional_frames
    pixels, is_finite = np.empty(0, np.uint8), [True] * len(prompts)
    for clip in range(num_clips):
        cut = [layout.slice_prompt(prompt, clip) for prompt in prompts]
        if clip > 0:
            cut, frames = condition_on_last_frames(sampler, cut, pixels, layout)
        seeds = [clip_seed(seed, clip) for seed in noise_seeds]
        latents = sampler.generate(purpose, cut, seeds, plan, conditional_frames=frames).clean_latents
        pixels, finite = decode(latents)
        is_finite = [before and now for before, now in zip(is_finite, finite, strict=True)]
        yield GeneratedClips(cut, pixels, is_finite, sampler.decode_sound(latents))
