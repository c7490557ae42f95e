"""Load the sampler that sampling options describe, and generate samples with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from wfm_ds.checkpoint.adapter_loading import load_adapter
from wfm_ds.chunks import split_into_chunks
from wfm_ds.cli.sampling_options import SAMPLING_OPTIONS
from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.engine import attention_kernels
from wfm_ds.engine.block_compilation import compile_blocks
from wfm_ds.errors import UserError
from wfm_ds.models import registry
from wfm_ds.models.assets.loading import select_device
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.clips import choose_clip_layout, generate_clips
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.monitoring.samples import GeneratedSample, select_images
from wfm_ds.recipe.sampling import CPS_EVAL_NOISE, GuidanceRecipe, SamplingRecipe
from wfm_ds.types import SOURCES, ConditioningFrames, Prompt

FORWARD_PURPOSE = "sample"  # name under which the forward passes of the sampler are counted


def memory_advice(args: argparse.Namespace, device: torch.device) -> list[str]:
    """Return the options to change if generation runs out of memory, cheapest first."""
    joint = ["--guidance-batch separate"] if args.guidance_batch == "joint" else []
    batch = [f"--batch below {args.batch}"] if args.batch > 1 else []
    vae = ["--vae-dtype bfloat16"] if args.vae_dtype == "float32" else []
    dtype = [] if is_low_precision(args, device) else ["--dtype bfloat16"]
    return [*joint, *batch, *vae, *dtype, "--height, --width or --frames"]


def is_low_precision(args: argparse.Namespace, device: torch.device) -> bool:
    return args.dtype == "bfloat16" or (args.dtype is None and device.type == "cuda")


def load_sampler(args: argparse.Namespace, inputs: Sequence[str] = ()) -> Sampler:
    """Load the model and its LoRA, and return a sampler with the settings in `args`.

    args: filled by `call_defaults.fill_from_call`. inputs: names of the conditioning inputs that the user sets. Raises
    UserError if the settings do not fit the model.
    """
    device = select_device(args.device)
    dtype = torch.bfloat16 if is_low_precision(args, device) else torch.float32
    model = registry.load_model(
        args.model or args.pipeline,
        dtype=dtype,
        device=device,
        vae_dtype=torch.bfloat16 if args.vae_dtype == "bfloat16" else torch.float32,
        user_family=args.family,
        revision=args.revision,
        max_sequence_length=args.max_sequence_length,
        prompt_template=args.prompt_template,
        guardrail=args.guardrail,
        fps=args.fps,
        inputs=inputs,
        embedded_guidance=args.embedded_guidance,
        source_size=args.source_size or "target",
    )
    if args.guidance_low is not None and len(model.sigma_ranges) == 1:
        raise UserError(f"--guidance-low: {model.path} has no second expert; omit it")
    if args.lora is not None:
        load_adapter(model, args.lora)
    attention_kernels.use_kernel(
        model.denoiser, attention_kernels.choose_kernel(args.attention, model.denoiser, dtype, device, trains=False)
    )
    if args.compile:
        compile_blocks(model.denoiser, model.block_classes)
    values: dict[str, Any] = {key: getattr(args, option) for option, key in SAMPLING_OPTIONS.items()}
    values["guidance"] = args.guidance_settings or GuidanceRecipe()
    if args.solver == "cps":
        values |= {"solver": "cps", "noise_level": CPS_EVAL_NOISE}
    settings = SamplingRecipe(**values)
    forward = CountingForward(model.denoise)
    joint_rows = {FORWARD_PURPOSE: 2 * args.batch} if args.guidance_batch == "joint" else {}
    sampler = Sampler(
        model=model, text_cache=TextCache(model), settings=settings, forward=forward, max_joint_rows=joint_rows
    )
    try:
        _ = sampler.latent_shape
    except ValueError as error:
        raise UserError(str(error)) from error
    check_source_size(model, settings)
    sampler.evaluation_plan()
    model.check_sampling(settings)
    return sampler


def check_source_size(model: DiffusionModel, settings: SamplingRecipe) -> None:
    """Raise UserError if the model has source images, but cannot encode images of their size."""
    if model.input_names.isdisjoint(SOURCES):
        return
    height, width = model.source_image_size(settings.height, settings.width)
    try:
        model.latent_shape(height, width)
    except ValueError as error:
        raise UserError(f"--source-size: {height}x{width}: {error}") from error


def choose_layout(sampler: Sampler, num_clips: int) -> ClipLayout:
    """Return the layout of a sample's clips. Raises UserError if the model cannot continue a clip."""
    if num_clips == 1:
        return ClipLayout(sampler.settings.num_frames)
    try:
        return choose_clip_layout(sampler.model, sampler.settings, num_latents=1)
    except UserError as error:
        raise UserError(f"--clips: {error}") from error


@dataclass(frozen=True, slots=True)
class SampleClip:
    """One clip of a generated sample. An image counts as one clip."""

    prompt: Prompt  # with the inputs of this clip
    pixels: npt.NDArray[np.uint8]  # image [H,W,3] or video [F,H,W,3]
    is_finite: bool  # False if the latents of this or an earlier clip were not finite
    sound: npt.NDArray[np.float32] | None  # [channels, samples] of a video with sound


def iterate_samples(
    sampler: Sampler,
    items: Sequence[tuple[Prompt, int]],
    batch: int,
    load_frames: Callable[[Sequence[Prompt]], ConditioningFrames] | None,
    layout: ClipLayout,
    num_clips: int,
) -> Iterator[tuple[GeneratedSample, list[SampleClip]]]:
    """Yield (sample, its clips) in the order of `items`.

    items: (prompt, seed) of each sample. load_frames: function that returns conditioning frames. The inputs of a
    prompt, such as actions, must cover all its clips.
    """
    settings, plan = sampler.settings, sampler.evaluation_plan()
    fps = settings.fps if sampler.model.is_video else None
    for part in split_into_chunks(items, batch):
        prompts, seeds = [prompt for prompt, _ in part], [seed for _, seed in part]
        frames = None if load_frames is None else load_frames(prompts)
        clips = list(generate_clips(sampler, FORWARD_PURPOSE, prompts, seeds, plan, layout, num_clips, frames))
        # a sample with sound has only one clip
        videos, sound = layout.join([clip.pixels for clip in clips]), clips[0].sound
        for i, (prompt, seed) in enumerate(part):
            sample = GeneratedSample(
                prompt=prompt.text,
                prompt_id=prompt.id,
                seed=seed,
                pixels=videos[i],
                fps=fps,
                images=select_images(prompt),
                sound=None if sound is None else sound[i],
                sound_rate=sampler.model.sound_rate,
            )
            parts = [SampleClip(clip.prompts[i], clip.pixels[i], clip.is_finite[i], sample.sound) for clip in clips]
            yield sample, parts


def sampling_summary(settings: SamplingRecipe) -> str:
    scales = f"guidance {settings.guidance_scale:g}"
    if settings.guidance_scale_low is not None:
        scales += f" and {settings.guidance_scale_low:g}"
    frames = f", {settings.num_frames} frames at {settings.fps:g} fps" if settings.num_frames > 1 else ""
    levels = " at even noise levels" if settings.eval_grid == "even" else ""
    return f"{settings.eval_steps} steps{levels}, {scales}, {settings.width} x {settings.height}{frames}"
