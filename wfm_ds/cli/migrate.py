"""`wfm migrate config.toml > recipe.yaml`: convert a Cosmos-RL configuration to a recipe.

Exit codes: 0 if the recipe is complete; 2 if it is incomplete or the configuration cannot be read, with instructions on
stderr.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wfm_ds.cli.sampling_options import parse_positive
from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser


def run(args: argparse.Namespace) -> None:
    from wfm_ds.migrate.translation import check_recipe, migrate_config, read_toml, render_key_table, render_recipe

    if args.keys:
        sys.stdout.write(render_key_table())
        return
    if args.config is None:
        raise UserError("expected a configuration file, or --keys to print the table of keys")
    migration = migrate_config(read_toml(args.config), steps=args.steps)
    text = render_recipe(migration, args.config.name)
    sys.stdout.write(text)
    check_recipe(migration, text)


def parser() -> CommandParser:
    p = CommandParser(description=__doc__.split("\n")[0])
    p.add_argument("config", nargs="?", type=Path, help="a TOML configuration of Cosmos-RL (docs/migrating.md)")
    p.add_argument("--steps", type=parse_positive, metavar="N", help="length of the run (run.steps), instead of epochs")
    p.add_argument("--keys", action="store_true", help="print the table of keys in docs/migrating.md")
    return p
