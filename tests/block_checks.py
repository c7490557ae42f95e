"""Checks of a recipe, a command or Python code that a page of the docs shows.

A recipe in a command is a shipped one, or the reader's own if its name matches OWN_RECIPE.
"""

import argparse
import ast
import contextlib
import importlib
import itertools
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
import yaml

from wfm_ds.cli import main as wfm
from wfm_ds.errors import UserError
from wfm_ds.launch import normalize_arguments
from wfm_ds.program import CommandParser
from wfm_ds.recipe.file import load_recipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.schema_description import SCHEMA_ROOT, member_names
from wfm_ds.recipe.shipped_recipes import require_recipe
from wfm_ds.user_class import is_user_class
from wfm_reward import registry
from wfm_reward.config import load_config

ROOT = Path(__file__).parent.parent
OUR_PROGRAMS = ("wfm", "python", "deepspeed", "make")
OTHER_PROGRAMS = (".", "aws", "cd", "cp", "curl", "docker", "export", "git", "head", "hf", "ls", "pip", "printf")
OTHER_PROGRAMS += ("kubectl", "sbatch", "scontrol", "scp", "sed", "sky", "source", "ssh", "tail", "tensorboard")
OTHER_MODULES = ("pip", "pytest", "venv")  # commands run by `python -m`
OUR_MODULE = re.compile(r"(wfm_ds|wfm_reward|wfm_kernels|benchmarks)\b")
OWN_RECIPE = re.compile(r"RECIPE|(?!recipes/)(.*/)?(mine|my_\w+|recipe)\.yaml")
REPOSITORY_PATH = re.compile(r"(?:^|[\s=])((?:recipes|tests|docs|benchmarks|ds_configs)/[\w./-]+)")
INDENTED_COMMAND = re.compile(rf" {{4,}}(\$ )?({'|'.join(map(re.escape, OUR_PROGRAMS + OTHER_PROGRAMS))}) ")
MAKEFILE = (ROOT / "Makefile").read_text()
MINIMAL_RECIPE = """
run: {{output_dir: outputs/mine, steps: 100}}
model: {{path: "tiny:sd3"}}
algorithm: {{name: {name}{keys}}}
data: {{kind: {kind}, path: data{inputs}}}
"""
FRAMES = ", min_num_conditional_frames: 1, max_num_conditional_frames: 1"
SAMPLING = "sampling: {height: 480, width: 480, num_frames: 9, steps: 4, eval_steps: 4}\n"
ROLLOUTS = SAMPLING + "rollout: {prompts_per_step: 4, group_size: 4}\n"
RL_SECTIONS = ROLLOUTS + "reward: {functions: [{name: color}]}\n"
REQUIRED_KEYS = {"opd": ", teachers: [{guidance_scale: 2}]"}  # of the section `algorithm`


# ---- recipes


def check_recipe(file, text=None, overrides=()):
    """Load a recipe and check its rewards. If `text` is given, write it to the file first. Raises UserError."""
    if text is not None:  # its `defaults` are a shipped recipe or an absolute path
        file.write_text(re.sub(r"(?m)^defaults: (?=\w)", f"defaults: {ROOT}/recipes/", text))
    recipe = load_recipe(file, overrides)
    for function in recipe.all_reward_settings.functions if recipe.all_reward_settings else ():
        if not is_user_class(function.name.partition("/")[0]):
            registry.check_reward(function.name, "cpu", function.options, function.max_batch)


def require_any(attempts):
    """Run attempts until one succeeds. If all fail, raises the UserError with the fewest problems."""
    errors = []
    for attempt in attempts:
        try:
            return attempt()
        except UserError as error:
            errors.append(error)
    raise min(errors, key=lambda error: (str(error).count("\n"), -len(str(error))))


