"""`wfm schema`: write the JSON schema of recipes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wfm_ds.program import CommandParser


def parser() -> CommandParser:
    p = CommandParser(
        description="Write the JSON schema of recipes, with which editors complete keys and mark mistakes.",
        epilog="Example: %(prog)s recipe.schema.json",
    )
    p.add_argument("file", type=Path, nargs="?", metavar="FILE", help="file to write (default: standard output)")
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.recipe.editor_schema import format_schema

    if args.file is None:
        sys.stdout.write(format_schema())
        return
    args.file.write_text(format_schema(), encoding="utf-8")
    sys.stdout.write(f"wrote {args.file}; refer to it in a recipe: # yaml-language-server: $schema={args.file}\n")
