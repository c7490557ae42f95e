"""Sampling options of `wfm generate` and `wfm evaluate`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

from wfm_ds.errors import UserError
from wfm_ds.recipe.shared_defaults import DEFAULT_EVAL_STEPS, DEFAULT_FPS, DEFAULT_GUIDANCE_SCALE, AttentionName
from wfm_ds.seeds import MAX_SEED

if TYPE_CHECKING:
    from wfm_ds.models.source_images import SourceSize
    from wfm_ds.recipe.sampling import GuidanceRecipe

Value = TypeVar("Value")
SHARED_KEYS = ("family", "revision", "guardrail", "prompt_template", "embedded_guidance", "attention")
KEY_OPTIONS = {
    **{f"model.{key}": f"--{key.replace('_', '-')}" for key in SHARED_KEYS},
    **{"model.path": "--model", "sampling.guidance_scale": "--guidance"},
    **{"sampling.eval_grid": "--grid", "sampling.grid_shift": "--shift"},
}
SAMPLING_OPTIONS = {  # {option: key of the recipe section `sampling`}
    "height": "height",
    "width": "width",
    "frames": "num_frames",
    "fps": "fps",
    "steps": "eval_steps",
    "grid": "eval_grid",
    "shift": "grid_shift",
    "solver": "eval_solver",
    "guidance": "guidance_scale",
    "guidance_low": "guidance_scale_low",
    "guidance_settings": "guidance",
    "guidance_batch": "guidance_batch",
    "negative_prompt": "negative_prompt",
}
MODEL_OPTIONS = (  # options that are keys of the recipe section `model`
    *("max_sequence_length", "prompt_template", "guardrail", "family", "vae_dtype", "attention"),
    "embedded_guidance",
)
MAX_PROMPT_BATCH = 8  # samples of a prompt that wfm evaluate generates together by default
MAX_DIGITS = 7  # maximum digits of seeds, steps, frames and other counts


def argument_type(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return `parse` as a `type` for add_argument. argparse then shows the text of its ValueError."""

    def parse_argument(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


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
