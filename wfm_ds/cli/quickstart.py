"""`wfm quickstart`: train a small model from scratch by SFT, improve it by DiffusionNFT, and report the result.

All runs use the ordinary training command with the demo's recipes in recipes/. The demo `fewstep` distills the result
of the demo `digits`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wfm_ds.demos.base import Demo, find_sft_pipeline
from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser
from wfm_ds.recipe import shipped_recipes

MARKER_FILE = "QUICKSTART"
SHOWN_LINE = re.compile(r"\d\d:\d\d:\d\d (?:INFO (step .*)|((?:WARNING|ERROR|CRITICAL) .*))")
"""Lines of a training log that the quickstart shows: progress, evaluations, warnings and errors."""
DEMO_CLASSES = {  # {demo: its module in wfm_ds.demos and its class, which are slow to import}
    "digits": "digits:DigitsDemo",
    "shapes": "shapes:ShapesDemo",
    "actions": "actions:ActionsDemo",
    "long": "long_actions:LongActionsDemo",
    "edits": "edits:EditsDemo",
}
FEW_STEPS = "fewstep"  # starts from the result of the demo digits
DEMOS = (*DEMO_CLASSES, FEW_STEPS)
OLD_NAMES = {"digits": "digits", "moving": "shapes", "world": "actions"}  # {value of --world, the former option: demo}


def parser() -> CommandParser:
    p = CommandParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    p.add_argument(
        "--demo",
        choices=DEMOS,
        default=DEMOS[0],
        help="handwritten digits (default), videos of moving shapes, videos that follow actions, long videos made clip "
        "by clip, edits of images, or few-step distillation of the digits",
    )
    p.add_argument("--world", dest="demo", type=parse_old_name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    p.add_argument(
        "--output",
        type=Path,
        help="output folder; replaced if a quickstart has written it (default outputs/quickstart, -video, -world, "
        "-long, -edits or -fewstep)",
    )
    p.add_argument("--seed", type=int, default=0, help="run.seed of all runs")
    p.add_argument("--rl", metavar="RECIPE", help="RL recipe of the demo (default nft; long: nft and nft_history)")
    p.add_argument(
        "--start",
        type=Path,
        help="only with --demo fewstep: folder of the digits quickstart, which runs first if the folder is empty or "
        "does not exist (default outputs/quickstart)",
    )
    p.add_argument(
        "--control", action="store_true", help="control experiment: shuffle the rewards, RL must not improve"
    )
    return p


def parse_old_name(text: str) -> str:
    if text not in OLD_NAMES:
        raise argparse.ArgumentTypeError(f"invalid choice {text!r}; choose --demo {', '.join(DEMOS)}")
    return OLD_NAMES[text]


def run(args: argparse.Namespace) -> None:
    require_fitting_options(args)
    if args.demo == FEW_STEPS:
        run_few_steps(args.output, args.start, args.seed)
        return
    demo = load_demo(args.demo)
    rl_recipes = demo.rl_recipes if args.rl is None else (args.rl,)
    run_demo(demo, args.output or demo.output, rl_recipes, args.seed, is_control=args.control)


def require_fitting_options(args: argparse.Namespace) -> None:
    if args.demo == FEW_STEPS and (args.rl is not None or args.control):
        option = "--control" if args.control else "--rl"
        raise UserError(f"{option} does not work with --demo {FEW_STEPS}, which trains without rewards: remove it")
    if args.demo != FEW_STEPS and args.start is not None:
        raise UserError(f"--start is only for --demo {FEW_STEPS}: remove it")


def run_demo(demo: Demo, output: Path, rl_recipes: Sequence[str], seed: int, *, is_control: bool = False) -> None:
    start_s = time.monotonic()
    for name in rl_recipes:
        require_rl_recipe(demo, name)
    prepare_folder(demo, output)
    sft_result = run_sft(demo, output, output / "sft", seed)
    for name in rl_recipes:
        run_rl(demo, output, output / name, sft_result, seed, f"reward.shuffle={str(is_control).lower()}")
    write_report(demo, output, output / rl_recipes[-1], seconds=time.monotonic() - start_s)


def run_few_steps(output: Path | None, start: Path | None, seed: int) -> None:
    """Distill the result of the digits quickstart, and write the report.

    start: folder of the digits quickstart. If it is empty or missing, the digits quickstart runs there first. Raises
    UserError if it contains anything other than a finished quickstart.
    """
    from wfm_ds.demos import few_steps
    from wfm_ds.demos.report_page import PAGE_FILE

    folder, start = output or few_steps.OUTPUT, start or few_steps.START
    if start.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"--output {folder} would replace the digits quickstart {start}: choose another folder")
    is_empty = is_empty_folder(start)
    if not is_empty and not (start / few_steps.TEACHER_RUN / "result.json").exists():
        raise UserError(
            f"--start {start} has no finished run {few_steps.TEACHER_RUN}: name the folder of a finished digits "
            "quickstart, or a new folder"
        )
    require_replaceable(folder)
    if is_empty:
        print_text(f"{start} has no digits quickstart, so it runs first.")
        run_demo(load_demo("digits"), start, [few_steps.TEACHER_RUN], seed)
    replace_folder(folder)
    start_s = time.monotonic()
    for name, (recipe, overrides) in few_steps.RUNS.items():
        where = (f"run.output_dir={folder / name}", f"run.seed={seed}")
        run_training(recipe, *where, *few_steps.start_overrides(start), *overrides)
    code = few_steps.diffusers_lines(folder, start)
    text = few_steps.write_report(folder, start, code, seconds=time.monotonic() - start_s)
    print_text(f"{text}\n\nReport with images: {folder / PAGE_FILE}")


def require_rl_recipe(demo: Demo, name: str) -> None:
    path = shipped_recipes.require_recipe(f"{demo.name}/{name}")
    if not is_rl_recipe(path):
        others = [recipe for recipe in shipped_recipes.list_recipe_names() if recipe.startswith(f"{demo.name}/")]
        names = [recipe.rpartition("/")[2] for recipe in others if is_rl_recipe(Path(recipe))]
        raise UserError(f"--rl {name} is not an RL recipe: choose {' or '.join(names)}")


def is_rl_recipe(path: Path) -> bool:
    from wfm_ds.recipe.file import load_recipe

    recipe = load_recipe(path)
    return recipe.uses_rewards and not recipe.algorithm.list_teachers()


def load_demo(name: str) -> Demo:
    module, _, class_name = DEMO_CLASSES[name].partition(":")
    demo: Demo = getattr(importlib.import_module(f"wfm_ds.demos.{module}"), class_name)()
    return demo


def prepare_folder(demo: Demo, folder: Path) -> None:
    """Empty the folder, and write the demo's data and untrained pipeline to it.

    Raises UserError if other programs wrote to the folder.
    """
    from wfm_ds.distributed.accelerator import choose_accelerator

    replace_folder(folder)
    choose_accelerator()  # else DeepSpeed logs a warning on a machine without a GPU
    from wfm_ds.models.tiny import write_tiny_model  # imports torch and transformers

    print_text(f"Preparing the data ({demo.description}) and a model with random weights.")
    demo.write_data(folder / "data")
    write_tiny_model(demo.pipeline or demo.name, folder / "model")


def replace_folder(folder: Path) -> None:
    require_replaceable(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER_FILE).write_text("Written by wfm quickstart, which replaces this folder when it runs again.\n")


def require_replaceable(folder: Path) -> None:
    if not is_empty_folder(folder) and not (folder / MARKER_FILE).exists():
        raise UserError(f"{folder} was not written by a quickstart: choose an empty folder")


def is_empty_folder(folder: Path) -> bool:
    return not folder.exists() or not any(folder.iterdir())


def run_sft(demo: Demo, folder: Path, out: Path, seed: int, *overrides: str) -> Mapping[str, Any]:
    """Train the demo's model by SFT from random weights, and return the run's result.json.

    folder: folder written by `prepare_folder`. out: output folder of the run.
    """
    return run_training(
        f"{demo.name}/sft",
        f"run.output_dir={out}",
        f"run.seed={seed}",
        f"model.path={folder / 'model'}",
        f"data.path={folder / 'data' / demo.sft_data}",
        *demo.sft_overrides(folder),
        *overrides,
    )


def run_rl(
    demo: Demo, folder: Path, out: Path, sft_result: Mapping[str, Any], seed: int, *overrides: str
) -> Mapping[str, Any]:
    """Train the SFT model by RL, and return the run's result.json. The name of `out` selects the demo's recipe.

    folder: folder written by `prepare_folder`. out: output folder of the run. sft_result: result.json of the SFT run.
    """
    return run_training(
        f"{demo.name}/{out.name}",
        f"run.output_dir={out}",
        f"run.seed={seed}",
        f"model.path={sft_result['artifacts']['pipeline']}",
        f"data.path={folder / 'data' / demo.rl_data}",
        *demo.rl_overrides(folder),
        *overrides,
    )


def run_training(recipe: str, *overrides: str) -> Mapping[str, Any]:
    """Train a shipped recipe in a separate process and return the run's result.json.

    overrides: the first one must set run.output_dir. If the training fails, shows its output, and this process exits
    with the same exit code.
    """
    arguments = ["train", recipe, *overrides, "--gpus", str(num_ranks())]
    print_text(f"wfm {shlex.join(arguments)}")
    code, lines = run_and_show([sys.executable, "-m", "wfm_ds", *arguments])
    if code:
        sys.stderr.write("".join(lines))
        sys.exit(code)
    folder = Path(overrides[0].removeprefix("run.output_dir="))
    result: Mapping[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def run_and_show(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command and print the lines of its output that match SHOWN_LINE. Returns (exit code, all output lines).

    After Ctrl-C, waits until the command has ended, and exits with code 130.
    """
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                if match := SHOWN_LINE.match(line):
                    sys.stdout.write(f"  {match[1] or match[2]}\n")
                    sys.stdout.flush()
        except KeyboardInterrupt:
            process.communicate()
            sys.exit(128 + signal.SIGINT)
    return process.returncode, lines


