"""`wfm models tiny FAMILY OUT_DIR`: write a tiny random pipeline or language model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wfm_ds.program import CommandParser


def parser() -> CommandParser:
    p = CommandParser(description="Write a tiny random pipeline or language model.")
    p.add_argument("family", metavar="FAMILY", help="such as sd3, wan21 or cosmos25; another name prints the list")
    p.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="a new or empty folder")
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.models.tiny import write_tiny_model

    write_tiny_model(args.family, args.out_dir)
    sys.stdout.write(f"{args.out_dir}: a tiny {args.family} pipeline\n")
