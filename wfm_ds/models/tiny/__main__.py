"""`python -m wfm_ds.models.tiny FAMILY OUT_DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from wfm_ds.models.tiny import FAMILIES, LANGUAGE_FAMILIES, write_tiny_model
from wfm_ds.program import run_command


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run_tiny, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="wfm_ds.models.tiny", description="Write a tiny random pipeline or language model."
    )
    p.add_argument("family", metavar="FAMILY", help=f"one of {', '.join((*FAMILIES, *LANGUAGE_FAMILIES))}")
    p.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="a new or empty folder")
    return p


def run_tiny(args: argparse.Namespace) -> None:
    write_tiny_model(args.family, args.out_dir)
    sys.stdout.write(f"{args.out_dir}: a tiny {args.family} pipeline\n")


if __name__ == "__main__":
    sys.exit(main())
