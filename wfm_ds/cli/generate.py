"""`wfm generate`: generate images or videos for prompts, from a pipeline or an export of a run.

The noise is the same as in a run's validation if seeds, steps and guidance are the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from wfm_ds.cli.sampling_options import KEY_OPTIONS, add_sampling_options, argument_type, parse_seed
from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser
from wfm_ds.recipe.actions import check_domain, check_viewpoint, find_embodiment


def parser() -> CommandParser:
    p = CommandParser(
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
        type=parse_seed,
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
        "--source",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="the image to edit, for every prompt; repeat the option for further images, source_2 and source_3",
    )
    p.add_argument(
        "--control",
        metavar="FILE",
        type=Path,
        help="the control video of every video, from its first frame on (docs/models/wan_vace.md)",
    )
    p.add_argument(
        "--control-mask", metavar="FILE", type=Path, help="a video that is bright where --control is replaced"
    )
    p.add_argument(
        "--actions",
        metavar="FILE",
        type=Path,
        help="an .npy file [FRAMES-1,D] for every video, normalized as by data.actions.normalize in training; with "
        "--clips, FRAMES is the length of the whole video",
    )
    p.add_argument(
        "--domain",
        type=argument_type(parse_domain),
        help="the robot of --actions: a number or a name such as droid_lerobot",
    )
    p.add_argument(
        "--viewpoint",
        type=argument_type(check_viewpoint),
        metavar="VIEW",
        help="the camera of --actions in captions, such as concat_view (data.viewpoint in training; default ego_view)",
    )
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
    p.key_options = KEY_OPTIONS
    return p


def parse_domain(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else find_embodiment(check_domain(text)).domain


def run(args: argparse.Namespace) -> None:
    from wfm_ds.data.samples import IMAGE_SUFFIXES
    from wfm_ds.distributed.accelerator import choose_accelerator

    if args.pipeline is not None and args.lora is not None:
        raise UserError("--lora: not allowed with --pipeline; to use an export as the base of a LoRA, set --model")
    needs = {"domain": "actions", "viewpoint": "actions", "intrinsics": "camera", "control_mask": "control"}
    for option, needed in needs.items():
        if getattr(args, option) is not None and getattr(args, needed) is None:
            raise UserError(f"--{option.replace('_', '-')}: needs --{needed}")
    if args.first_frame is not None and args.frames == 1:
        raise UserError("--first-frame: needs --frames above 1")
    if args.control is not None and args.clips > 1:
        raise UserError("--control: does not work with --clips above 1: remove one of them")
    images = [("--source", file) for file in args.source]
    images += [("--first-frame", args.first_frame)] if args.first_frame else []
    for option, file in images:
        if not file.is_file() or file.suffix.lower() not in IMAGE_SUFFIXES:
            raise UserError(f"{option}: {file} is not an image; use a {', '.join(sorted(IMAGE_SUFFIXES))} file")
    choose_accelerator()  # before the next import, which imports deepspeed
    from wfm_ds.cli.generation import run_generation

    run_generation(args)
