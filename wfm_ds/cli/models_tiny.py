"""`wfm models tiny FAMILY OUT_DIR`: write a tiny random pipeline or language model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from wfm_ds.models.tiny import FAMILIES, LANGUAGE_FAMILIES, write_tiny_model
from wfm_ds.program import run_command


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="wfm models tiny", description="Write a tiny random pipeline or language model.")
    p.add_argument("family", metavar="FAMILY", help=f"one of {', '.join((*FAMILIES, *LANGUAGE_FAMILIES))}")
    p.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="a new or empty folder")
    return p


def run(args: argparse.Namespace) -> None:
    write_tiny_model(args.family, args.out_dir)
    sys.stdout.write(f"{args.out_dir}: a tiny {args.family} pipeline\n")
