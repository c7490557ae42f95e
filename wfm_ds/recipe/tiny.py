"""Tiny versions of recipes: with `--tiny`, any recipe runs in about a minute on a laptop CPU.

Models, sizes, data and rewards are replaced by built-in ones. Algorithm, LoRA or full training, ZeRO stage, solver,
guidance, EMA, schedules and conditioning stay the same.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wfm_ds
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import HeldOutReward
from wfm_ds.recipe.shared_defaults import user_cache_folder
from wfm_ds.recipe.shipped_recipes import recipes_folder
from wfm_ds.types import CONTROL, MEDIA_INPUTS

TINY_PREFIX = "tiny:"
NUM_ACTION_FRAMES, ACTION_SIZE = 9, (8, 16)  # of the brightness clips


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """A tiny pipeline `tiny:NAME`."""

    name: str
    released: tuple[str, ...]
    """Lower-case parts of the names of the released models that this pipeline replaces."""
    pipelines: tuple[str, ...] = ()
    """Pipeline classes of diffusers. Empty for language models, demos and Wan: Wan's classes have several families."""
    height: int = 32
    width: int = 32
    is_video: bool = False
    action_size: tuple[int, int] | None = None
    """Height and width of samples with actions. None: the model has no action inputs."""
    has_guardrail: bool = False


# The first match wins.
TINY_FAMILIES = (
    TinyFamily("sd3", ("stable-diffusion-3",), ("StableDiffusion3Pipeline",)),
    TinyFamily("flux2", ("flux.2-klein",), ("Flux2KleinPipeline",)),
    TinyFamily("flux2_dev", ("flux.2-dev",), ("Flux2Pipeline",)),
    TinyFamily("flux_kontext", ("flux.1-kontext",), ("FluxKontextPipeline",)),
    TinyFamily(
        "qwen_image_edit_plus", ("qwen-image-edit-2509", "qwen-image-edit-2511"), ("QwenImageEditPlusPipeline",)
    ),
    TinyFamily("qwen_image_edit", ("qwen-image-edit",), ("QwenImageEditPipeline",)),
    TinyFamily("qwen_image", ("qwen-image",), ("QwenImagePipeline",)),
    TinyFamily("z_image", ("z-image",), ("ZImagePipeline",)),
    TinyFamily("ltx2", ("ltx-2",), ("LTX2Pipeline",), is_video=True),
    TinyFamily("hunyuan_video15", ("hunyuanvideo-1.5",), ("HunyuanVideo15Pipeline",), is_video=True),
    TinyFamily("sana_video", ("sana-video",), ("SanaVideoPipeline", "SanaImageToVideoPipeline"), is_video=True),
    TinyFamily("sana_wm", ("sana-wm",), ("SanaWMPipeline",), is_video=True),
    TinyFamily("sana", ("sana1.5", "sana_1600m", "sana_600m"), ("SanaPipeline",)),
    TinyFamily(
        "cosmos25_actions",
        ("action-cond",),
        ("CosmosActionPipeline",),
        is_video=True,
        action_size=(16, 32),
        has_guardrail=True,
    ),
    TinyFamily(
        "cosmos25", ("cosmos-predict2.5",), ("Cosmos2_5_PredictBasePipeline",), is_video=True, has_guardrail=True
    ),
    TinyFamily(
        "cosmos3", ("cosmos3",), ("Cosmos3OmniPipeline",), is_video=True, action_size=ACTION_SIZE, has_guardrail=True
    ),
    TinyFamily("wan21_i2v", ("wan2.1-i2v", "wan2.1-flf2v"), is_video=True),
    TinyFamily("wan_vace", ("wan2.1-vace", "wan2.2-vace"), ("WanVACEPipeline",), is_video=True),
    TinyFamily("wan21", ("wan2.1",), is_video=True),
    TinyFamily("wan22_i2v", ("wan2.2-i2v",), is_video=True),
    TinyFamily("wan22_ti2v", ("wan2.2-ti2v",), is_video=True),
    TinyFamily("wan22", ("wan2.2",), is_video=True),
    TinyFamily("qwen25vl", ("qwen2.5-vl", "cosmos-reason1")),
    TinyFamily("qwen3vlmoe", ("qwen3-vl-30b", "qwen3-vl-235b")),
    TinyFamily("qwen3vl", ("qwen3-vl", "cosmos-reason2")),
    # The models of the quickstarts, by the folders of their runs.
    TinyFamily("moving", ("quickstart-video",), is_video=True),
    TinyFamily(
        "world",
        ("quickstart-world", "quickstart-long"),
        height=8,
        width=16,
        is_video=True,
        action_size=ACTION_SIZE,
        has_guardrail=True,
    ),
    TinyFamily("edits", ("quickstart-edits",), height=64, width=128),
    TinyFamily("digits", ("quickstart",), height=8, width=8),
)
_BY_NAME = {family.name: family for family in TINY_FAMILIES}
LANGUAGE_MODELS = {"qwen2_5_vl": "qwen25vl", "qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe"}