def num_ranks() -> int:
    import torch

    from wfm_ds.distributed.accelerator import uses_cuda

    return min(2, torch.cuda.device_count()) if uses_cuda() else 2


def write_report(demo: Demo, folder: Path, run: Path, *, seconds: float) -> None:
    from wfm_ds.demos.report_page import PAGE_FILE, write_page
    from wfm_ds.export.loading_code import loading_lines

    base, artifacts = find_sft_pipeline(run), json.loads((run / "result.json").read_text())["artifacts"]
    is_lora, export = "lora" in artifacts, Path(artifacts.get("lora") or artifacts["pipeline"])
    model_options = f"--model {base} --lora {export}" if is_lora else f"--pipeline {export}"
    comparison = demo.write_comparison(folder, run)
    report = [
        *comparison,
        f"Total time: {seconds:.0f} s.",
        "",
        "Load the result with diffusers:",
        "",
        *(f"    {line}" for line in loading_lines(Path(base), export, lora=is_lora).splitlines()),
        "",
        "Generate more samples, with a page to view them:",
        "",
        f"    wfm generate {model_options} \\",
        f"        {demo.generate_arguments(folder)}",
    ]
    text = "\n".join(report)
    (folder / "report.md").write_text(text + "\n")
    write_page(demo, folder, run, report)
    print_text(f"{text}\n\nReport with curves and images: {folder / PAGE_FILE}")


def print_text(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()
