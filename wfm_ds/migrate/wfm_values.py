"""Converters for values in configurations for `--wfm-mode` (see diffusers_values.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from wfm_ds.migrate.config import DDRL, CosmosConfig, NoCounterpart
from wfm_ds.migrate.diffusers_values import zero_config_name

VIDEO_DATA = "dataloader_train.video_dataloader"
# Landscape sizes (height, width) by name.
SIZES = {
    "480": (432, 768),
    "480p": (480, 832),
    "512": (384, 640),
    "720": (704, 1280),
    "720p": (720, 1280),
    "1024": (768, 1280),
    "1080": (1056, 1920),
}


def job_output_folder(_: Any, source: CosmosConfig) -> str:
    return "/".join(["outputs", *(str(source[f"job.{part}"]) for part in ("project", "group", "name"))])


def run_steps(value: int, source: CosmosConfig) -> int:
    return value if source.steps is None else source.steps


def random_weights(value: str, source: CosmosConfig) -> str:
    if value:
        raise NoCounterpart("weights are loaded from the folder")
    source.add_note("checkpoint.load_path is not set: the denoiser starts with random weights, as in Cosmos-RL")
    return "random"


# ---- ranks and partitioning


def num_model_copies(source: CosmosConfig) -> int:
    """Return the number of model copies. Each copy generates `batch_size` samples at a time."""
    data_parallel = max(
        source.settings.get("model_parallel.data_parallel_size", -1), 1
    )  # -1 in Cosmos-RL: derived from the other sizes
    return int(data_parallel * source["model.fsdp_shard_size"] * source["model.dp_replicate_size"])


def groups_per_step(_: Any, source: CosmosConfig) -> int:
    """Return the number of groups per optimizer step.

    In Cosmos-RL, `num_rollout` model copies generate one group together, and gradients are accumulated over
    `grad_accum_iter` rounds. Raises NoCounterpart if the number of copies is not a multiple of num_rollout.
    """
    copies = num_model_copies(source)
    if copies % source["model.rl.num_rollout"]:
        raise NoCounterpart(f"{copies} model copies are not a multiple of model.rl.num_rollout")
    batch = max(source.settings.get(f"{VIDEO_DATA}.{key}", 1) for key in ("batch_size", "dataloader.batch_size"))
    return int(copies // source["model.rl.num_rollout"] * batch * source["trainer.grad_accum_iter"])


def shard_zero_config(_: Any, source: CosmosConfig) -> str:
    ranks = source["model_parallel.context_parallel_size"] * num_model_copies(source)
    source.add_note(
        f"the configuration is for {ranks} GPUs; wfm_ds computes the same step on every number of GPUs that it accepts"
    )
    return zero_config_name(source["model.fsdp_shard_size"], source["model.dp_replicate_size"], source)


def context_parallel(value: int, source: CosmosConfig) -> int:
    if value > 1 and source.mode == DDRL:
        source.add_note(
            f"algorithm.std_unbiased: Cosmos-RL counts each reward {value} times in a group's std, once per rank of "
            "model_parallel.context_parallel_size; wfm_ds counts each reward one time"
        )
    return value


def gradient_checkpointing(value: str, source: CosmosConfig) -> bool:
    if value == "mm_only":
        source.add_note(
            "model.gradient_checkpointing: wfm_ds recomputes whole blocks, Cosmos-RL everything except matmuls"
        )
    return value != "none"


# ---- averages, sizes, batches


def power_ema(_: Any, source: CosmosConfig) -> tuple[float, int]:
    """Return (ema.decay, ema.every) that approximate Cosmos-RL's power-law average (arXiv 2312.02696)."""
    if not source["model.ema.enabled"]:
        raise NoCounterpart("omit the section `ema`")
    width = float(source["model.ema.rate"]) ** -2
    exponent = float(np.roots([1, 7, 16 - width, 12 - width]).real.max()) + 1
    last = run_steps(source["trainer.max_iter"], source) - 1 + source["model.ema.iteration_shift"]
    decay = round((1 - 1 / (last + 1)) ** exponent, 6) if last > 0 else 0.0
    source.add_note(
        f"ema: model.ema.enabled is true by default in Cosmos-RL. Its decay at step t is (1 - 1/(t + 1)) ** "
        f"{exponent:.2f}; in wfm_ds, it is (1 + j)/(10 + j) at update j, at most ema.decay, which is Cosmos-RL's value "
        "at the last step"
    )
    return decay, 1


def landscape_size(value: list[int], source: CosmosConfig) -> tuple[int, int]:
    """Return (height, width) of a size that the published configurations list as [width, height]."""
    if value[0] > value[1]:
        source.add_note(
            f"sampling.height and width: video_size {value} is read as width {value[0]}, height {value[1]}; Cosmos-RL "
            "uses the first number as height and distorts the videos"
        )
    return value[1], value[0]


def resolution_size(value: str, _: CosmosConfig) -> tuple[int, int]:
    if str(value) not in SIZES:
        raise NoCounterpart(f"{value!r} is not one of {', '.join(SIZES)}")
    return SIZES[str(value)]


def first_value(value: list[int], _: CosmosConfig) -> int:
    return value[0]


def callback_settings(value: list[dict[str, Any]], _: CosmosConfig) -> tuple[Any, Any]:
    """Return (maximum gradient norm, number of steps between sample images) from the callbacks of Cosmos-RL."""
    arguments = {str(entry.get("name")): entry.get("args", {}) for entry in value}
    names = [name for name in ("every_n_sample_ema", "every_n_sample_reg") if name in arguments]
    every = [arguments[name].get("every_n", 0) for name in names]
    return arguments.get("grad_clip", {}).get("clip_norm", 1.0), every[0] if every else 0


def validate_every(_: Any, source: CosmosConfig) -> int:
    return int(source["trainer.validation_iter"]) if source["trainer.run_validation"] else 0


# ---- the algorithm


def edm_guidance(value: float, source: CosmosConfig) -> float:
    source.add_note(f"sampling.guidance_scale is w = 1 + g: {value:g} in Cosmos-RL is {1 + value:g} here")
    return 1 + value


def require_data_loss(value: bool, source: CosmosConfig) -> bool:
    if not source["model.rl.data_beta"]:
        raise NoCounterpart("only for the diffusion loss, which is off with model.rl.data_beta 0")
    return value


def caption_dropout(value: list[dict[str, Any]], _: CosmosConfig) -> float:
    rates = [entry["dropout_rate"] for entry in value if entry.get("type") == "text_attr" and "dropout_rate" in entry]
    return float(rates[0]) if rates else 0.0


def finite_bound(value: float, _: CosmosConfig) -> float:
    if float(value) == float("inf"):
        raise NoCounterpart("no bound, which is the default")
    return float(value)