def write_minimal_recipes(folder):
    """Write valid recipes with few keys, for every algorithm and kind of data, and return their files."""
    valid = []
    sections = {"sft": SAMPLING, "dpo": SAMPLING, "vlm_sft": "", "opd": ROLLOUTS, "dmd2": ROLLOUTS}
    for name in member_names(SCHEMA_ROOT.child("algorithm", {})):
        variants = itertools.product(
            ["folder", "prompts", "pairs", "llava"],
            ["", FRAMES],
            ["", ", inputs: [actions]"],
            ["", "lora: {rank: 8}\n"],
        )
        for i, (kind, frames, inputs, lora) in enumerate(variants):
            keys = REQUIRED_KEYS.get(name, "") + frames
            text = MINIMAL_RECIPE.format(name=name, kind=kind, keys=keys, inputs=inputs)
            with contextlib.suppress(UserError):
                check_recipe(folder / f"{name}_{i}.yaml", text + lora + sections.get(name, RL_SECTIONS))
                valid.append(folder / f"{name}_{i}.yaml")
    return valid


def check_yaml(text, file, minimal_recipes):
    """Write a YAML block to `file` and check it. Return "whole", "fragment" or "service". Raises UserError."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"not YAML: {' '.join(str(error).split())}") from error
    sections = set(values) if isinstance(values, dict) else set()
    if "rewards" in sections:
        file.write_text(text)
        for name, reward in load_config(file).rewards.items():
            registry.check_reward(name, reward.device, reward.options, reward.max_batch)
        return "service"
    if not sections & {*Recipe.model_fields, "defaults"}:
        raise UserError("neither a recipe nor a configuration of the reward service: mark it as ```text")
    if "defaults" in sections or {"run", "model", "data", "algorithm"} <= sections:
        check_recipe(file, text)
        return "whole"
    require_any(partial(check_recipe, file, f"{text}defaults: {base}\n") for base in minimal_recipes)
    return "fragment"


# ---- commands


class ArgumentsParsed(BaseException):
    """Raised in place of running a command. Holds its parsed arguments or its parser's message."""


def parse_arguments(entry, arguments):
    """Return the arguments as the command parses them, without running it. Raises UserError."""

    def reject(parser, message):
        raise ArgumentsParsed({}, message)

    def stop_after(parse):
        def parse_and_stop(parser, args=None):
            raise ArgumentsParsed(vars(parse(parser, args)), "")

        return parse_and_stop

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, stop_after(getattr(argparse.ArgumentParser, name)))
        patch.setattr(argparse.ArgumentParser, "error", reject)
        patch.setattr(CommandParser, "error", reject)
        try:
            entry(arguments)
        except ArgumentsParsed as stop:
            if stop.args[1]:
                raise UserError(stop.args[1]) from None
            return stop.args[0]
    raise UserError("the command does not parse its arguments")


def import_main(module):
    """Return the function `main` of `python -m MODULE`. Raises UserError."""
    if not OUR_MODULE.match(module):
        raise UserError(f"unknown module {module}")
    try:
        is_package = hasattr(importlib.import_module(module), "__path__")
        return importlib.import_module(f"{module}.__main__" if is_package else module).main
    except (ImportError, AttributeError) as error:
        raise UserError(f"python -m {module}: {error}") from error


def check_arguments(parsed, own_recipes):
    """Load the recipes of parsed arguments with their overrides. Raises UserError."""
    if parsed.get("action") in ("list", "copy", "show"):  # wfm recipes
        return None if parsed["action"] == "list" else require_recipe((parsed["words"] or [""])[0])
    words = [word for key in ("recipes", "overrides", "words", "set") for word in parsed.get(key) or ()]
    words = [str(word) for word in (parsed.get("recipe"), *words) if word is not None]
    overrides = [word for word in words if "=" in word]
    for recipe in [word for word in words if "=" not in word]:
        files = own_recipes if OWN_RECIPE.fullmatch(recipe) else [Path(recipe)]
        require_any(partial(check_recipe, file, overrides=overrides) for file in files)
    return None