NUM_STEPS = 2
MAX_DENOISING_STEPS = 6
MAX_EVAL_STEPS = 4
GROUP_SIZE = 4
LORA_RANK = 4
MAX_SEQUENCE_PARALLEL = 2  # the tiny networks have two attention heads
CLIP_FPS = 8.0
MAX_HISTORY_CLIPS, MAX_VALIDATION_CLIPS = 1, 2  # with actions; the other built-in videos are too short
CAMERA_INPUTS, ACTION_INPUTS = frozenset({"c2w", "intrinsics"}), frozenset({"actions", "domain"})
# Rewards that need no weights: for any data, for prompts and edits (the built-in ones name colours), and for actions.
WEIGHT_FREE_REWARDS = frozenset(
    {"mock", "jpeg_compressibility", "jpeg_incompressibility", "motion", "consistency", "continuation"}
)
PROMPT_REWARDS = frozenset({"color"})
ACTION_REWARDS = frozenset({"brightness", "seen_action"})
BASE_TEACHER = {"weights": "base"}

Values = dict[str, Any]


def find_tiny_family(model_path: str) -> TinyFamily:
    """Return the tiny pipeline of the same family as a model.

    model_path: name of a released model, local folder, or `tiny:FAMILY`. Raises RecipeError if the family is unknown.
    """
    family = _BY_NAME.get(_read_family(Path(model_path).expanduser())) or match_released_name(model_path)
    if family is None:
        raise RecipeError(
            f"model.path {model_path}: --tiny cannot tell the model family from this path: add model.path=tiny:FAMILY "
            f"({', '.join(_BY_NAME)})"
        )
    return family


def match_released_name(model_path: str) -> TinyFamily | None:
    """Return the tiny pipeline for the path of a released model or run, or for `tiny:NAME`, otherwise None."""
    if model_path.startswith(TINY_PREFIX):
        return _BY_NAME.get(model_path.removeprefix(TINY_PREFIX))
    last_part = model_path.rstrip("/").rpartition("/")[2].lower()
    is_run = "safetensors" in model_path.split("/") or model_path.startswith("outputs/")
    text = model_path.lower() if is_run else last_part
    return next((family for family in TINY_FAMILIES if any(name in text for name in family.released)), None)


def _read_family(folder: Path) -> str:
    index = _read_object(folder / "model_index.json")
    name = str(index.get("_class_name"))
    version = "wan22" if any(index.get("transformer_2") or ()) else "wan21"
    if name == "WanPipeline":
        return "wan22_ti2v" if index.get("expand_timesteps") else version
    if name == "WanImageToVideoPipeline":
        return f"{version}_i2v"
    if family := next((family for family in TINY_FAMILIES if name in family.pipelines), None):
        return family.name
    return LANGUAGE_MODELS.get(str(_read_object(folder / "config.json").get("model_type")), "")


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def tiny_data_folder() -> Path:
    return user_cache_folder() / "demos" / wfm_ds.__version__


