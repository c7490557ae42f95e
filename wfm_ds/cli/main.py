"""Entry point of `wfm COMMAND ...`. Every command is a module with `parser()` and `run(args)`.

`run_subcommand` sets `prog` of the parser to the name of the command.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from wfm_ds import __version__
from wfm_ds.distributed.logs import quiet_libraries
from wfm_ds.errors import UserError
from wfm_ds.program import run_command, run_with_exit_code

COMMANDS = {
    "init": ("wfm_ds.cli.init.command", "write a recipe for your data and a model"),
    "train": ("wfm_ds.cli.train", "train a recipe on one or several machines"),
    "launch": ("wfm_ds.cli.launch", "write or submit the job of a recipe: SLURM, Kubernetes, SkyPilot, ssh"),
    "check": ("wfm_ds.cli.check", "check a recipe, its data, model and rewards without training"),
    "fetch": ("wfm_ds.cli.fetch", "download the model, prompts and reward weights of a recipe"),
    "recipes": ("wfm_ds.cli.recipes", "list, show or copy the shipped recipes"),
    "schema": ("wfm_ds.cli.schema", "write the JSON schema of recipes, for editors"),
    "models": ("wfm_ds.cli.models", "list the model families, or describe a pipeline folder"),
    "models check": ("wfm_ds.cli.models_check", "check your own model family against its diffusers pipeline"),
    "models tiny": ("wfm_ds.cli.models_tiny", "write a tiny random pipeline or language model"),
    "rewards": ("wfm_ds.cli.rewards", "list the rewards, or describe one and its options"),
    "generate": ("wfm_ds.cli.generate", "generate images or videos with a pipeline or an export"),
    "evaluate": ("wfm_ds.cli.evaluate", "compare models on the same prompts and seeds; detects reward hacking"),
    "answer": ("wfm_ds.cli.answer", "ask a vision-language model about images and videos"),
    "convert": ("wfm_ds.cli.convert", "convert a checkpoint or LoRA for diffusers or other tools"),
    "serve": ("wfm_reward.serve", "run a reward service"),
    "rollout": ("wfm_ds.rollout.remote.worker", "generate samples for an async run on another GPU or machine"),
    "keys": ("wfm_ds.transport.keys", "create keys for connections between machines"),
    "page": ("wfm_ds.cli.page", "write the HTML page of a finished run"),
    "doctor": ("wfm_ds.cli.doctor.command", "check this machine and the requirements of a recipe"),
    "migrate": ("wfm_ds.cli.migrate", "convert a Cosmos-RL configuration to a recipe"),
    "quickstart": ("wfm_ds.cli.quickstart", "train a small demo model from scratch and improve it with RL"),
    "completion": ("wfm_ds.cli.completion", "print the script with which bash or zsh completes commands"),
    "data": ("wfm_ds.cli.data", "show how a folder of images or videos with captions is read"),
    "data prompts": ("wfm_ds.cli.prompts", "download a published prompt set"),
    "data captions": ("wfm_ds.cli.captions", "write captions for the images and videos in a folder"),
    "data stats": ("wfm_ds.cli.data_stats", "write the statistics of a data set's actions"),
    "data embeddings": ("wfm_ds.data.embeddings", "convert the text embeddings of a Cosmos folder"),
    "data prepare": ("wfm_ds.data.prepare", "fill the cache of text embeddings and latents of a recipe"),
    "data digits": ("wfm_ds.demos.digits_data", "write the digits data of the image quickstart"),
    "data moving": ("wfm_ds.demos.shapes_data", "write the moving shapes data of the video quickstart"),
    "data room": ("wfm_ds.demos.room_data", "write room clips with camera paths"),
    "data squares": ("wfm_ds.demos.squares_data", "write questions about coloured squares for reasoners"),
    "data brightness": ("wfm_ds.demos.actions_data", "write the clips with actions of the action quickstart"),
}
"""{command: (module, description)} in the order of the help."""
EXAMPLE = "wfm train cp_nft --tiny"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    argv: the arguments. None: use sys.argv[1:], and put the current folder on sys.path.
    """
    if argv is None:
        add_current_folder()
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_with_exit_code(lambda: run_subcommand(arguments))


def add_current_folder() -> None:
    folder = os.getcwd()
    if not sys.flags.safe_path and sys.path[0] != folder:
        sys.path.insert(0, folder)


def run_subcommand(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(format_overview())
        return 0
    if arguments[0] == "--version":
        sys.stdout.write(f"wfm_ds {__version__}\n")
        return 0
    name = find_command(arguments)
    quiet_libraries()
    module = importlib.import_module(COMMANDS[name][0])
    parser = module.parser()
    parser.prog = f"wfm {name}"
    return run_command(parser, module.run, arguments[len(name.split()) :])


def format_overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = (f"  {name:{width}}{description}\n" for name, (_, description) in COMMANDS.items())
    return (
        f"usage: wfm COMMAND ...\n\nPost-train diffusion world models (wfm_ds {__version__}).\n\n{''.join(lines)}"
        f"\nRun wfm COMMAND --help for details. Example: {EXAMPLE}\n"
    )


def find_command(arguments: Sequence[str]) -> str:
    for count in (2, 1):
        if (name := " ".join(arguments[:count])) in COMMANDS:
            return name
    close = difflib.get_close_matches(arguments[0], COMMANDS, n=2)
    raise UserError(
        f"wfm {arguments[0]}: unknown command; "
        + (f"did you mean wfm {' or wfm '.join(close)}?" if close else f"commands: {', '.join(COMMANDS)}")
    )
