"""`wfm evaluate`: compare models on the same prompts and seeds, with paired statistics and a verdict.

The exit code is 3 if a model gets the verdict that --fail-on names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from wfm_ds.cli.sampling_options import (
    KEY_OPTIONS,
    MAX_PROMPT_BATCH,
    MODEL_OPTIONS,
    SAMPLING_OPTIONS,
    add_sampling_options,
    argument_type,
    parse_positive,
    require_empty,
)
from wfm_ds.program import CommandParser
from wfm_ds.recipe.section import check_device_name

VERDICT_EXIT_CODE = 3  # exit code if a model gets the verdict named by --fail-on
VERDICTS = ("hacked", "improved", "unconfirmed", "no gain", "cannot tell")


def parser() -> CommandParser:
    p = CommandParser(
        description="Generate samples from several models with the same prompts and seeds, score them, and compare "
        "each model with the first: confidence intervals over prompts, diversity, and a verdict on reward hacking.",
        epilog="Example: %(prog)s tiny:sd3 outputs/mine --prompts prompts.txt --rewards color --held-out "
        "jpeg_compressibility --seeds 4. Size, steps and guidance default to those of the run's recipe.",
    )
    p.add_argument(
        "models",
        nargs="+",
        metavar="MODEL_OR_EXPORT",
        help="first the base model: a pipeline folder, owner/name on the Hub, or tiny:FAMILY; then exports "
        "(safetensors/step_N, ../lora, s3://...) or runs. For a single LoRA or run, the base is added automatically",
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="one prompt per line (.txt), or .jsonl, which may name images to edit",
    )
    source.add_argument(
        "--data",
        metavar="RECIPE",
        type=Path,
        help="the validation data of a recipe: images to edit, first frames, actions, camera paths, and recordings to "
        "compare with",
    )
    p.add_argument(
        "--rewards",
        metavar="A,B",
        type=parse_names,
        help="rewards to measure (default: those of the run, or of --data)",
    )
    p.add_argument(
        "--held-out", metavar="C,D", type=parse_names, default=[], help="held-out rewards, not used for training"
    )
    p.add_argument(
        "--reward-device",
        type=argument_type(check_device_name),
        default="cpu",
        metavar="DEVICE",
        help="device of the rewards, e.g. cuda:1 (default cpu)",
    )
    p.add_argument("--judges", dest="held_out", type=parse_names, help=argparse.SUPPRESS)  # former name of --held-out
    p.add_argument(
        "--seeds", type=parse_positive, default=4, metavar="N", help="seeds 0 to N-1 for each prompt (default 4)"
    )
    p.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("evaluation"), help="a new or empty folder (default evaluation)"
    )
    p.add_argument(
        "--diversity",
        default="auto",
        metavar="EYE",
        help="embedding for the diversity: rgb, folder of an image model, or auto (DINOv2)",
    )
    p.add_argument(
        "--fail-on",
        choices=VERDICTS,
        metavar="VERDICT",
        help=f"exit with code {VERDICT_EXIT_CODE} on this verdict, e.g. hacked",
    )
    p.add_argument(
        "--timeout", type=parse_positive, default=600, metavar="S", help="seconds to wait for scores (default 600)"
    )
    p.add_argument("--revision", help="branch, tag or commit of the first model on the Hub (default main)")
    add_sampling_options(p, requires_size=False, default_batch=f"the seeds of a prompt, at most {MAX_PROMPT_BATCH}")
    p.set_defaults(
        **dict.fromkeys(("batch", "clips", *SAMPLING_OPTIONS, *MODEL_OPTIONS))
    )  # unset: from the recipe, else from wfm generate
    p.key_options = {**KEY_OPTIONS, "model.path": "MODEL"}
    return p


def parse_names(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be a list of distinct names")
    return parts


def run(args: argparse.Namespace) -> int:
    from wfm_ds.distributed.accelerator import choose_accelerator

    require_empty(args.out)
    choose_accelerator()  # before the next import, which imports deepspeed
    from wfm_ds.cli.model_comparison import run_comparison

    evaluation = run_comparison(args)
    return VERDICT_EXIT_CODE if any(other.verdict.name == args.fail_on for other in evaluation.comparisons) else 0