def shrink_recipe(recipe: Recipe, name: str, family: TinyFamily | None, *, world_size: int = 1) -> Values:
    """Return the sections of the tiny version of a recipe.

    name: folder in outputs/tiny for the run. family: tiny model to use. None: the caller must set `model.path`. Raises
    RecipeError if the recipe needs data that no built-in data set has.
    """
    values = recipe.model_dump(mode="json", exclude=set(recipe.unused_sections))
    values["run"] |= {"output_dir": f"outputs/tiny/{name}", "steps": NUM_STEPS}
    if recipe.run.resume != "never":
        values["run"]["resume"] = "auto"
    values["model"] |= _model_keys(family)
    values["data"] = _data_section(recipe)
    values["engine"] |= _engine_keys(recipe, world_size)
    values["optimizer"]["name"] = "adamw"
    values["validation"] |= _validation_keys(recipe)
    values["checkpoint"] |= {"every": 0, "export_every": 0, "storage": None}
    values["export"]["push_to_hub"] = None
    values["logging"] |= {
        **{"trackers": ["tensorboard"], "wandb": {}, "mlflow": {}, "trackio": {}, "swanlab": {}, "run_name": None},
        **{"sample_every": 0, "num_samples": min(recipe.logging.num_samples, 4)},
    }
    if recipe.ema is not None:
        values["ema"]["every"] = 1  # two steps must move the average, which is exported
    if recipe.lora is not None:
        rank = min(recipe.lora.rank, LORA_RANK)
        values["lora"] |= {"rank": rank, "alpha": recipe.lora.alpha * rank / recipe.lora.rank, "init_from": None}
    if not recipe.algorithm.trains_language:
        values["sampling"] |= _sampling_keys(recipe, family)
    if recipe.is_rl:
        values["algorithm"] |= _rl_algorithm_keys(recipe, values["sampling"]["steps"])
        values["rollout"] |= _rollout_keys(recipe)
    if recipe.uses_rewards:
        values["reward"] |= {"functions": _reward_functions(recipe), "spawn": True, "endpoint": None, "keys": None}
    return {section: keys for section, keys in values.items() if keys is not None}


def describe_tiny_recipe(recipe: Recipe) -> str:
    parts = [recipe.model.path]
    if not recipe.algorithm.trains_language:
        size = recipe.sampling
        parts.append(f"{size.height} x {size.width}" + (f", {size.num_frames} frames" if size.num_frames > 1 else ""))
    path = str(recipe.data.path)
    roots = [root for root in (tiny_data_folder(), recipes_folder()) if Path(path).is_relative_to(root)]
    parts.append(f"data {f'{Path(path).relative_to(roots[0])} (built in)' if roots else path}")
    if recipe.uses_rewards:
        parts.append("reward " + " + ".join(function.name for function in recipe.rl.reward.functions))
    parts.append(f"{recipe.run.steps} step{'s' * (recipe.run.steps != 1)}")
    return f"--tiny: {'; '.join(parts)}; output in {recipe.run.output_dir}"


def _model_keys(family: TinyFamily | None) -> Values:
    keys: Values = {"dtype": "float32", "vae_dtype": "float32", "base_precision": None, "fp8_training": None}
    keys |= {"attention": "auto", "max_sequence_length": None}
    if family is not None:
        guardrail = "off" if family.has_guardrail else "stock"
        keys |= {"path": f"{TINY_PREFIX}{family.name}", "revision": None, "family": None, "guardrail": guardrail}
    return keys


def _data_section(recipe: Recipe) -> Values:
    data, folder = recipe.data, tiny_data_folder()
    kept = data.model_dump(include={"shuffle", "caption_dropout", "clip", "crop", "choose", "choose_floor", "inputs"})
    kept |= data.model_dump(include={"choose_memory", "system_prompt", "too_long", "pack", "reward_inputs", "target"})
    if data.kind == "prompts":
        return kept | {"kind": "prompts", "path": str(recipes_folder() / "prompts" / "colors")}
    if data.kind == "pairs":
        pairs = folder / ("controls" if data.video_inputs else "edits" if data.inputs else "digits") / "pairs.jsonl"
        return kept | {"kind": "pairs", "path": str(pairs), "max_upscale": 8.0}
    if data.kind == "llava":
        squares = folder / "squares"
        paths = {"path": str(squares / "annotations.json"), "media_path": str(squares)}
        return kept | {"kind": "llava", "max_tokens": min(data.max_tokens, 512), **paths}
    if data.image_inputs and set(data.inputs) <= MEDIA_INPUTS:
        return kept | {"kind": "folder", "path": str(folder / "edits"), "max_upscale": 8.0}
    if data.video_inputs and set(data.inputs) <= MEDIA_INPUTS:
        controls, target = folder / "controls", "target" if data.target else CONTROL
        folders = {name: str(controls / name) for name in data.video_inputs if name != target}
        kept |= {"path": str(controls / target), "input_folders": folders}
        return kept | {"kind": "paired", "fps": CLIP_FPS, "max_upscale": 8.0}
    if set(data.inputs) <= CAMERA_INPUTS:
        source, is_video = "room/clips", recipe.sampling.num_frames > 1
    elif set(data.inputs) <= ACTION_INPUTS:
        needs_long_videos = recipe.validation.clips > 1 or (recipe.is_rl and recipe.rl.rollout.history.clips > 0)
        source, is_video = "walks" if needs_long_videos else "brightness", True
    else:
        known = ", ".join(sorted(CAMERA_INPUTS | ACTION_INPUTS | MEDIA_INPUTS))
        raise RecipeError(f"data.inputs {', '.join(data.inputs)}: --tiny has data with {known} only: use your own data")
    source, fps = (source, CLIP_FPS) if is_video else ("digits/images", None)
    return kept | {"kind": "paired", "path": str(folder / source), "fps": fps, "max_upscale": 8.0}


