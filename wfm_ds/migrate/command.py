"""`python -m wfm_ds.migrate config.toml > recipe.yaml`: convert a Cosmos-RL configuration to a recipe.

Exit codes: 0 for a complete recipe; 2 for an incomplete recipe or an unreadable configuration, with instructions on
stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from wfm_ds.errors import UserError
from wfm_ds.program import Parser, program


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    from wfm_ds.migrate.translation import check, key_table, migrate, read, render

    if args.keys:
        sys.stdout.write(key_table())
        return
    if args.config is None:
        raise UserError("expected a configuration file, or --keys to print the table of keys")
    migration = migrate(read(args.config), steps=args.steps)
    text = render(migration, args.config.name)
    sys.stdout.write(text)
    check(migration, text)


def parser() -> Parser:
    p = Parser(prog="python -m wfm_ds.migrate", description=__doc__.split("\n")[0])
    p.add_argument("config", nargs="?", type=Path, help="a TOML configuration of Cosmos-RL (docs/migrating.md)")
    p.add_argument("--steps", type=positive, metavar="N", help="length of the run (run.steps), instead of epochs")
    p.add_argument("--keys", action="store_true", help="print the table of keys in docs/migrating.md")
    return p


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
