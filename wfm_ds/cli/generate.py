"""`wfm generate`: generate images or videos for prompts, from a pipeline or an export of a run.

With the seeds, steps and guidance of a run's validation, it samples with the same noise as the validation. Exit codes:
0 if successful, 2 for invalid arguments, prompt file, model or folder (one message), 1 for any other error.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser, run_command
from wfm_ds.recipe.shared_defaults import DEFAULT_EVAL_STEPS, DEFAULT_FPS, DEFAULT_GUIDANCE_SCALE, AttentionName

if TYPE_CHECKING:
    import torch

    from wfm_ds.models.sampler import Sampler
    from wfm_ds.monitoring.samples import GeneratedSample
    from wfm_ds.recipe.sampling import SamplingRecipe
    from wfm_ds.types import Prompt

PAGE_NAME = "index.html"
FORWARD_PURPOSE = "sample"  # counts its forward passes under this name
NOT_FINITE_MESSAGE = "non-finite latents: this sample is invalid"


def parser() -> CommandParser:
    p = CommandParser(
        prog="wfm generate",
        description="Generate each prompt with each seed; write files, samples.jsonl and index.html.",
        epilog="Example: %(prog)s --model /models/sd35 --lora outputs/run/safetensors/step_30/lora "
        "--prompts prompts.txt --height 512 --width 512 --out samples",
    )
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a pipeline folder, owner/name on the Hugging Face Hub, or tiny:FAMILY")
    which.add_argument(
        "--pipeline", metavar="DIR", help="an export of a full-weight run, safetensors/step_N; or s3://..."
    )
    p.add_argument("--lora", metavar="DIR", help="an export of a LoRA run, safetensors/step_N/lora; or s3://...")
    p.add_argument("--prompts", metavar="FILE", type=Path, required=True, help="one prompt per line (.txt), or .jsonl")
    p.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new or empty folder")
    p.add_argument(
        "--seeds",
        type=parse_natural,
        nargs="+",
        default=[0],
        metavar="SEED",
        help="each prompt is generated with each seed",
    )
    p.add_argument("--revision", help="branch, tag or commit of a --model on the Hub (default main)")
    add_sampling_options(p)
    p.add_argument(
        "--first-frame",
        metavar="FILE",
        type=Path,
        help="an image used as the first frame of every video (image-to-video)",
    )
    p.add_argument(
        "--actions",
        metavar="FILE",
        type=Path,
        help="an .npy file [FRAMES-1,D] for every video, normalized as by data.actions.normalize in training",
    )
    p.add_argument("--domain", type=parse_natural, metavar="N", help="the embodiment of --actions")
    p.add_argument(
        "--camera",
        metavar="FILE|KEYS",
        help="the camera trajectory of every video: .json with c2w [FRAMES,4,4] and intrinsics, .npy with c2w, or keys "
        "such as w-80,jw-40",
    )
    p.add_argument(
        "--intrinsics",
        type=float,
        nargs=4,
        metavar=("FX", "FY", "CX", "CY"),
        help="intrinsics of a --camera without them, in pixels of the first frame's file",
    )
    return p


def add_sampling_options(p: argparse.ArgumentParser, *, requires_size: bool = True) -> None:
    """Add the sampling options to `p`. requires_size: make --height and --width required."""
    p.add_argument("--height", type=parse_positive, required=requires_size, help="pixels")
    p.add_argument("--width", type=parse_positive, required=requires_size, help="pixels")
    p.add_argument("--frames", type=parse_positive, default=1, help="frames of a video (default 1)")
    p.add_argument(
        "--fps", type=parse_above_zero, default=DEFAULT_FPS, help=f"frame rate of a video (default {DEFAULT_FPS:g})"
    )
    p.add_argument(
        "--steps",
        type=parse_positive,
        default=DEFAULT_EVAL_STEPS,
        help=f"denoising steps (default {DEFAULT_EVAL_STEPS})",
    )
    p.add_argument("--solver", choices=["ode", "dpm2"], help="first or second order (default: the pipeline's)")
    p.add_argument(
        "--guidance",
        type=parse_guidance,
        default=DEFAULT_GUIDANCE_SCALE,
        metavar="W",
        help="guidance scale; 1 (default): no guidance",
    )
    p.add_argument(
        "--guidance-low",
        type=parse_guidance,
        metavar="W",
        help="guidance scale of a second expert (default: --guidance)",
    )
    p.add_argument(
        "--guidance-batch",
        choices=["separate", "joint"],
        default="separate",
        help="joint: conditional and unconditional in one batch",
    )
    p.add_argument(
        "--negative-prompt", metavar="TEXT", help="negative prompt of prompts without one (default: the family's)"
    )
    p.add_argument("--batch", type=parse_positive, default=1, help="samples denoised at once (default 1)")
    p.add_argument(
        "--max-sequence-length",
        type=parse_positive,
        metavar="N",
        help="maximum number of text tokens (default: the pipeline's)",
    )
    p.add_argument(
        "--embedded-guidance",
        type=parse_above_zero,
        metavar="G",
        help="guidance scale passed to guidance-distilled networks such as FLUX.2-dev (default: the pipeline's)",
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


def parse_natural(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 0")
    return int(text)


def parse_positive(text: str) -> int:
    if parse_natural(text) == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def parse_above_zero(text: str) -> float:
    return parse_number(text, lambda value: 0 < value < math.inf, "a number > 0")


def parse_guidance(text: str) -> float:
    return parse_number(text, lambda value: 1 <= value < math.inf, "a number >= 1")


def parse_number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    from wfm_ds.distributed.accelerator import choose_accelerator
    from wfm_ds.distributed.logs import quiet_libraries

    if args.guidance_low is not None and args.guidance == 1:
        raise UserError("--guidance-low: needs --guidance above 1")
    if args.guidance_batch == "joint" and args.guidance == 1:
        raise UserError("--guidance-batch: joint needs --guidance above 1")
    if args.pipeline is not None and args.lora is not None:
        raise UserError("--lora: not allowed with --pipeline; to use an export as the base of a LoRA, set --model")
    if args.domain is not None and args.actions is None:
        raise UserError("--domain: needs --actions")
    if args.intrinsics is not None and args.camera is None:
        raise UserError("--intrinsics: needs --camera")
    if args.first_frame is not None:
        check_first_frame(args.first_frame, args.frames)
    quiet_libraries()
    choose_accelerator()
    args.title = page_title(args)
    with contextlib.ExitStack() as resources:
        fetch_exports(args, resources)
        generate_samples(args)


def check_first_frame(file: Path, num_frames: int) -> None:
    """Raise UserError if `file` is not an image, or if `num_frames` is 1."""
    from wfm_ds.data.samples import IMAGE_SUFFIXES

    if num_frames == 1:
        raise UserError("--first-frame: needs --frames above 1")
    if not file.is_file() or file.suffix.lower() not in IMAGE_SUFFIXES:
        raise UserError(f"--first-frame: {file} is not an image; use a {', '.join(sorted(IMAGE_SUFFIXES))} file")


def fetch_exports(args: argparse.Namespace, resources: contextlib.ExitStack) -> None:
    """Download a remote --lora or --pipeline, and replace it in `args` by the local folder.

    The folders are removed when `resources` closes. Raises StorageError if a download fails.
    """
    from wfm_ds.checkpoint.remote_store import open_locally

    for name in ("lora", "pipeline"):
        address = getattr(args, name)
        if address is not None:
            setattr(args, name, resources.enter_context(open_locally(address, args.out.parent)))


def generate_samples(args: argparse.Namespace) -> None:
    """Check prompts and paths, then load the model and generate all samples.

    Raises UserError if a prompt, a path or the model is invalid.
    """
    from wfm_ds.checkpoint.adapter_loading import find_adapter_file
    from wfm_ds.data.prompts import load_prompt_file
    from wfm_ds.memory.out_of_memory import explain_out_of_memory
    from wfm_ds.models.assets.loading import select_device

    prompts = load_prompt_file(args.prompts)
    if args.lora is not None:
        find_adapter_file(args.lora)
    require_empty(args.out)
    device = select_device(args.device)
    with explain_out_of_memory(device, lambda phase: memory_advice(args, device), lambda: None):
        load_and_generate(args, prompts)


def memory_advice(args: argparse.Namespace, device: torch.device) -> list[str]:
    """Return the options to change if generation runs out of memory, cheapest first."""
    joint = ["--guidance-batch separate"] if args.guidance_batch == "joint" else []
    batch = [f"--batch below {args.batch}"] if args.batch > 1 else []
    vae = ["--vae-dtype bfloat16"] if args.vae_dtype == "float32" else []
    dtype = [] if is_low_precision(args, device) else ["--dtype bfloat16"]
    return [*joint, *batch, *vae, *dtype, "--height, --width or --frames"]


def is_low_precision(args: argparse.Namespace, device: torch.device) -> bool:
    return args.dtype == "bfloat16" or (args.dtype is None and device.type == "cuda")


def load_and_generate(args: argparse.Namespace, prompts: Sequence[Prompt]) -> None:
    from wfm_ds.runs.generation_inputs import collect_inputs, encode_first_frame, list_option_inputs

    sampler = load_sampler(args, list_option_inputs(args))
    sampler.model.check_prompts([prompt.text for prompt in prompts])
    frame, inputs = encode_first_frame(sampler, args.first_frame), collect_inputs(sampler, args)
    prompts = [replace(prompt, inputs=inputs) for prompt in prompts]
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        write_samples(sampler, [(prompt, seed) for prompt in prompts for seed in args.seeds], args, frame)
    except OSError as error:
        raise UserError(f"{args.out} cannot be written ({error}); free space or choose another folder") from error
    sys.stdout.write(f"{args.out / PAGE_NAME}\n")


def require_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        raise UserError(f"{folder} is not empty: choose another --out, or empty it")


def load_sampler(args: argparse.Namespace, inputs: Sequence[str] = ()) -> Sampler:
    """Load the model and its LoRA, and return a sampler with the settings in `args`.

    inputs: names of the conditioning inputs that the user sets. Raises UserError if the settings do not fit the model.
    """
    import torch

    from wfm_ds.checkpoint.adapter_loading import load_adapter
    from wfm_ds.engine import attention_kernels
    from wfm_ds.engine.block_compilation import compile_blocks
    from wfm_ds.models import registry
    from wfm_ds.models.assets.loading import select_device
    from wfm_ds.models.assets.text_cache import TextCache
    from wfm_ds.models.sampler import CountingForward, Sampler
    from wfm_ds.recipe.sampling import SamplingRecipe

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
        eval_solver=args.solver,
        guidance_scale=args.guidance,
        guidance_scale_low=args.guidance_low,
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
    sampler.evaluation_plan()
    model.check_sampling(settings)
    return sampler


def write_samples(
    sampler: Sampler, items: Sequence[tuple[Prompt, int]], args: argparse.Namespace, frame: torch.Tensor | None = None
) -> None:
    """Generate samples and write each to a file at once. At the end, write samples.jsonl and the HTML page.

    items: (prompt, seed) of each sample. frame: latents [C,T,h,w] of the first frame.
    """
    from wfm_ds.monitoring import gallery
    from wfm_ds.monitoring.samples import write_sample_file, write_table

    rows: list[dict[str, Any]] = []
    entries: list[gallery.GalleryEntry] = []
    for sample, finite in iterate_samples(sampler, items, args.batch, frame):
        failure = "" if finite else NOT_FINITE_MESSAGE
        row = write_sample_file(args.out, len(rows), sample)
        rows.append(row if finite else {**row, "failure": failure})
        height, width = sample.frames.shape[1:3]
        entries.append(
            gallery.GalleryEntry(
                file=row["file"],
                width=width,
                height=height,
                prompt=sample.prompt,
                caption=f"seed {sample.seed}, {sampling_summary(sampler.settings)}",
                failure=failure,
            )
        )
        sys.stderr.write(f"{len(rows)} of {len(items)}: {row['file']}{f' ({failure})' if failure else ''}\n")
    write_table(args.out, rows)
    (args.out / PAGE_NAME).write_text(
        gallery.gallery_page(args.title, page_settings(sampler, args), entries), encoding="utf-8"
    )


def iterate_samples(
    sampler: Sampler, items: Sequence[tuple[Prompt, int]], batch: int, frame: torch.Tensor | None = None
) -> Iterator[tuple[GeneratedSample, bool]]:
    """Yield (sample, whether its latents are finite) in the order of `items`.

    items: (prompt, seed) of each sample. batch: batch size. frame: latents [C,T,h,w] of the first frame.
    """
    import torch

    from wfm_ds.chunks import split_into_chunks
    from wfm_ds.monitoring.samples import GeneratedSample
    from wfm_ds.types import ConditioningFrames

    settings, plan = sampler.settings, sampler.evaluation_plan()
    for part in split_into_chunks(items, batch):
        prompts, seeds = [prompt for prompt, _ in part], [seed for _, seed in part]
        conditioning = None
        if frame is not None:
            conditioning = ConditioningFrames(
                torch.stack([frame] * len(part)), torch.ones(len(part), dtype=torch.int64)
            )
        latents = sampler.generate(FORWARD_PURPOSE, prompts, seeds, plan, conditional_frames=conditioning).clean_latents
        media, finite = sampler.decode_to_uint8(latents)
        for (prompt, seed), item, is_finite in zip(part, media, finite, strict=True):
            fps = settings.fps if sampler.model.is_video else None
            yield GeneratedSample(prompt=prompt.text, prompt_id=prompt.id, seed=seed, pixels=item, fps=fps), is_finite


def page_title(args: argparse.Namespace) -> str:
    base = str(args.model or args.pipeline)
    return f"{base} with {args.lora}" if args.lora is not None else base


def sampling_summary(settings: SamplingRecipe) -> str:
    scales = f"guidance {settings.guidance_scale:g}"
    if settings.guidance_scale_low is not None:
        scales += f" and {settings.guidance_scale_low:g}"
    frames = f", {settings.num_frames} frames at {settings.fps:g} fps" if settings.num_frames > 1 else ""
    return f"{settings.eval_steps} steps, {scales}, {settings.width} x {settings.height}{frames}"


def page_settings(sampler: Sampler, args: argparse.Namespace) -> dict[str, str]:
    """Return {name: value} of the settings shared by all samples, for the head of the HTML page."""
    negative = {"negative prompt": args.negative_prompt} if args.negative_prompt is not None else {}
    return {
        "pipeline": type(sampler.model.pipeline).__name__,
        "sampling": sampling_summary(sampler.settings),
        "solver": sampler.eval_solver,
        **negative,
        **({"first frame": args.first_frame.name} if args.first_frame is not None else {}),
        **({"actions": args.actions.name} if args.actions is not None else {}),
        **({"domain": str(args.domain)} if args.domain is not None else {}),
        **({"camera": args.camera} if args.camera is not None else {}),
        "prompts": args.prompts.name,
        "seeds": ", ".join(map(str, args.seeds)),
        "dtype": str(sampler.model.dtype).removeprefix("torch."),
    }
