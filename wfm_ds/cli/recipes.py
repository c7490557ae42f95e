"""`wfm recipes`: list, show or copy the shipped recipes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser
from wfm_ds.recipe import shipped_recipes

LINE_WIDTH = 120


def parser() -> CommandParser:
    p = CommandParser(
        description="List the shipped recipes (only those that match all WORDs), show one, or copy one to a file.",
        epilog="Example: %(prog)s copy sd3_nft mine.yaml",
        usage="%(prog)s [list [WORD ...] | show NAME | copy NAME [FILE]]",
    )
    p.add_argument("action", nargs="?", choices=["list", "show", "copy"], default="list", help=argparse.SUPPRESS)
    p.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return p


def run(args: argparse.Namespace) -> None:
    if args.action == "list":
        sys.stdout.write(list_recipes(args.words))
        return
    fewest, most = 1, 2 if args.action == "copy" else 1
    if not fewest <= len(args.words) <= most:
        raise UserError(f"usage: wfm recipes {args.action} NAME{' [FILE]' if most == 2 else ''}; wfm recipes lists all")
    path = shipped_recipes.require_recipe(args.words[0])
    if args.action == "show":
        from wfm_ds.recipe.annotated_text import annotate_recipe  # slow, because it imports the schema

        sys.stdout.write(annotate_recipe(path))
        return
    out = Path(args.words[1] if len(args.words) == 2 else path.name)
    copy_recipe(path, out)
    sys.stdout.write(f"wrote {out}; next: wfm check {out}\n")


def list_recipes(words: list[str]) -> str:
    lower_words = [word.lower() for word in words]
    rows = [
        (name, shipped_recipes.read_purpose(shipped_recipes.require_recipe(name)))
        for name in shipped_recipes.list_recipe_names()
    ]
    rows = [row for row in rows if all(word in " ".join(row).lower() for word in lower_words)]
    if not rows:
        raise UserError(f"no shipped recipe matches {' '.join(words)}; wfm recipes lists all")
    width = max(len(name) for name, _ in rows) + 2
    return "".join(f"{name:{width}}{shorten_text(purpose, LINE_WIDTH - width)}\n" for name, purpose in rows)


def shorten_text(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."


def copy_recipe(path: Path, out: Path) -> None:
    if not out.parent.is_dir():
        raise UserError(f"{out}: folder {out.parent} not found")
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(shipped_recipes.portable_recipe_text(path))
    except FileExistsError as error:
        raise UserError(f"{out} exists: choose another file, or remove it first") from error
