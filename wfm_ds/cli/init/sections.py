"""The recipe that `wfm init` proposes for a task, its data and a model. Each value has its reason as a comment."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from wfm_ds.cli.init.data_summary import Task
from wfm_ds.cli.init.input_lines import (
    PRESERVATION,
    choose_inputs,
    edit_lines,
    edits_images,
    input_lines,
    reward_line,
    robot_lines,
    view_lines,
)
from wfm_ds.cli.init.model_summary import LanguageModelSummary, PipelineSummary
from wfm_ds.cli.init.recipe_lines import RecipeLine, RecipeRequest, Sections
from wfm_ds.data.prompts import PROMPT_FORMATS
from wfm_ds.errors import UserError
from wfm_ds.recipe.shipped_recipes import schema_modeline
from wfm_ds.types import MASK
from wfm_reward import registry

MAX_UPSCALE = 2.0  # default of data.max_upscale: training skips files that need more
SIZE_MULTIPLE = 32  # round sizes down to this; satisfies every model family
MAX_ASPECT_CHANGE, BUCKET_SHARE = 4 / 3, 0.1  # use buckets if the aspect ratio of over 10 % differs by over 4/3
ACTION_FRAMES = 17  # 16 actions, as in NVIDIA's training of Cosmos3 with actions
SHORT_SHARE = 0.05  # fraction of videos that may be shorter than a clip: default of data.max_bad_fraction
VALIDATION_SAMPLES, MAX_HOLDOUT, MIN_HOLDOUT = 32, 0.2, 0.05
STUDENT_STEPS = 4  # of a distilled model
USUAL_SHIFT = 5.0  # for a scheduler without a timestep shift, as in recipes/cp_dmd2.yaml
LEARNING_RATES: dict[Task, tuple[float, float]] = {
    "sft": (1e-4, 1e-5),
    "actions": (1e-4, 1e-4),
    "dpo": (1e-5, 1e-6),
    "rl": (1e-4, 1e-5),
    "distill": (3e-5, 3e-5),
    "reasoner": (1e-4, 1e-5),
}
"""{task: (learning rate for LoRA, learning rate for all weights)}."""


def create_sections(request: RecipeRequest, model: PipelineSummary | LanguageModelSummary) -> Sections:
    if isinstance(model, LanguageModelSummary):
        return create_language_sections(request, model)
    require_fitting_model(request, model)
    creators = {"rl": create_rl_sections, "distill": create_distillation_sections}
    return creators.get(request.task, create_supervised_sections)(request, model)


def require_fitting_model(request: RecipeRequest, model: PipelineSummary) -> None:
    data, title = request.data, model.title
    if data.content == "prompts" and "source" in model.inputs:
        raise UserError(
            f"{data.path} has only prompts, but {title} edits images: name a folder of captioned images with --data "
            "(docs/data_layouts.md)"
        )
    if data.content == "prompts" and (model.needs_image or model.inputs):
        needed = "start with an image" if model.needs_image else f"need {' and '.join(model.inputs)}"
        raise UserError(
            f"{data.path} has only prompts, but {title} generates videos that {needed}: name a folder of captioned "
            "images or videos with --data"
        )
    follows_actions = data.are_videos and "actions" in data.metadata_keys and "actions" in model.optional_inputs
    needs_media = model.needs_image or model.inputs or follows_actions or edits_images(data, model)
    if request.task == "rl" and data.content != "prompts" and not needs_media:
        raise UserError(
            f"{data.path} has images or videos, but RL of {title} needs only prompts: name a .txt file with one prompt "
            "per line, or a .jsonl file, with --data"
        )
    if data.are_videos and not model.is_video:
        raise UserError(f"{data.path} contains videos, but {title} generates images: choose a video model")
    if model.needs_image and not data.are_videos and request.task != "rl":
        raise UserError(
            f"{data.path} contains images, but {title} generates videos that start with an image: use videos"
        )
    if not data.has_target and not edits_images(data, model):
        raise UserError(f"{data.path} has images to edit, but {title} does not edit images: choose an editing model")
    if request.task == "actions" and "actions" not in (*model.inputs, *model.optional_inputs):
        raise UserError(f"{title} does not accept actions: choose a Cosmos3 model, or --task sft")
    if missing := [name for name in model.inputs if name not in data.metadata_keys]:
        raise UserError(f"{data.path}: {title} needs {' and '.join(missing)} for each sample (docs/inputs.md)")


def create_supervised_sections(request: RecipeRequest, model: PipelineSummary) -> Sections:
    task, data = request.task, request.data
    height, width, why = training_size(model, data.sizes)
    inputs = choose_inputs(request, model)
    rewards = [] if request.held_out_reward is None else [request.held_out_reward]
    starts_with_frame = model.needs_image or task == "actions"
    lines = [
        RecipeLine("kind", "pairs" if task == "dpo" else data.kind),
        RecipeLine("path", data.recipe_path),
        *view_lines(data),
        *prompt_lines(request),
        *([] if task == "dpo" else [RecipeLine("caption_dropout", 0.1, "for classifier-free guidance")]),
        *size_lines(data.sizes, height, width),
        *input_lines(inputs),
        *edit_lines(request, inputs, rewards),
        *robot_lines(data, inputs),
    ]
    guidance = RecipeLine("guidance_scale", model.guidance_scale, "for validation samples; default of the pipeline")
    if task == "actions":
        guidance = RecipeLine("guidance_scale", 1.0, "no guidance, as in NVIDIA's training with actions")
    settings = [RecipeLine("name", "sft")]
    if task == "dpo":
        settings = [RecipeLine("name", "dpo"), RecipeLine("beta", 2000, "strength of the preference")]
    unit = "pair" if task == "dpo" else "sample"
    return {
        **common_sections(
            request, model, steps=1000, unit=f"one {unit} per GPU and step; the data has {data.num_samples}"
        ),
        "data": lines,
        "sampling": [
            RecipeLine("height", height, why),
            RecipeLine("width", width),
            *frame_lines(request, model),
            *few_step_lines(model, "eval_steps"),
            guidance,
        ],
        "algorithm": [*settings, *(conditioning_lines() if starts_with_frame else [])],
        "validation": [
            RecipeLine("every", 100, "steps between validations"),
            holdout_line(data.num_samples),
            *create_held_out_lines(request),
        ],
        "checkpoint": [RecipeLine("every", 200)],
    }


def few_step_lines(model: PipelineSummary, *keys: str) -> list[RecipeLine]:
    """Return lines that set each key in `keys` to the number of steps for which the model was distilled.

    Returns [] if the model is not a few-step model.
    """
    steps = model.num_steps
    return (
        [] if steps is None else [RecipeLine(key, steps, f"the model is distilled for {steps} steps") for key in keys]
    )


def create_rl_sections(request: RecipeRequest, model: PipelineSummary) -> Sections:
    assert request.reward is not None
    data = request.data
    inputs, is_prompt_file = choose_inputs(request, model), data.content == "prompts"
    rewards = reward_line(request, inputs)
    if is_prompt_file:
        lines = prompt_file_lines(request)
    else:
        lines = [RecipeLine("kind", data.kind), RecipeLine("path", data.recipe_path), *view_lines(data)]
        lines += [*input_lines(inputs), *robot_lines(data, inputs)]
        lines += edit_lines(request, inputs, [*(one["name"] for one in rewards.value), request.held_out_reward])
        lines += prompt_lines(request)
    moves = not {"actions", "c2w"}.isdisjoint(inputs) and data.num_samples > 1
    height, width, why = model.height, model.width, "default of the pipeline"
    if data.sizes:
        height, width, why = training_size(model, data.sizes)
        lines += size_lines(data.sizes, height, width)
    return {
        **common_sections(request, model, steps=200, unit="one rollout per step"),
        "data": lines,
        "sampling": [
            RecipeLine("height", height, why),
            RecipeLine("width", width),
            *frame_lines(request, model),
            *(
                few_step_lines(model, "steps", "eval_steps")
                or [RecipeLine("steps", 10, "denoising steps of a rollout; validation uses eval_steps")]
            ),
        ],
        "algorithm": [
            RecipeLine("name", "diffusion_nft", "comparison of algorithms: docs/choosing.md"),
            *([] if is_prompt_file or not {"source", "control"}.isdisjoint(inputs) else conditioning_lines()),
        ],
        "rollout": [
            RecipeLine("prompts_per_step", min(8, data.num_samples)),
            RecipeLine("group_size", 8, "samples per prompt, compared with each other"),
            *([RecipeLine("trajectories", "shuffle", "movements of other clips (docs/inputs.md)")] if moves else []),
        ],
        "reward": [rewards],
        "validation": [
            RecipeLine("every", 20),
            *(create_held_out_lines(request) or [prompt_count_line(data.num_samples)]),
        ],
        "checkpoint": [RecipeLine("every", 40)],
    }


def create_distillation_sections(request: RecipeRequest, model: PipelineSummary) -> Sections:
    data = request.data
    if model.num_steps is not None:
        raise UserError(f"{model.title} is distilled to {model.num_steps} steps already: choose its base model")
    if model.has_experts:
        raise UserError(f"{model.title} has two experts, which distillation does not support: choose another model")
    shift, levels = [], []
    if not model.has_fixed_shift:
        shift = [RecipeLine("grid_shift", USUAL_SHIFT, "the scheduler has no fixed shift")]
        levels = [RecipeLine("levels", {"shift": USUAL_SHIFT}, "the same as grid_shift")]
    return {
        **common_sections(request, model, steps=1000, unit="one student update per step"),
        "ema": [RecipeLine("decay", 0.95)],
        "data": prompt_file_lines(request),
        "sampling": [
            RecipeLine("height", model.height, "default of the pipeline"),
            RecipeLine("width", model.width),
            *frame_lines(request, model),
            RecipeLine("steps", STUDENT_STEPS, "denoising steps of the student; the same in eval_steps"),
            RecipeLine("grid", "even", "levels 1, 3/4, 1/2, 1/4 before the shift"),
            *shift,
            RecipeLine("eval_steps", STUDENT_STEPS),
            RecipeLine("eval_grid", "even"),
        ],
        "algorithm": [
            RecipeLine("name", "dmd2", "docs/few_steps.md"),
            RecipeLine(
                "teacher", {"guidance_scale": model.guidance_scale}, "the base model with its pipeline's guidance"
            ),
            RecipeLine("fake", {"updates": 5}, "the fake score must keep up with the student"),
            *levels,
        ],
        "rollout": [
            RecipeLine("prompts_per_step", min(8, data.num_samples)),
            RecipeLine("group_size", 2, "samples per prompt; rollout/spread compares them"),
        ],
        "validation": [
            RecipeLine("every", 100),
            *(create_held_out_lines(request) or [prompt_count_line(data.num_samples)]),
        ],
        "checkpoint": [RecipeLine("every", 200)],
    }


def create_language_sections(request: RecipeRequest, model: LanguageModelSummary) -> Sections:
    data = request.data
    common = common_sections(
        request, model, steps=1000, unit=f"one packed sequence per GPU and step; {data.num_samples} conversations"
    )
    common["model"].append(RecipeLine("gradient_checkpointing", True, "less memory, more time"))
    media = [] if data.media_path is None else [RecipeLine("media_path", data.media_path)]
    return {
        **common,
        "data": [
            RecipeLine("kind", "llava"),
            RecipeLine("path", data.recipe_path),
            *media,
            RecipeLine("max_tokens", 4096, "longer conversations are skipped"),
        ],
        "algorithm": [RecipeLine("name", "vlm_sft"), RecipeLine("train_on", "answers", "tokens in the loss")],
        "validation": [RecipeLine("every", 100, "steps between validations"), holdout_line(data.num_samples)],
        "checkpoint": [RecipeLine("every", 200)],
    }


def common_sections(
    request: RecipeRequest, model: PipelineSummary | LanguageModelSummary, *, steps: int, unit: str
) -> Sections:
    lora = {"lora": [RecipeLine("rank", 32), RecipeLine("alpha", 64)]}
    lora_rate, full_rate = LEARNING_RATES[request.task]
    all_weights = request.trains_all_weights
    model_lines = [RecipeLine("path", model.path)]
    if isinstance(model, PipelineSummary) and model.revision is not None:
        model_lines.append(RecipeLine("revision", model.revision, "branch with the diffusers pipeline"))
    if isinstance(model, PipelineSummary) and model.needs_no_guardrail:
        model_lines.append(RecipeLine("guardrail", "off", "a random model needs none"))
    return {
        "run": [RecipeLine("output_dir", choose_output_folder(request.out)), RecipeLine("steps", steps, unit)],
        "model": model_lines,
        **({} if all_weights else lora),
        "optimizer": [
            RecipeLine("lr", full_rate if all_weights else lora_rate, "for all weights" if all_weights else "for LoRA")
        ],
    }


def choose_output_folder(out: Path) -> str:
    names = [out.stem, *(f"{out.stem}_{number}" for number in range(2, 1000))]
    return next(f"outputs/{name}" for name in names if not Path("outputs", name).exists())


def prompt_lines(request: RecipeRequest) -> list[RecipeLine]:
    return [RecipeLine("prompt", request.prompt, "for files without a caption")] if request.prompt else []


def prompt_file_lines(request: RecipeRequest) -> list[RecipeLine]:
    data = request.data
    return [
        RecipeLine("kind", "prompts"),
        RecipeLine("path", data.recipe_path),
        RecipeLine("name", prompt_set_name(data.path, request.reward)),
        RecipeLine("split", data.path.stem, f"prompts of {data.path.name}"),
    ]


def prompt_set_name(file: Path, reward_name: str | None) -> str:
    """Return data.name for a prompt file: the file name without its suffix, such as .txt.

    data.name selects the format of the file. If the file has the name of a published prompt set, `_prompts` is appended
    so that the format of this set is not selected, unless the reward requires metadata.
    """
    needs_metadata = reward_name is not None and registry.get_reward_class(reward_name).required_metadata
    return f"{file.stem}_prompts" if file.stem in PROMPT_FORMATS and not needs_metadata else file.stem


def conditioning_lines() -> list[RecipeLine]:
    return [
        RecipeLine("min_num_conditional_frames", 1, "each video starts with the first frame of a sample"),
        RecipeLine("max_num_conditional_frames", 1),
    ]


def frame_lines(request: RecipeRequest, model: PipelineSummary) -> list[RecipeLine]:
    """Return the line for sampling.num_frames: the pipeline's default, or less if the videos are too short.

    Raises UserError if most videos have fewer than five frames.
    """
    data = request.data
    if not model.is_video:
        return []
    if data.sizes and not data.are_videos and request.task != "rl":
        return [RecipeLine("num_frames", 1)]
    has_actions = "actions" in choose_inputs(request, model)
    wanted, why = model.num_frames, "default of the pipeline"
    if has_actions and wanted > ACTION_FRAMES:
        wanted, why = ACTION_FRAMES, "16 actions"
    if data.are_videos:
        shortest = sorted(data.frame_counts)[int(SHORT_SHARE * len(data.frame_counts))]
        if shortest < min(wanted, 5):
            raise UserError(f"{data.path}: most videos have only {shortest} frames: use videos of at least 5 frames")
        if shortest < wanted:
            unit = 8 if wanted % 8 == 1 and shortest > 8 else 4  # frames of a latent frame
            wanted, why = (shortest - 1) // unit * unit + 1, f"many videos are too short for {wanted} frames"
    return [RecipeLine("num_frames", wanted, why)]


def holdout_line(num_samples: int) -> RecipeLine:
    share = round(min(MAX_HOLDOUT, max(MIN_HOLDOUT, VALIDATION_SAMPLES / num_samples)), 2)
    count = min(max(1, round(share * num_samples)), num_samples - 1)  # a single sample is trained on
    comment = f"about {count} of {num_samples}" + (
        ", too few for a precise loss" if count < VALIDATION_SAMPLES / 2 else ""
    )
    return RecipeLine("holdout", share, comment)


def prompt_count_line(num_samples: int) -> RecipeLine:
    from wfm_ds.training.reward_alarm import RECOMMENDED_PROMPTS

    return RecipeLine("num_prompts", min(RECOMMENDED_PROMPTS, num_samples))


def create_held_out_lines(request: RecipeRequest) -> list[RecipeLine]:
    if request.held_out_reward is None:
        return []
    comment = "never trained on (docs/rewards.md)"
    if request.task == "rl":
        comment = f"alarm if it falls while {request.reward} rises (docs/rewards.md)"
    reward: str | dict[str, Any] = request.held_out_reward
    if reward == PRESERVATION and MASK not in request.data.metadata_keys:
        reward = {"name": reward, "options": {"whole": True}}
    return [prompt_count_line(request.data.num_samples), RecipeLine("held_out_rewards", [reward], comment)]


def training_size(model: PipelineSummary, sizes: Sequence[tuple[int, int]]) -> tuple[int, int, str]:
    scale = statistics.median(min(h / model.height, w / model.width) for h, w in sizes)
    if scale * MAX_UPSCALE >= 1:
        return model.height, model.width, "default of the pipeline"
    height, width = (
        max(SIZE_MULTIPLE, int(side * scale) // SIZE_MULTIPLE * SIZE_MULTIPLE) for side in (model.height, model.width)
    )
    return height, width, f"most files are too small for the pipeline's {model.width} x {model.height}"


def size_lines(sizes: Sequence[tuple[int, int]], height: int, width: int) -> list[RecipeLine]:
    """Return a line for data.buckets if the aspect ratios of many files differ much from height x width.

    Also returns a line for data.max_upscale if the files are very small.
    """
    lines, far = [], [size for size in sizes if has_other_shape(size, (height, width))]
    if len(far) > BUCKET_SHARE * len(sizes):
        share = round(100 * len(far) / len(sizes))
        comment = f"{share} % of the files differ much in aspect ratio from {width} x {height}"
        lines.append(RecipeLine("buckets", "auto", comment))
    upscale = statistics.median(max(height / h, width / w) for h, w in sizes)
    if upscale > MAX_UPSCALE:
        lines.append(RecipeLine("max_upscale", math.ceil(2 * upscale), "the files are very small"))
    return lines


def has_other_shape(size: tuple[int, int], target: tuple[int, int]) -> bool:
    ratio, target_ratio = size[0] / size[1], target[0] / target[1]
    return max(ratio / target_ratio, target_ratio / ratio) > MAX_ASPECT_CHANGE


def format_recipe(sections: Sections, out: Path) -> str:
    command = f"wfm train {shlex.quote(str(out))} --gpus 1"
    rows = [schema_modeline(), f"# Written by wfm init. All keys: docs/recipes.md.\n#   {command}"]
    for name, lines in sections.items():
        rows.append(f"{name}:")
        for line in lines:
            value = yaml.safe_dump(line.value, allow_unicode=True, default_flow_style=True, width=10**6)
            text = value.split("\n...")[0].strip()
            rows.append(f"  {line.key}: {text}" + (f"  # {line.comment}" if line.comment else ""))
    return "\n".join(rows) + "\n"
