"""Sampling options of `wfm generate` and `wfm evaluate`, and the sampler that they describe."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from wfm_ds.errors import UserError
from wfm_ds.recipe.shared_defaults import DEFAULT_EVAL_STEPS, DEFAULT_FPS, DEFAULT_GUIDANCE_SCALE, AttentionName
from wfm_ds.seeds import MAX_SEED

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from wfm_ds.data.clip_layout import ClipLayout
    from wfm_ds.models.base import DiffusionModel
    from wfm_ds.models.sampler import Sampler
    from wfm_ds.models.source_images import SourceSize
    from wfm_ds.monitoring.samples import GeneratedSample
    from wfm_ds.recipe.sampling import GuidanceRecipe, SamplingRecipe
    from wfm_ds.types import ConditioningFrames, Prompt

FORWARD_PURPOSE = "sample"  # name under which the forward passes of the sampler are counted
SHARED_KEYS = ("family", "revision", "guardrail", "prompt_template", "embedded_guidance", "attention")
KEY_OPTIONS = {
    **{f"model.{key}": f"--{key.replace('_', '-')}" for key in SHARED_KEYS},
    **{"model.path": "--model", "sampling.guidance_scale": "--guidance"},
    **{"sampling.eval_grid": "--grid", "sampling.grid_shift": "--shift"},
}
MAX_DIGITS = 7  # maximum digits of seeds, steps, frames and other counts


def parse_natural(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 0")
    return int(text)


def parse_seed(text: str) -> int:
    seed = parse_natural(text)
    if seed > MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is above the largest seed {MAX_SEED}")
    return seed


def parse_positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    if len(text) > MAX_DIGITS:
        raise argparse.ArgumentTypeError(f"{text!r} is too large")
    return int(text)


def parse_above_zero(text: str) -> float:
    return parse_number(text, lambda value: 0 < value < math.inf, "a number > 0")


def parse_guidance(text: str) -> float:
    return parse_number(text, lambda value: 1 <= value < math.inf, "a number >= 1")


def parse_guidance_settings(text: str) -> GuidanceRecipe:
    """Parse a YAML map with keys of the recipe section `sampling.guidance`."""
    import yaml
    from pydantic import ValidationError

    from wfm_ds.recipe.sampling import GuidanceRecipe

    try:
        return GuidanceRecipe.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not YAML such as '{{interval: [0.2, 0.9]}}'") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or repr(text)
        raise argparse.ArgumentTypeError(f"{key}: {first['msg'].removeprefix('Value error, ')}") from error


def parse_number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value


def parse_source_size(text: str) -> SourceSize:
    if text in ("target", "stock"):
        return "target" if text == "target" else "stock"
    height, separator, width = text.partition("x")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not target, stock or a size such as 512x512")
    return parse_positive(height), parse_positive(width)


def add_sampling_options(p: argparse.ArgumentParser, *, requires_size: bool = True, default_batch: str = "1") -> None:
    """Add the sampling options to `p`.

    requires_size: make --height and --width required. default_batch: default of --batch, for the help text.
    """
    p.add_argument("--height", type=parse_positive, required=requires_size, help="pixels")
    p.add_argument("--width", type=parse_positive, required=requires_size, help="pixels")
    p.add_argument("--frames", type=parse_positive, default=1, help="frames of a video (default 1)")
    p.add_argument(
        "--clips",
        type=parse_positive,
        default=1,
        metavar="K",
        help="clips of --frames frames per video; each continues the last frames of the one before (default 1)",
    )
    p.add_argument(
        "--fps", type=parse_above_zero, default=DEFAULT_FPS, help=f"frame rate of a video (default {DEFAULT_FPS:g})"
    )
    p.add_argument(
        "--steps",
        type=parse_positive,
        help=f"denoising steps (default: those in call.json of the model or LoRA, else {DEFAULT_EVAL_STEPS})",
    )
    p.add_argument(
        "--grid",
        choices=["stock", "even"],
        help="noise levels of the steps (default: those in call.json, else stock: the pipeline's)",
    )
    p.add_argument(
        "--shift", type=parse_above_zero, metavar="S", help="timestep shift of --grid even (default: the pipeline's)"
    )
    p.add_argument(
        "--solver",
        choices=["ode", "dpm2", "cps"],
        help="first order, second order, or new noise in each step (default: the pipeline's)",
    )
    p.add_argument(
        "--guidance",
        type=parse_guidance,
        metavar="W",
        help=f"guidance scale; 1: no guidance (default: that in call.json, else {DEFAULT_GUIDANCE_SCALE:g})",
    )
    p.add_argument(
        "--guidance-low",
        type=parse_guidance,
        metavar="W",
        help="guidance scale of a second expert (default: --guidance)",
    )
    p.add_argument(
        "--guidance-settings",
        type=parse_guidance_settings,
        metavar="YAML",
        help="keys of the recipe section sampling.guidance, such as '{interval: [0.2, 0.9]}'",
    )
    p.add_argument(
        "--guidance-batch",
        choices=["separate", "joint"],
        default="separate",
        help="joint: conditional and unconditional in one batch",
    )
    p.add_argument(
        "--negative-prompt",
        metavar="TEXT",
        help="negative prompt of prompts without one (default: that in call.json, else the family's)",
    )
    p.add_argument(
        "--batch", type=parse_positive, default=1, help=f"samples denoised at once (default {default_batch})"
    )
    p.add_argument(
        "--max-sequence-length",
        type=parse_positive,
        metavar="N",
        help="maximum number of text tokens (default: that in call.json, else the pipeline's)",
    )
    p.add_argument(
        "--embedded-guidance",
        type=parse_above_zero,
        metavar="G",
        help="guidance scale passed to guidance-distilled networks such as FLUX.2-dev (default: that in call.json, "
        "else the pipeline's)",
    )
    p.add_argument(
        "--source-size",
        type=parse_source_size,
        metavar="SIZE",
        help="size of the images to edit: target (that of the sample), stock (that of the pipeline) or HEIGHTxWIDTH "
        "(default: that of the run, else target)",
    )
    p.add_argument("--family", metavar="package.module:Class", help="user-defined model family (docs/own_model.md)")
    p.add_argument("--prompt-template", choices=["stock", "none"], help="prompt template of pipelines that have one")
    p.add_argument(
        "--guardrail", choices=["stock", "off"], default="stock", help="guardrail of pipelines that have one"
    )
    p.add_argument(
        "--attention",
        choices=get_args(AttentionName),
        default="auto",
        help="attention kernel (docs/performance.md; default auto)",
    )
    p.add_argument(
        "--compile", action="store_true", help="compile the denoiser's blocks; worthwhile for many samples of one size"
    )
    p.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="model dtype (default: bfloat16 on a GPU, else float32)"
    )
    p.add_argument(
        "--vae-dtype", choices=["bfloat16", "float32"], default="float32", help="VAE dtype (default: float32)"
    )
    p.add_argument("--device", help="default: cuda if available, else cpu")


def check_options(args: argparse.Namespace) -> None:
    if args.guidance_low is not None and args.guidance == 1:
        raise UserError("--guidance-low: needs --guidance above 1")
    settings = args.guidance_settings
    if args.guidance == 1 and settings is not None and settings != type(settings)():
        raise UserError("--guidance-settings: needs --guidance above 1")
    if args.guidance_batch == "joint" and args.guidance == 1:
        raise UserError("--guidance-batch: joint needs --guidance above 1")
    if args.grid == "even" and args.solver == "dpm2":
        raise UserError("--solver: dpm2 does not work with --grid even; omit it")
    if args.solver == "cps" and (args.grid != "even" or args.steps < 2):
        raise UserError("--solver: cps needs --grid even and at least 2 --steps; set --solver ode")
    if args.shift is not None and args.grid != "even":
        raise UserError("--shift: needs --grid even")


def require_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        raise UserError(f"{folder} is not empty: choose another --out, or empty it")


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
    import torch

    from wfm_ds.checkpoint.adapter_loading import load_adapter
    from wfm_ds.engine import attention_kernels
    from wfm_ds.engine.block_compilation import compile_blocks
    from wfm_ds.models import registry
    from wfm_ds.models.assets.loading import select_device
    from wfm_ds.models.assets.text_cache import TextCache
    from wfm_ds.models.sampler import CountingForward, Sampler
    from wfm_ds.recipe.sampling import CPS_EVAL_NOISE, GuidanceRecipe, SamplingRecipe

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
    settings = SamplingRecipe(
        height=args.height,
        width=args.width,
        num_frames=args.frames,
        fps=args.fps,
        eval_steps=args.steps,
        eval_grid=args.grid,
        grid_shift=args.shift,
        eval_solver=args.solver,
        solver="cps" if args.solver == "cps" else "ode",
        noise_level=CPS_EVAL_NOISE if args.solver == "cps" else None,
        guidance_scale=args.guidance,
        guidance_scale_low=args.guidance_low,
        guidance=args.guidance_settings or GuidanceRecipe(),
        guidance_batch=args.guidance_batch,
        negative_prompt=args.negative_prompt,
    )
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
    from wfm_ds.types import SOURCES

    if model.input_names.isdisjoint(SOURCES):
        return
    height, width = model.source_image_size(settings.height, settings.width)
    try:
        model.latent_shape(height, width)
    except ValueError as error:
        raise UserError(f"--source-size: {height}x{width}: {error}") from error


def choose_layout(sampler: Sampler, num_clips: int, num_latents: int = 1) -> ClipLayout:
    """Return the layout of a sample's clips. num_latents: see choose_clip_layout.

    Raises UserError if the model cannot continue a clip.
    """
    from wfm_ds.data.clip_layout import ClipLayout
    from wfm_ds.models.clips import choose_clip_layout

    if num_clips == 1:
        return ClipLayout(sampler.settings.num_frames)
    try:
        return choose_clip_layout(sampler.model, sampler.settings, num_latents)
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
    load_frames: Callable[[Sequence[Prompt]], ConditioningFrames] | None = None,
    layout: ClipLayout | None = None,
    num_clips: int = 1,
) -> Iterator[tuple[GeneratedSample, list[SampleClip]]]:
    """Yield (sample, its clips) in the order of `items`.

    items: (prompt, seed) of each sample. load_frames: function that returns conditioning frames. layout: needed if
    num_clips is above 1. The inputs of a prompt, such as actions, must cover all its clips.
    """
    from wfm_ds.chunks import split_into_chunks
    from wfm_ds.data.clip_layout import ClipLayout
    from wfm_ds.models.clips import generate_clips
    from wfm_ds.monitoring.samples import GeneratedSample, select_images

    settings, plan = sampler.settings, sampler.evaluation_plan()
    layout = layout or ClipLayout(settings.num_frames)
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
            yield (
                sample,
                [SampleClip(clip.prompts[i], clip.pixels[i], clip.is_finite[i], sample.sound) for clip in clips],
            )


def sampling_summary(settings: SamplingRecipe) -> str:
    scales = f"guidance {settings.guidance_scale:g}"
    if settings.guidance_scale_low is not None:
        scales += f" and {settings.guidance_scale_low:g}"
    frames = f", {settings.num_frames} frames at {settings.fps:g} fps" if settings.num_frames > 1 else ""
    levels = " at even noise levels" if settings.eval_grid == "even" else ""
    return f"{settings.eval_steps} steps{levels}, {scales}, {settings.width} x {settings.height}{frames}"
