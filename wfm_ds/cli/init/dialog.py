"""The dialog of `wfm init`: complete the options by questions, then write the recipe.

torch is imported as late as possible, because this takes seconds.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from wfm_ds.cli.init.data_summary import DataSummary, Task, read_data
from wfm_ds.cli.init.model_summary import read_language_model, read_pipeline
from wfm_ds.cli.init.questions import TASKS, Questions
from wfm_ds.cli.init.recipe_lines import RecipeRequest
from wfm_ds.cli.init.sections import create_sections, format_recipe
from wfm_ds.cli.rewards import first_doc_line
from wfm_ds.distributed.accelerator import choose_accelerator
from wfm_ds.errors import RecipeError, UserError
from wfm_ds.evaluation.paired_statistics import MIN_PROMPTS
from wfm_ds.models.assets.hub import require_pipeline_folder
from wfm_ds.models.assets.local_folders import require_local_model
from wfm_ds.program import collect_garbage_rarely
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tiny import TINY_PREFIX, TinyFamily, find_tiny_family
from wfm_ds.storage.filesystem import is_repo_id
from wfm_reward import registry

MODELS: dict[str, tuple[str, ...]] = {
    "image": (
        *("stabilityai/stable-diffusion-3.5-medium", "black-forest-labs/FLUX.2-klein-base-4B", "Qwen/Qwen-Image"),
        *("Tongyi-MAI/Z-Image", "tiny:sd3"),
    ),
    "video": (
        *("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", "nvidia/Cosmos-Predict2.5-2B"),
        *("nvidia/Cosmos3-Nano", "tiny:wan21"),
    ),
    "edits": (
        *("Qwen/Qwen-Image-Edit-2511", "black-forest-labs/FLUX.1-Kontext-dev"),
        *("black-forest-labs/FLUX.2-klein-base-4B", "tiny:flux2"),
    ),
    "first frame": ("Wan-AI/Wan2.2-I2V-A14B-Diffusers", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "tiny:wan22_i2v"),
    "actions": ("nvidia/Cosmos3-Nano", "nvidia/Cosmos3-Super", "tiny:cosmos3"),
    "conversations": ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-2B-Instruct", "tiny:qwen25vl"),
}
REWARDS = {
    "image": ("pickscore", "hpsv2", "clipscore", "aesthetic", "image_reward", "ocr"),
    "video": ("video_align", "motion", "consistency", "cosmos_reason1"),
}
EDIT_REWARDS = ("edit_judge", "preservation")  # for data with source images
HELD_OUT_REWARDS = {"image": ("clipscore", "pickscore"), "video": ("motion", "consistency")}
NONE = "none"


def run_dialog(args: argparse.Namespace) -> None:
    questions = Questions(can_ask=sys.stdin.isatty() and not args.yes)
    if args.out is not None:
        require_new_file(args.force, str(args.out))
    if args.prompt is not None and not args.prompt.strip():
        raise UserError("--prompt is blank: give a caption, or remove the option")
    request = complete_request(args, questions)
    if questions.has_asked:
        sys.stdout.write(f"\nThe same without questions:\n  {format_command(request, force=args.force)}\n\n")
    out = request.out
    with collect_garbage_rarely():  # imports torch and diffusers, which takes seconds
        choose_accelerator()
        model = (read_language_model if request.task == "reasoner" else read_pipeline)(request.model_path)
        write_recipe(out, format_recipe(create_sections(request, model), out))
    next_step = f"wfm check {shlex.quote(str(out))}"
    sys.stdout.write(f"data: {request.data.description}\nmodel: {model.title}\nwrote {out}; next: {next_step}\n")


def complete_request(args: argparse.Namespace, questions: Questions) -> RecipeRequest:
    def read(text: str) -> DataSummary:
        return read_data(Path(text).expanduser(), prompt=args.prompt, media_path=args.media_path)

    if args.model is not None and not (args.model.startswith(TINY_PREFIX) or is_repo_id(args.model)):
        require_pipeline_folder(args.model)  # before the data is read, which may take long
    if args.data is None:
        data = questions.ask_value("Data, a folder or a file", read, option="--data")
    else:
        data = read(args.data)
    task = choose_task(args, data, questions)
    require_used_options(args, data, task)
    model_path = args.model
    if model_path is None:
        names = suggest_models(data, task)
        model_path = questions.choose(
            "Model:", dict.fromkeys(names, ""), option="--model", other="owner/name or a folder"
        )
    require_local_model(model_path, is_language_model=task == "reasoner")
    reward, held_out = choose_rewards(args, data, task, model_path, questions)
    trains_all_weights = choose_weights(args, task, questions)
    if args.out is None:
        check = partial(require_new_file, args.force)
        out = questions.ask_value("Recipe file to write", check, option="--out", default="mine.yaml")
    else:
        out = args.out.expanduser()
    return RecipeRequest(
        task=task,
        data=data,
        model_path=model_path,
        trains_all_weights=trains_all_weights,
        out=out,
        reward=reward,
        held_out_reward=held_out,
        prompt=args.prompt,
    )


def require_new_file(may_overwrite: bool, text: str) -> Path:
    """Return the path of the recipe to write. text: the path as the user entered it.

    Raises UserError if its folder does not exist, or if the file exists and may_overwrite is False.
    """
    out = Path(text).expanduser()
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file with --out")
    if out.exists() and not may_overwrite:
        raise UserError(f"{out} exists: choose another file with --out, or overwrite it with --force")
    if not out.parent.is_dir():
        raise UserError(f"{out}: folder {out.parent} not found")
    return out


def choose_task(args: argparse.Namespace, data: DataSummary, questions: Questions) -> Task:
    task: Task | None = args.task
    if args.rl is not None:
        if task not in (None, "rl"):
            raise UserError(f"--rl {args.rl} and --task {task} contradict each other: remove one of them")
        task = "rl"
    usual = data.tasks[0]
    if usual == "actions" and args.model is not None:
        family = guess_family(args.model)
        if family is None or family.action_size is None:
            usual = "sft"
    if task is None and len(data.tasks) > 1:
        choices: dict[str, str] = {name: TASKS[name] for name in data.tasks}
        answer = questions.choose(f"{data.path} has {data.description}. Task:", choices, option="--task", default=usual)
        task = next(name for name in data.tasks if name == answer)
    task = task or usual
    if task not in data.tasks:
        raise UserError(f"{data.path} has {data.description}, which do not fit --task {task} (docs/data.md)")
    return task


def require_used_options(args: argparse.Namespace, data: DataSummary, task: Task) -> None:
    for option, value, is_used in (
        ("--prompt", args.prompt, data.content == "media"),
        ("--media-path", args.media_path, data.content == "conversations"),
        ("--held-out", args.held_out, task != "reasoner"),
    ):
        if value is not None and not is_used:
            raise UserError(f"{option} has no effect, because {data.path} has {data.description}: remove it")


def suggest_models(data: DataSummary, task: Task) -> tuple[str, ...]:
    if task == "actions":
        return MODELS["actions"]
    if data.content == "conversations":
        return MODELS["conversations"]
    if data.content == "prompts":
        return (*MODELS["image"], *MODELS["video"])
    if "source" in data.metadata_keys:
        return MODELS["edits"]
    if task == "rl":
        return MODELS["first frame"]
    return MODELS["video" if data.are_videos else "image"]


def guess_family(model_path: str) -> TinyFamily | None:
    try:
        return find_tiny_family(model_path)
    except RecipeError:
        return None


def choose_rewards(
    args: argparse.Namespace, data: DataSummary, task: Task, model_path: str, questions: Questions
) -> tuple[str | None, str | None]:
    """Return (reward to train on, held-out reward).

    Raises RewardError for unknown rewards. Raises UserError if the held-out reward is trained on, or if the data has
    too few prompts for it.
    """
    family, kinds = guess_family(model_path), ["image", "video"]
    if family is not None:
        kinds = ["video" if family.is_video else "image"]
    reward, held_out = args.rl, args.held_out
    if task == "rl" and reward is None:
        choices = {name: first_sentence(name) for name in suggest_rewards(kinds, data)}
        reward = questions.choose("Reward:", choices, option="--rl", other="the name of another reward")
    if reward is not None:
        registry.get_reward_class(reward)
    has_few_prompts = task == "rl" and data.num_samples < MIN_PROMPTS
    if held_out is None and task == "rl" and not has_few_prompts:
        # The held-out rewards for prompts compare a sample with a description, not with an instruction.
        is_edit = "source" in data.metadata_keys
        names = [] if is_edit else [name for name in HELD_OUT_REWARDS[kinds[0]] if name != reward]
        choices = {name: first_sentence(name) for name in names} | {NONE: "no alarm against reward hacking"}
        question = "Held-out reward, which is watched but not trained on:"
        held_out = questions.choose(
            question, choices, option="--held-out", default=[*names, NONE][0], other="another name"
        )
    if held_out in (None, NONE):
        return reward, None
    registry.get_reward_class(held_out)
    if held_out == reward:
        raise UserError(f"--held-out {held_out}: the run trains on this reward: choose another one, or none")
    if has_few_prompts:
        raise UserError(
            f"--held-out {held_out}: {data.path} has {data.num_samples} prompts, but the alarm against reward hacking "
            f"needs {MIN_PROMPTS}: add prompts, or use --held-out {NONE}"
        )
    return reward, held_out


def suggest_rewards(kinds: Sequence[str], data: DataSummary) -> list[str]:
    if "source" in data.metadata_keys:
        return list(EDIT_REWARDS)
    special = []
    for name in registry.list_reward_names():
        reward = registry.get_reward_class(name)
        needed = {*reward.required_metadata, *reward.required_inputs}
        if needed and needed <= data.metadata_keys and not reward.media_types.isdisjoint(kinds):
            special.append(name)
    return [*special, *(name for kind in kinds for name in REWARDS[kind])]


def first_sentence(reward_name: str) -> str:
    return first_doc_line(registry.get_reward_class(reward_name)).partition(". ")[0].rstrip(".")


def choose_weights(args: argparse.Namespace, task: Task, questions: Questions) -> bool:
    """Return whether to train all weights instead of a LoRA. The default is True only for action tasks."""
    if task == "distill" and args.full:
        raise UserError("--full: distillation trains only a LoRA: remove it")
    if args.full or args.lora or task == "distill":
        return bool(args.full)
    choices = {"LoRA": "small file, little memory", "all weights": "a whole pipeline, needs large GPUs"}
    default = "all weights" if task == "actions" else "LoRA"
    return questions.choose("Train:", choices, option="--full", default=default) == "all weights"


def format_command(request: RecipeRequest, *, force: bool) -> str:
    words = ["wfm", "init", "--data", str(request.data.path), "--task", request.task, "--model", request.model_path]
    words += ["--rl", request.reward] if request.reward else []
    words += ["--held-out", request.held_out_reward or NONE] if request.task == "rl" or request.held_out_reward else []
    words += ["--prompt", request.prompt] if request.prompt else []
    words += ["--media-path", request.data.media_path] if request.data.media_path else []
    words += ["--full" if request.trains_all_weights else "--lora", "--out", str(request.out)]
    return shlex.join([*words, *(["--force"] if force else [])])


def write_recipe(out: Path, text: str) -> None:
    """Check the recipe without loading the model, then write it.

    Raises UserError, and writes nothing, if the recipe, its data, its folders or its rewards are invalid.
    """
    new = out.with_name(f".{out.stem}.new.yaml")
    try:
        try:
            new.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{out} cannot be written ({error.strerror}): choose another file with --out") from error
        check_recipe(recipe_file.load_recipe(new))
        os.replace(new, out)
    finally:
        new.unlink(missing_ok=True)


def check_recipe(recipe: Recipe) -> None:
    from wfm_ds.training.early_checks import check_early
    from wfm_ds.training.language_builder import check_engine_settings
    from wfm_ds.training.preflight import check_and_load_data

    check_early(recipe)
    if recipe.algorithm.trains_language:
        check_engine_settings(recipe, 1)
    else:
        check_and_load_data(recipe, 1)