def check_command(words, own_recipes, scripts):
    """Check a command of a page, given the recipes and Python files of the page. Raises UserError."""
    for path in REPOSITORY_PATH.findall(" ".join(words)):
        if not (ROOT / path).exists():
            raise UserError(f"{path} does not exist")
    match words:
        case ["wfm", *arguments]:
            check_arguments(parse_arguments(wfm.run_subcommand, arguments), own_recipes)
        case ["python", "-m", module, *arguments] if module not in OTHER_MODULES:
            check_arguments(parse_arguments(import_main(module), arguments), own_recipes)
        case ["python", script, *_] if script != "-m" and script not in scripts:
            raise UserError(f"the page has no block that opens with # {script}")
        case ["deepspeed", *arguments]:
            runner = importlib.import_module("deepspeed.launcher.runner")
            parsed = parse_arguments(runner.main, normalize_arguments(arguments)[0])
            check_command(["python", "-m", parsed["user_script"], *parsed["user_args"]], own_recipes, scripts)
        case ["make", target, *variables]:
            if not re.search(rf"(?m)^{re.escape(target)}:", MAKEFILE):
                raise UserError(f"the Makefile has no target {target}")
            if unknown := [word for word in variables if f"$({word.partition('=')[0]})" not in MAKEFILE]:
                raise UserError(f"the Makefile does not read {unknown[0]}")
        case ["bash" | "srun", *_, "-c", line]:
            check_line(line, own_recipes, scripts)
        case ["torchrun", *_, "-m", module, recipe] | ["srun" | "mpirun", *_, "-m", module, recipe]:
            check_command(["python", "-m", module, recipe], own_recipes, scripts)
        case ["bash", script] if script.endswith(".pdsh.sh"):  # written by wfm launch
            pass
        case [program, *_] if program not in OUR_PROGRAMS + OTHER_PROGRAMS:
            raise UserError(f"unknown program {program}")


def check_line(line, own_recipes, scripts):
    """Check the commands of a shell line. Leading variable assignments and redirections are ignored."""
    reader = shlex.shlex(re.sub(r"\d?(>&\d|[<>]+ *\S+)", "", line), posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    for is_operator, words in itertools.groupby(reader, key=lambda word: set(word) <= set("();|&")):
        if not is_operator:
            words = itertools.dropwhile(lambda word: re.match(r"\w+=|exec$", word), words)
            # Replace a variable by 1, which is valid as text and as a number.
            words = [re.sub(r"\$\{?\w+\}?", "1", word) for word in words]
            check_command(words, own_recipes, scripts)


def check_prose(line):
    """Check a line outside of blocks. Raises UserError."""
    if INDENTED_COMMAND.match(line):
        raise UserError("an indented command: use a block ```bash")
    for text in re.findall(r"`([^`]+)`", line):
        check_inline_command(text.split())


def check_inline_command(words):
    """Check a command in prose: only its name and the names of its options. Raises UserError."""
    match words:
        case ["wfm", name, *_] if name.islower():
            command = wfm.find_command(words[1:])
            help_text = importlib.import_module(wfm.COMMANDS[command][0]).parser().format_help()
            options = re.findall(r"--[\w-]+", help_text)
            if unknown := [word for word in words if word.startswith("--") and word not in options]:
                raise UserError(f"wfm {command} has no option {unknown[0]}")
        case ["python", "-m", module, *_] if OUR_MODULE.match(module) and module != "wfm_ds.NAME":
            import_main(module)
        case ["make", target, *_]:
            check_command(["make", target], (), ())


# ---- Python


def check_python(text):
    """Compile a Python block and run its imports from our packages. Raises SyntaxError, also for failed imports."""
    for node in ast.walk(ast.parse(text)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(map(OUR_MODULE.match, modules)):
            try:
                exec(ast.unparse(node), {})
            except ImportError as error:
                raise SyntaxError(str(error), ("", node.lineno, None, None)) from error
