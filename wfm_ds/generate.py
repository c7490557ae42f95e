"""`python -m wfm_ds.generate`: generate images or videos for prompts, from a pipeline or an export of a run.

Uses the same noise per seed, steps and guidance as validation. Exit codes: 0 success, 2 invalid arguments, prompt file,
model or folder (one message), 1 any other error.
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
from wfm_ds.program import Parser, program
from wfm_ds.recipe.stated import EVAL_STEPS, FPS, GUIDANCE_SCALE, AttentionName

if TYPE_CHECKING:
    import torch

    from wfm_ds.models.sampler import Sampler
    from wfm_ds.monitoring.samples import ShownSample
    from wfm_ds.recipe.sampling import SamplingRecipe
    from wfm_ds.types import Prompt

PAGE = "index.html"
PURPOSE = "sample"  # of its forward passes
NOT_FINITE = "non-finite latents: this sample is invalid"


def parser() -> Parser:
    p = Parser(
        prog="python -m wfm_ds.generate",
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
        "--seeds", type=natural, nargs="+", default=[0], metavar="SEED", help="each prompt is generated with each seed"
    )
    p.add_argument("--revision", help="branch, tag or commit of a --model on the Hub (default main)")
    add_sampling(p)
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
    p.add_argument("--domain", type=natural, metavar="N", help="the embodiment of --actions")
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


def add_sampling(p: argparse.ArgumentParser, *, sized: bool = True) -> None:
    """Add the sampling options. requires_size: --height and --width are required."""
    p.add_argument("--height", type=positive, required=sized, help="pixels")
    p.add_argument("--width", type=positive, required=sized, help="pixels")
    p.add_argument("--frames", type=positive, default=1, help="frames of a video (default 1)")
    p.add_argument("--fps", type=above_zero, default=FPS, help=f"frame rate of a video (default {FPS:g})")
    p.add_argument("--steps", type=positive, default=EVAL_STEPS, help=f"denoising steps (default {EVAL_STEPS})")
    p.add_argument("--solver", choices=["ode", "dpm2"], help="first or second order (default: the pipeline's)")
    p.add_argument(
        "--guidance",
        type=guidance,
        default=GUIDANCE_SCALE,
        metavar="W",
        help="guidance scale; 1 (default): no guidance",
    )
    p.add_argument(
        "--guidance-low", type=guidance, metavar="W", help="guidance scale of a second expert (default: --guidance)"
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
    p.add_argument("--batch", type=positive, default=1, help="samples denoised at once (default 1)")
    p.add_argument(
        "--max-sequence-length",
        type=positive,
        metavar="N",
        help="maximum number of text tokens (default: the pipeline's)",
    )
    p.add_argument(
        "--embedded-guidance",
        type=above_zero,
        metavar="G",
        help="guidance scale passed to guidance-distilled networks such as FLUX.2-dev (default: the pipeline's)",
    )
    p.add_argument("--family", metavar="package.module:Class", help="user-defined model family (docs/models.md)")
    p.add_argument("--prompt-template", choices=["stock", "none"], help="prompt template of pipelines that have one")
    p.add_argument(
        "--guardrail", choices=["stock", "off"], default="stock", help="guardrail of pipelines that have one"
    )
    p.add_argument(
        "--attention",
        choices=get_args(AttentionName),
        default="auto",
        help="attention kernel (docs/engine.md; default auto)",
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


def natural(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 0")
    return int(text)


def positive(text: str) -> int:
    if natural(text) == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def above_zero(text: str) -> float:
    return number(text, lambda value: 0 < value < math.inf, "a number > 0")


def guidance(text: str) -> float:
    return number(text, lambda value: 1 <= value < math.inf, "a number >= 1")


def number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    from wfm_ds.distributed.accelerator import choose_accelerator
    from wfm_ds.distributed.logs import quieten_libraries

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
    quieten_libraries()
    choose_accelerator()
    args.title = title(args)
    with contextlib.ExitStack() as resources:
        fetch(args, resources)
        generate(args)


def check_first_frame(file: Path, num_frames: int) -> None:
    """Raise UserError if the file is not an image, or if the video has only one frame."""
    from wfm_ds.data.samples import IMAGE_SUFFIXES

    if num_frames == 1:
        raise UserError("--first-frame: needs --frames above 1")
    if not file.is_file() or file.suffix.lower() not in IMAGE_SUFFIXES:
        raise UserError(f"--first-frame: {file} is not an image; use a {', '.join(sorted(IMAGE_SUFFIXES))} file")


def fetch(args: argparse.Namespace, resources: contextlib.ExitStack) -> None:
    """Replace remote --lora and --pipeline by local folders, kept until `resources` closes. Raises StorageError."""
    from wfm_ds.checkpoint.remote import on_this_machine

    for name in ("lora", "pipeline"):
        address = getattr(args, name)
        if address is not None:
            setattr(args, name, resources.enter_context(on_this_machine(address, args.out.parent)))


def generate(args: argparse.Namespace) -> None:
    """Check the inputs, then load the model and generate all samples. Raises UserError."""
    from wfm_ds.checkpoint.adapter import adapter_file
    from wfm_ds.data.prompts import load_prompt_file
    from wfm_ds.models.loading import chosen_device
    from wfm_ds.run.out_of_memory import explained

    prompts = load_prompt_file(args.prompts)
    if args.lora is not None:
        adapter_file(args.lora)
    require_empty(args.out)
    device = chosen_device(args.device)
    with explained(device, lambda phase: lighter(args, device), lambda: None):
        draw(args, prompts)


def lighter(args: argparse.Namespace, device: torch.device) -> list[str]:
    """Return the options to change if memory does not suffice, cheapest first."""
    joint = ["--guidance-batch separate"] if args.guidance_batch == "joint" else []
    batch = [f"--batch below {args.batch}"] if args.batch > 1 else []
    vae = ["--vae-dtype bfloat16"] if args.vae_dtype == "float32" else []
    dtype = [] if is_low_precision(args, device) else ["--dtype bfloat16"]
    return [*joint, *batch, *vae, *dtype, "--height, --width or --frames"]


def is_low_precision(args: argparse.Namespace, device: torch.device) -> bool:
    return args.dtype == "bfloat16" or (args.dtype is None and device.type == "cuda")


def draw(args: argparse.Namespace, prompts: Sequence[Prompt]) -> None:
    from wfm_ds.run.given import first_frame, named, told

    sampler = load_sampler(args, named(args))
    sampler.model.check_prompts([prompt.text for prompt in prompts])
    frame, inputs = first_frame(sampler, args.first_frame), told(sampler, args)
    prompts = [replace(prompt, inputs=inputs) for prompt in prompts]
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        write(sampler, [(prompt, seed) for prompt in prompts for seed in args.seeds], args, frame)
    except OSError as error:
        raise UserError(f"{args.out} cannot be written ({error}); free space or choose another folder") from error
    sys.stdout.write(f"{args.out / PAGE}\n")


def require_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        raise UserError(f"{folder} is not empty: choose another --out, or empty it")


def load_sampler(args: argparse.Namespace, inputs: Sequence[str] = ()) -> Sampler:
    """Load the model with its LoRA on the device, and check the sampling settings."""
    import torch

    from wfm_ds.checkpoint.adapter import load_adapter
    from wfm_ds.engine import attention
    from wfm_ds.engine.compiled import compile_blocks
    from wfm_ds.engine.forward import CountedForward
    from wfm_ds.models import registry
    from wfm_ds.models.loading import chosen_device
    from wfm_ds.models.sampler import Sampler
    from wfm_ds.models.text_cache import TextCache
    from wfm_ds.recipe.sampling import SamplingRecipe

    device = chosen_device(args.device)
    dtype = torch.bfloat16 if is_low_precision(args, device) else torch.float32
    model = registry.load(
        args.model or args.pipeline,
        dtype=dtype,
        device=device,
        vae_dtype=torch.bfloat16 if args.vae_dtype == "bfloat16" else torch.float32,
        own_family=args.family,
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
    attention.use(model.denoiser, attention.choose(args.attention, model.denoiser, dtype, device, trains=False))
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
    forward = CountedForward(model.denoise)
    joint_rows = {PURPOSE: 2 * args.batch} if args.guidance_batch == "joint" else {}
    sampler = Sampler(model=model, texts=TextCache(model), settings=settings, forward=forward, joint_rows=joint_rows)
    try:
        _ = sampler.latent_shape
    except ValueError as error:
        raise UserError(str(error)) from error
    sampler.evaluation_plan()
    model.check_sampling(settings)
    return sampler


def write(
    sampler: Sampler, items: Sequence[tuple[Prompt, int]], args: argparse.Namespace, frame: torch.Tensor | None = None
) -> None:
    """Write each file when it is generated; then write the table and the page. frame: the encoded first frame."""
    from wfm_ds.monitoring import gallery
    from wfm_ds.monitoring.samples import write_media, write_table

    rows: list[dict[str, Any]] = []
    entries: list[gallery.Entry] = []
    for sample, finite in drawn(sampler, items, args.batch, frame):
        failure = "" if finite else NOT_FINITE
        row = write_media(args.out, len(rows), sample)
        rows.append(row if finite else {**row, "failure": failure})
        height, width = sample.frames.shape[1:3]
        entries.append(
            gallery.Entry(
                file=row["file"],
                width=width,
                height=height,
                prompt=sample.prompt,
                caption=f"seed {sample.seed}, {summary(sampler.settings)}",
                failure=failure,
            )
        )
        sys.stderr.write(f"{len(rows)} of {len(items)}: {row['file']}{f' ({failure})' if failure else ''}\n")
    write_table(args.out, rows)
    (args.out / PAGE).write_text(gallery.page(args.title, facts(sampler, args), entries), encoding="utf-8")


def drawn(
    sampler: Sampler, items: Sequence[tuple[Prompt, int]], batch: int, frame: torch.Tensor | None = None
) -> Iterator[tuple[ShownSample, bool]]:
    """Yield the samples in order, and whether their latents are finite. frame: the encoded first frame."""
    import torch

    from wfm_ds.chunks import chunks
    from wfm_ds.monitoring.samples import ShownSample
    from wfm_ds.types import ConditionalFrames

    settings, plan = sampler.settings, sampler.evaluation_plan()
    for part in chunks(items, batch):
        prompts, seeds = [prompt for prompt, _ in part], [seed for _, seed in part]
        conditioning = None
        if frame is not None:
            conditioning = ConditionalFrames(torch.stack([frame] * len(part)), torch.ones(len(part), dtype=torch.int64))
        latents = sampler.generate(PURPOSE, prompts, seeds, plan, conditional_frames=conditioning).clean
        media, finite = sampler.media(latents)
        for (prompt, seed), item, is_finite in zip(part, media, finite, strict=True):
            fps = settings.fps if sampler.model.video else None
            yield ShownSample(prompt=prompt.text, prompt_id=prompt.id, seed=seed, media=item, fps=fps), is_finite


def title(args: argparse.Namespace) -> str:
    base = str(args.model or args.pipeline)
    return f"{base} with {args.lora}" if args.lora is not None else base


def summary(settings: SamplingRecipe) -> str:
    scales = f"guidance {settings.guidance_scale:g}"
    if settings.guidance_scale_low is not None:
        scales += f" and {settings.guidance_scale_low:g}"
    frames = f", {settings.num_frames} frames at {settings.fps:g} fps" if settings.num_frames > 1 else ""
    return f"{settings.eval_steps} steps, {scales}, {settings.width} x {settings.height}{frames}"


def facts(sampler: Sampler, args: argparse.Namespace) -> dict[str, str]:
    """Return the settings shared by all samples, for the head of the page."""
    negative = {"negative prompt": args.negative_prompt} if args.negative_prompt is not None else {}
    return {
        "pipeline": type(sampler.model.pipeline).__name__,
        "sampling": summary(sampler.settings),
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


if __name__ == "__main__":
    sys.exit(main())
