"""Converters for values in configurations of Cosmos-RL's diffusers trainers.

A converter receives the Cosmos-RL value and the configuration, and returns the recipe value or raises NoCounterpart.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from wfm_ds.data.prompts import load_prompts
from wfm_ds.errors import DataError
from wfm_ds.migrate.config import POLICY, SFT, VLM_SFT, CosmosConfig, NoCounterpart, choice_converter
from wfm_ds.migrate.language_values import ANNOTATIONS, count_conversations


def model_folder(value: str, source: CosmosConfig) -> str:
    if not value:
        raise NoCounterpart("empty value")
    if value.startswith((".", "/", "~")) or value.count("/") != 1:
        return value
    folder = f"models/{value.rpartition('/')[2]}"
    revision = source.settings.get("policy.model_revision")
    option = f" --revision {revision}" if revision else ""
    source.add_note(f"model.path is a folder; download it: hf download {value}{option} --local-dir {folder}")
    return folder


def resume_mode(value: Any, _: CosmosConfig) -> str:
    return value if isinstance(value, str) else "auto" if value else "never"


def zero_stage(_: Any, source: CosmosConfig) -> str:
    if source["train.fsdp_offload"]:
        return "zero3_offload"
    if source.has_table("policy.lora"):
        return "zero2"
    return zero_config_name(source["policy.parallelism.dp_shard_size"], num_replicas(source), source)


def zero_config_name(shards: int, replicas: int, source: CosmosConfig) -> str:
    """Return the name of the DeepSpeed config for `replicas` model copies, each split into `shards` shards.

    shards: -1 means one shard per rank.
    """
    if shards == 1:
        return "zero2"
    if replicas == 1:
        return "zero3"
    source.add_note(
        f"engine.deepspeed zero3_hpz: Cosmos-RL has {replicas} sharded replicas of the weights; wfm_ds has one set of "
        "shards, plus a copy within each node for the backward pass; use zero3 on a single node"
    )
    return "zero3_hpz"


def num_replicas(source: CosmosConfig) -> int:
    return int(
        source["policy.parallelism.dp_replicate_size"] * source.settings.get("policy.parallelism.n_init_replicas", 1)
    )


def num_data_ranks(source: CosmosConfig) -> int | None:
    """Return the number of ranks that process different data, or None if it depends on the launcher."""
    shards = source["policy.parallelism.dp_shard_size"]
    return int(shards * num_replicas(source)) if shards > 0 else None


def learning_rate(value: Any, source: CosmosConfig) -> float:
    if isinstance(value, dict) and len(value) > 1:
        source.add_note("optimizer.lr is `global` of train.optm_lr: recipes have one learning rate")
    rate = value.get("global") if isinstance(value, dict) else value
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise NoCounterpart("recipes have one learning rate for all weights")
    return rate


def warmup_steps(value: float, source: CosmosConfig) -> int:
    if isinstance(value, int):
        return value
    num_steps = source.steps or source.settings.get("train.max_num_steps")
    if num_steps is None:
        raise NoCounterpart("a fraction of the number of steps, which is unknown; set --steps")
    return round(value * int(num_steps))


def lr_schedule(value: str, source: CosmosConfig) -> str:
    if source.settings.get("train.optm_decay_ratio", 1) != 1:
        source.add_note(
            "optimizer.schedule decays from the end of the warm-up to the last step and ignores train.optm_decay_ratio"
        )
    return choice_converter({"cosine": "cosine", "linear": "linear", "none": "constant"})(value, source)


def require_ema(value: Any, source: CosmosConfig) -> Any:
    if not source["train.ema_enable"]:
        raise NoCounterpart("train.ema_enable is false")
    return value


def ema_interval(value: int, source: CosmosConfig) -> int:
    return int(require_ema(max(value, 1), source))  # Cosmos-RL's 0 means every step


def ema_decay(value: bool, source: CosmosConfig) -> Any:
    if not value:
        raise NoCounterpart("omit the section `ema`")
    return source["train.ema_decay"]


def gradient_accumulation(value: int, source: CosmosConfig) -> int:
    micro_batch = source["train.train_policy.mini_batch"]
    if value % micro_batch:
        raise NoCounterpart(f"{value} samples are not a multiple of mini_batch {micro_batch}")
    return int(value) // int(micro_batch)


def prompts_per_step(_: Any, source: CosmosConfig) -> int:
    samples = source["train.train_batch_per_replica"] * source["policy.parallelism.n_init_replicas"]
    if samples % source["rollout.n_generation"]:
        raise NoCounterpart(f"{samples} samples are not a multiple of rollout.n_generation")
    return int(samples // source["rollout.n_generation"])


def updates_per_rollout(value: int, source: CosmosConfig) -> int:
    ranks = source["policy.parallelism.dp_shard_size"] * source["policy.parallelism.dp_replicate_size"]
    samples_per_rank = source["train.train_batch_per_replica"] / ranks
    if not value or samples_per_rank % value:
        raise NoCounterpart(f"{value} does not divide the {samples_per_rank:g} samples per rank")
    return int(samples_per_rank // value)


def single_iteration(value: int, _: CosmosConfig) -> int:
    if value != 1:
        raise NoCounterpart(
            "each rollout is used for one pass; increase algorithm.updates_per_rollout for more updates"
        )
    return 1


def num_frames(value: int, source: CosmosConfig) -> int:
    if not source.settings.get("policy.diffusers.is_video"):
        raise NoCounterpart("policy.diffusers.is_video is false")
    return value


def inference_frames(value: int, source: CosmosConfig) -> int:
    if value != source["policy.diffusers.train_frames"]:
        raise NoCounterpart("training, validation and samples use the same length: sampling.num_frames")
    return num_frames(value, source)


def timestep_density(value: str, source: CosmosConfig) -> str:
    if value not in ("logit_normal", "mode"):
        source.add_note(f"policy.diffusers.weighting_scheme {value} samples noise levels uniformly in Cosmos-RL, too")
        return "uniform"
    return value


def guidance_scale(value: float, source: CosmosConfig) -> float:
    """Return the guidance scale w of the recipe. For Cosmos models, w = 1 + g with Cosmos-RL's guidance value g.

    wfm_ds guides with v_u + w * (v_c - v_u), Cosmos in diffusers with v_c + g * (v_c - v_u). v_c is the conditional
    velocity and v_u the unconditional velocity. A Cosmos-RL value of at most 1 disables guidance (w = 1).
    """
    if value <= 1:
        return 1.0
    if "cosmos" in source.model:
        source.add_note(f"sampling.guidance_scale is w = 1 + g: {value:g} in Cosmos-RL is {1 + value:g} here")
        return 1 + value
    return value


def sampling_solver(_: Any, source: CosmosConfig) -> str:
    name, is_ode = source["policy.diffusers.sample.solver"], source["policy.diffusers.sample.deterministic_sampling"]
    if "sana" in source.model:
        source.add_note("sampling.solver: Cosmos-RL ignores the key for SANA and uses its second-order scheduler")
        return "dpm2"
    if name == "dpm2":
        source.add_note("sampling.solver dpm2 is deterministic and ignores deterministic_sampling")
        return "dpm2"
    if is_ode and name in ("euler", "flow", "dance", "ddim", "dpm1"):
        return "ode"
    return choice_converter({"euler": "flow_sde", "flow": "flow_sde", "dance": "dance"})(name, source)


def noise_level(value: float, source: CosmosConfig) -> float:
    if sampling_solver(None, source) in ("ode", "dpm2"):
        raise NoCounterpart("the solver is deterministic")
    return value


def advantage_clip(_: Any, source: CosmosConfig) -> float:
    low, high = source["train.train_policy.advantage_low"], source["train.train_policy.advantage_high"]
    if low != -high:
        source.add_note(f"algorithm.adv_clip_max {high:g} limits both sides; Cosmos-RL clips to {low:g} to {high:g}")
    return float(high)


def advantage_std(value: bool, source: CosmosConfig) -> str:
    if value and source["train.train_policy.use_remote_reward"]:
        source.add_note("algorithm.advantage_std group: with use_remote_reward, Cosmos-RL ignores unbiased_advantage")
        return "group"
    return "none" if value else "group"


def lora_targets(value: Any, _: CosmosConfig) -> list[str]:
    if not isinstance(value, list):
        raise NoCounterpart("list the layers, or omit the key to adapt the attention projections of the model family")
    return value


def data_split(value: str | list[str], _: CosmosConfig) -> str:
    if isinstance(value, list) and len(value) != 1:
        raise NoCounterpart("data.split is a single split")
    return value[0] if isinstance(value, list) else value


def prompt_file(value: str, source: CosmosConfig) -> str:
    if not value.endswith((".txt", ".jsonl")):
        raise NoCounterpart("set validation.prompts to a .txt file with one prompt per line, or to a .jsonl file")
    return value


def validate_every(_: Any, source: CosmosConfig) -> int:
    return int(source["validation.freq"]) if source["validation.enable"] else 0


def validate_at_start(_: Any, source: CosmosConfig) -> bool:
    return bool(source["validation.enable"] and source["validation.val_before_train"])


def validation_seeds(value: int, _: CosmosConfig) -> list[int]:
    return list(range(1000001, 1000001 + value))


def save_every(_: Any, source: CosmosConfig) -> int:
    return int(source["train.ckpt.save_freq"]) if source["train.ckpt.enable_checkpoint"] else 0


def export_every(_: Any, source: CosmosConfig) -> int:
    return save_every(_, source) if source["train.ckpt.export_safetensors"] else 0


def checkpoints_to_keep(value: int, _: CosmosConfig) -> int:
    if value < 1:
        raise NoCounterpart("set the number of checkpoints to keep: checkpoint.keep")
    return value


def logging_outputs(value: list[str], _: CosmosConfig) -> tuple[bool, list[str]]:
    """Return (logging.console, logging.trackers)."""
    names = [logger.lower() for logger in value]
    return "console" in names, ["tensorboard", *(["wandb"] if "wandb" in names else [])]


# ---- the length of a run. Cosmos-RL counts epochs, so the samples of the dataset must be counted


def run_steps(_: Any, source: CosmosConfig) -> int:
    """Return --steps if it is set. Otherwise, return the steps of all epochs, at most train.max_num_steps.

    Raises NoCounterpart if the data cannot be counted and train.max_num_steps is not set, or if all epochs together are
    shorter than one step.
    """
    if source.steps is not None:
        return source.steps
    max_steps = source.settings.get("train.max_num_steps")
    epochs = epoch_steps(source)
    if epochs is None and max_steps is None:
        raise NoCounterpart(
            f"the epochs of {find_data_folder(source) or 'an unnamed data set'} cannot be counted on this machine; "
            "set --steps, or run this command on a machine with the data"
        )
    if epochs == 0:
        raise NoCounterpart("all epochs together are shorter than one step; set --steps")
    return min(steps for steps in (epochs, max_steps) if steps is not None)


def epoch_steps(source: CosmosConfig) -> int | None:
    """Return the number of optimizer steps (SFT) or RL steps in all epochs, or None if it cannot be counted."""
    samples, ranks = num_samples(source), num_data_ranks(source)
    if samples is None or ranks is None:
        return None
    epochs, batch = int(source["train.epoch"]), int(source["train.train_batch_per_replica"])
    if source.mode in (SFT, VLM_SFT):
        round_steps = math.floor if source.settings.get(f"{POLICY}.dataloader_drop_last", True) else math.ceil
        return epochs * int(round_steps(math.ceil(samples / ranks) / batch))
    replicas = int(source["policy.parallelism.n_init_replicas"])
    return epochs * samples * int(source["rollout.n_generation"]) // (batch * replicas)


def num_samples(source: CosmosConfig) -> int | None:
    """Return the number of samples (SFT) or prompts (RL), or None if the data is not on this machine."""
    if source.mode == VLM_SFT:
        return count_conversations(source)
    folder = find_data_folder(source)
    if folder is None or not Path(folder).is_dir():
        return None
    if source.mode == SFT:
        return sum(1 for _ in Path(folder).glob("*.json")) or None
    try:
        split_name = data_split(source.settings.get(f"{POLICY}.dataset.split", "train"), source)
        return len(load_prompts(Path(folder), source.settings[f"{POLICY}.dataset.name"], split_name))
    except (DataError, KeyError, NoCounterpart):
        return None


def find_data_folder(source: CosmosConfig) -> str | None:
    for key in (ANNOTATIONS, f"{POLICY}.dataset.local_dir", f"{POLICY}.dataset.name"):
        if source.settings.get(key):
            return str(source.settings[key])
    return None
