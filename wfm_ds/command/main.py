"""`wfm COMMAND ...`: which module a word of it means. Each has `parser()` and `run(args)`, as `program` wants them.

Nothing heavy is imported before the arguments are read, so that `--help` of each costs a blink. Exit codes as of all
commands (program.py).
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from wfm_ds import __version__
from wfm_ds.errors import UserError
from wfm_ds.program import exit_code, program

COMMANDS = {
    "init": ("wfm_ds.command.init", "look at data and a model, and write a recipe for them"),
    "train": ("wfm_ds.command.train", "train a recipe on the GPUs of this machine, or of several"),
    "check": ("wfm_ds.command.check", "validate a recipe, its data, model and rewards; print the numbers"),
    "recipes": ("wfm_ds.command.recipes", "list, show or copy the recipes that come with wfm_ds"),
    "models": ("wfm_ds.command.models", "list the model families, or tell what a pipeline folder is"),
    "models check": ("wfm_ds.models.check", "check a model family of yours against the stock pipeline"),
    "rewards": ("wfm_ds.command.rewards", "list the rewards, or tell what one measures and takes"),
    "generate": ("wfm_ds.generate", "draw prompts with a pipeline, with or without what a run exported"),
    "evaluate": ("wfm_ds.command.evaluate", "compare models on the same prompts and seeds, and tell who was fooled"),
    "answer": ("wfm_ds.command.answer", "ask a vision-language model about images and videos"),
    "convert": ("wfm_ds.convert", "turn a checkpoint or LoRA into files that diffusers or another tool loads"),
    "page": ("wfm_ds.monitoring.page", "write the page of runs that ended before there was one"),
    "doctor": ("wfm_ds.doctor.command", "check this machine, and what a recipe needs of it"),
    "migrate": ("wfm_ds.migrate.command", "translate a configuration of Cosmos-RL into a recipe"),
    "quickstart": ("wfm_ds.quickstart.command", "train a small world from nothing, improve it by RL"),
    "data": ("wfm_ds.data.__main__", "show how a folder of images or videos and captions is read"),
    "data captions": ("wfm_ds.data.captions", "write captions for the images and videos of a folder"),
    "data digits": ("wfm_ds.data.digits", "write the quickstart's digits as a data folder"),
    "data moving": ("wfm_ds.data.moving", "write the quickstart's moving shapes as a data folder"),
    "data room": ("wfm_ds.data.room", "write clips of a room with the paths of their camera as a data folder"),
    "data brightness": ("wfm_ds.data.brightness", "write the quickstart's clips with actions as a data folder"),
}
"""What stands behind `wfm`, in the order of its help: the module, and what it does."""
EXAMPLE = "wfm train tiny/sd3_nft --gpus 2"


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: run(words))


def run(words: Sequence[str]) -> int:
    """Do what the words say. Raises UserError if they name no command."""
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return 0
    if words[0] == "--version":
        sys.stdout.write(f"wfm_ds {__version__}\n")
        return 0
    name = named_by(words)
    module = importlib.import_module(COMMANDS[name][0])
    parser = module.parser()
    parser.prog = f"wfm {name}"
    return program(parser, module.run, words[len(name.split()) :])


def overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = (f"  {name:{width}}{what}\n" for name, (_, what) in COMMANDS.items())
    return (
        f"usage: wfm COMMAND ...\n\nPost-train diffusion world models (wfm_ds {__version__}).\n\n{''.join(lines)}"
        f"\nwfm COMMAND --help tells more of each. Example: {EXAMPLE}\n"
    )


def named_by(words: Sequence[str]) -> str:
    """The command that the first words are. Raises UserError with what may have been meant."""
    for count in (2, 1):
        if (name := " ".join(words[:count])) in COMMANDS:
            return name
    meant = difflib.get_close_matches(words[0], COMMANDS, n=2)
    raise UserError(
        f"wfm {words[0]}: there is no such command; "
        + (f"did you mean wfm {' or wfm '.join(meant)}?" if meant else f"they are {', '.join(COMMANDS)}")
    )