def _engine_keys(recipe: Recipe, world_size: int) -> Values:
    engine = recipe.engine
    stage = next((stage for stage in ("zero1", "zero3") if engine.deepspeed.startswith(stage)), "zero2")
    return {
        "deepspeed": stage,
        "micro_batch_size": 4 if recipe.is_rl else min(engine.micro_batch_size, 2),
        "gradient_accumulation": min(engine.gradient_accumulation, 5),
        "max_forward_batch": 4,  # the same in rollouts and training: log-probabilities round alike
        "sequence_parallel": math.gcd(engine.sequence_parallel, world_size, MAX_SEQUENCE_PARALLEL),
        "compile": False,
    }


def _sampling_keys(recipe: Recipe, family: TinyFamily | None) -> Values:
    sampling, actions = recipe.sampling, "actions" in recipe.data.inputs
    height, width = (32, 32) if family is None else (family.height, family.width)
    keys: Values = {"height": height, "width": width, "num_frames": 1}
    if sampling.num_frames > 1 and (recipe.data.kind != "pairs" or recipe.data.video_inputs):
        most_given = recipe.algorithm.conditioning_frame_range[1]
        keys |= {"num_frames": 1 + 4 * max(1, most_given), "fps": CLIP_FPS}
    if actions:
        height, width = (family and family.action_size) or ACTION_SIZE
        keys |= {"height": height, "width": width, "num_frames": NUM_ACTION_FRAMES}
    steps = min(sampling.steps, MAX_DENOISING_STEPS)
    keys |= {"steps": steps, "eval_steps": min(sampling.eval_steps, MAX_EVAL_STEPS)}
    block_keys = [name for name in ("skip_layers", "stg_blocks") if getattr(sampling.guidance, name)]
    if block_keys:
        keys["guidance"] = sampling.guidance.model_dump() | {key: [0] for key in block_keys}
    if sampling.window is not None:
        keys["window"] = _shrink_window(sampling.window.model_dump(), sampling.steps, steps)
    if sampling.explore is not None:
        explore = {"group_size": 2 * GROUP_SIZE, "steps": min(sampling.explore.steps, steps)}
        keys["explore"] = sampling.explore.model_dump() | explore
    return keys


