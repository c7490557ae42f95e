"""`python -m wfm_ds.models.tiny FAMILY OUT_DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from wfm_ds.errors import UserError
from wfm_ds.models.tiny import FAMILIES, write_tiny


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m wfm_ds.models.tiny", description="Write a tiny random pipeline.")
    parser.add_argument("family", metavar="FAMILY", help=f"one of {', '.join(FAMILIES)}")
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="a new or empty folder")
    options = parser.parse_args(arguments)
    try:
        write_tiny(options.family, options.out_dir)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{options.out_dir}: a tiny {options.family} pipeline\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
