"""`wfm completion SHELL`: print a completion script for all commands, options and names of this version."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from wfm_ds.program import CommandParser

Commands: TypeAlias = Mapping[str, tuple[str, str]]
"""{command: (module, description)}."""
RECIPE_FUNCTION = "_wfm_recipe_files"  # shtab escapes special characters in results of functions named *_files
RECIPE_COMPLETER = {"bash": RECIPE_FUNCTION, "zsh": RECIPE_FUNCTION}
PREAMBLES = {
    "bash": """\
{function}() {{
  compgen -W "{names}" -- "$1"
  compgen -f -X '!*.yaml' -- "$1"
  compgen -d -- "$1"
}}
{folders}
""",
    "zsh": """\
{function}() {{
  compadd -- {names}
  _files -g '*.yaml'
}}
{folders}
""",
}
# A command with subcommands takes a subcommand or a folder.
FOLDER_LINES = {
    "bash": "_shtab_wfm_{command}_pos_0_COMPGEN=_shtab_compgen_dirs",
    "zsh": "functions[_shtab_wfm_{command}_commands]+=$'\\n_files -/'",
}
RECIPE_ARGUMENTS = frozenset({"recipe", "words"})  # `words`: of wfm recipes
FILE_ARGUMENTS = frozenset({"model", "models", "lora", "checkpoint", "path", "image", "video"})
"""Arguments that are completed with files although they may also be an address or a name."""


def parser() -> CommandParser:
    p = CommandParser(
        description="Print a script with which the shell completes commands, options, recipes and files.",
        epilog="Example: %(prog)s bash > ~/.local/share/bash-completion/completions/wfm",
    )
    p.add_argument("shell", choices=list(PREAMBLES), help="the shell that reads the script")
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.cli.main import COMMANDS

    sys.stdout.write(generate_script(args.shell, COMMANDS))


def generate_script(shell: str, commands: Commands) -> str:
    import shtab

    from wfm_ds.recipe.shipped_recipes import list_recipe_names

    root = argparse.ArgumentParser(prog="wfm")
    add_subcommands(root, commands)
    groups = sorted({name.split()[0] for name in commands if " " in name})
    preamble = PREAMBLES[shell].format(
        function=RECIPE_FUNCTION,
        names=" ".join(list_recipe_names()),
        folders="\n".join(FOLDER_LINES[shell].format(command=name) for name in groups),
    )
    return f"{shtab.complete(root, shell, preamble={shell: preamble})}\n"


def add_subcommands(parent: argparse.ArgumentParser, commands: Commands, prefix: str = "") -> None:
    subparsers = parent.add_subparsers()
    for name, (module, description) in commands.items():
        word = name.removeprefix(prefix)
        if not name.startswith(prefix) or " " in word:
            continue
        has_subcommands = any(other.startswith(f"{name} ") for other in commands)
        parents = [read_parser(module, hides_positionals=has_subcommands)]
        if has_subcommands:
            group = argparse.ArgumentParser(add_help=False)
            add_subcommands(group, commands, f"{name} ")
            parents.insert(0, group)
        subparsers.add_parser(word, help=description, parents=parents, add_help=False)


def read_parser(module: str, *, hides_positionals: bool) -> argparse.ArgumentParser:
    """Return the parser of a command, with shtab's attribute `complete` on arguments for recipes and files.

    hides_positionals: whether to leave positional arguments out of the script.
    """
    import shtab

    from wfm_reward.registry import list_reward_names

    parser: argparse.ArgumentParser = importlib.import_module(module).parser()
    for action in parser._actions:
        completer = None
        if action.dest in RECIPE_ARGUMENTS:
            completer = RECIPE_COMPLETER
        elif action.metavar == "REWARD" or (module, action.dest) == ("wfm_ds.cli.rewards", "name"):
            action.choices = list_reward_names()
        elif action.metavar == "DIR":
            completer = shtab.DIRECTORY
        elif action.type is Path or action.dest in FILE_ARGUMENTS:
            completer = shtab.FILE
        if completer is not None:
            action.complete = completer  # type: ignore[attr-defined]
        if not action.option_strings and hides_positionals:
            action.help = argparse.SUPPRESS
        elif not action.option_strings and action.help == argparse.SUPPRESS:  # shtab would omit it
            action.help = action.dest
    return parser