def _shrink_window(window: Values, num_steps: int, steps: int) -> Values:
    last = steps - 1  # the last step is never in a window
    if window["kind"] == "subset":
        indices = [index for index in window["indices"] if index < last] or [0]
        return window | {"indices": indices, "size": min(window["size"], len(indices))}
    if window["kind"] == "progressive":
        start, end = window["range"] or (0, last)
    else:  # at the same noise levels: the last steps may have too little noise
        start, end = (round(bound * steps / num_steps) for bound in window["range"] or (0, num_steps // 2))
    end = max(1, min(end, last))
    start = min(start, end - 1)
    return window | {"range": [start, end], "size": min(window["size"], end - start)}


def _rl_algorithm_keys(recipe: Recipe, steps: int) -> Values:
    keys: Values = {}
    settings = recipe.rl.algorithm.model_dump()
    if settings.get("best_of_n") is not None:
        keys["best_of_n"] = min(settings["best_of_n"], GROUP_SIZE)
    if settings.get("num_levels") is not None and settings.get("levels") != "stratified":
        keys["num_levels"] = min(settings["num_levels"], max(1, steps - (settings.get("weighting") == "kl")))
    if isinstance(settings.get("train_on"), list):
        keys["train_on"] = [index for index in settings["train_on"] if index < steps - 1] or [0]
    if isinstance(settings.get("fake"), dict):
        fake = settings["fake"]
        limits = {"updates": min(fake["updates"], 2), "warmup_steps": min(fake["warmup_steps"], NUM_STEPS - 1)}
        keys |= {"fake": fake | limits, "teacher": settings["teacher"] | BASE_TEACHER}
    if isinstance(settings.get("teachers"), list):  # the built-in prompts lack the metadata of several teachers
        teacher = settings["teachers"][0] | BASE_TEACHER
        keys["teachers"] = [teacher | {"when": {}, "guidance_scale": max(2.0, teacher["guidance_scale"])}]
    return keys


def _rollout_keys(recipe: Recipe) -> Values:
    rollout = recipe.rl.rollout
    # Any number of updates divides the samples of one rank, or of two or four.
    keys: Values = {"prompts_per_step": max(2, recipe.rl.algorithm.num_sample_parts), "group_size": GROUP_SIZE}
    keys |= {"base_precision": None, "cuda_graph": False, "trajectory_library": None, "keys": None, "bind": "ipc"}
    keys |= {"devices": None, "policy_folder": None, "spawn": 1}
    keys["history"] = {"clips": min(rollout.history.clips, MAX_HISTORY_CLIPS if "actions" in recipe.data.inputs else 0)}
    return keys | ({"trajectories": "shuffle"} if rollout.trajectories == "library" else {})


def _is_weight_free(reward: HeldOutReward, recipe: Recipe) -> bool:
    if reward.name in PROMPT_REWARDS:
        return recipe.data.kind == "prompts" or bool(recipe.data.image_inputs)
    if reward.name == "preservation":
        return bool(recipe.data.image_inputs) and reward.options.get("measure") != "lpips"
    return reward.name in WEIGHT_FREE_REWARDS or (reward.name in ACTION_REWARDS and "actions" in recipe.data.inputs)


def _list_held_out_rewards(recipe: Recipe) -> list[Values]:
    kept = [one for one in recipe.validation.held_out_rewards if _is_weight_free(one, recipe)]
    return [one.model_dump(mode="json", include={"name", "options"}) for one in kept]


def _reward_functions(recipe: Recipe) -> list[Values]:
    functions = recipe.rl.reward.functions
    free = [function for function in functions if _is_weight_free(function, recipe)]
    kept = [function.model_dump(mode="json", include={"name", "weight", "clip", "options"}) for function in free]
    if len(kept) == len(functions):
        return kept
    excluded = {function["name"] for function in (*_list_held_out_rewards(recipe), *kept)}
    stand_ins = _stand_in_rewards(recipe)
    kept += [{"name": name, "weight": weight} for name, weight in stand_ins.items() if name not in excluded]
    return kept or [{"name": "mock"}]


def _stand_in_rewards(recipe: Recipe) -> dict[str, float]:
    if "actions" in recipe.data.inputs:
        return {"brightness": 1.0}
    if recipe.data.image_inputs:
        return {"color": 1.0}
    if recipe.data.inputs:
        return {"consistency": 1.0}
    takes_prompts = recipe.data.kind == "prompts"
    if recipe.sampling.num_frames > 1:
        return {"motion": 1.0, "color" if takes_prompts else "jpeg_compressibility": 0.5}
    return {"color": 1.0, "jpeg_compressibility": 0.5} if takes_prompts else {"jpeg_compressibility": 1.0}


def _validation_keys(recipe: Recipe) -> Values:
    validation = recipe.validation
    most_clips = MAX_VALIDATION_CLIPS if "actions" in recipe.data.inputs else 1
    keys: Values = {"every": 0, "path": None, "episodes": None, "clips": min(validation.clips, most_clips)}
    if not recipe.algorithm.trains_language:
        keys |= {"prompts": None, "num_prompts": 2, "seeds": validation.seeds[:1]}
        keys["held_out_rewards"] = _list_held_out_rewards(recipe)
    if not recipe.is_rl:
        has_holdout = validation.holdout > 0 or validation.path or validation.episodes
        keys |= {"holdout": 0.2 if has_holdout else 0.0, "num_images": 4}
    return keys
