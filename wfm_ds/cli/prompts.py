"""`wfm data prompts NAME DIR`: download a published prompt set."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wfm_ds.program import CommandParser


def parser() -> CommandParser:
    p = CommandParser(
        description="Download a published prompt set to a folder, in the layout that recipes read.",
        epilog="Example: %(prog)s ocr datasets/ocr",
    )
    p.add_argument("name", nargs="?", help="prompt set: data.name of the recipe (without a name, list all)")
    p.add_argument("folder", nargs="?", type=Path, help="folder to write to: data.path (default datasets/NAME)")
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.data.prompt_sources import PROMPT_SOURCES, download_prompt_set
    from wfm_ds.errors import UserError

    if args.name is None:
        for name, source in PROMPT_SOURCES.items():
            sys.stdout.write(f"{name:15} {source.remark} Source: {source.repository}, {source.licence}.\n")
        return
    if args.name not in PROMPT_SOURCES:
        raise UserError(f"unknown prompt set {args.name}: choose one of {', '.join(PROMPT_SOURCES)}")
    for line in download_prompt_set(args.name, args.folder or Path("datasets") / args.name):
        sys.stdout.write(f"{line}\n")
    source = PROMPT_SOURCES[args.name]
    sys.stdout.write(f"source: github.com/{source.repository}, licence {source.licence}. {source.remark}\n")
