"""The values of the diffusers trainers' configurations that take more than another name.

The table of the keys, which uses these functions, is in keys.py.
"""

from __future__ import annotations

from typing import Any

from wfm_ds.migrate.config import CosmosConfig, NoCounterpart, one_of


def folder_of_model(value: str, source: CosmosConfig) -> str:
    """A folder; a name on the Hugging Face hub becomes the one that it is to be downloaded to."""
    if not value:
        raise NoCounterpart("it is empty")
    if value.startswith((".", "/", "~")) or value.count("/") != 1:
        return value
    folder = f"models/{value.rpartition('/')[2]}"
    revision = source.given.get("policy.model_revision")
    wanted = f" --revision {revision}" if revision else ""
    source.note(f"model.path is a folder; fill it with: hf download {value}{wanted} --local-dir {folder}")
    return folder


def resume(value: Any, _: CosmosConfig) -> str:
    return value if isinstance(value, str) else "auto" if value else "never"


def zero_stage(_: Any, source: CosmosConfig) -> str:
    if source["train.fsdp_offload"]:
        return "zero3_offload"
    if source.has_table("policy.lora"):
        return "zero2"
    return sharding(source["policy.parallelism.dp_shard_size"], num_replicas(source), source)


def sharding(shards: int, replicas: int, source: CosmosConfig) -> str:
    """The DeepSpeed JSON for `replicas` of the weights, each cut into `shards` (-1: as many as there are ranks)."""
    if shards == 1:
        return "zero2"
    if replicas == 1:
        return "zero3"
    source.note(
        f"engine.deepspeed zero3_hpz: the {replicas} replicas of the weights, each cut into shards, are one set of "
        "shards here and a second copy within each node for the backward pass; on a single node take zero3"
    )
    return "zero3_hpz"


def num_replicas(source: CosmosConfig) -> int:
    """Copies of the sharded model; each may be several shards wide."""
    return int(
        source["policy.parallelism.dp_replicate_size"] * source.given.get("policy.parallelism.n_init_replicas", 1)
    )


def data_ranks(source: CosmosConfig) -> int | None:
    """Ranks that see data of their own; None where the configuration leaves their number to the launcher."""
    shards = source["policy.parallelism.dp_shard_size"]
    return int(shards * num_replicas(source)) if shards > 0 else None


def learning_rate(value: Any, source: CosmosConfig) -> float:
    if isinstance(value, dict) and len(value) > 1:
        source.note("optimizer.lr is the `global` one of train.optm_lr: a recipe has one learning rate")
    rate = value.get("global") if isinstance(value, dict) else value
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise NoCounterpart("a recipe has one learning rate for all weights")
    return rate


def warmup(value: float, source: CosmosConfig) -> int:
    if isinstance(value, int):
        return value
    num_steps = source.steps or source.given.get("train.max_num_steps")
    if num_steps is None:
        raise NoCounterpart("a share of the steps, whose number the configuration does not say: give it with --steps")
    return round(value * int(num_steps))


def schedule(value: str, source: CosmosConfig) -> str:
    if source.given.get("train.optm_decay_ratio", 1) != 1:
        source.note("optimizer.schedule falls from the end of the warm-up on, not over train.optm_decay_ratio only")
    return one_of({"cosine": "cosine", "linear": "linear", "none": "constant"})(value, source)


def of_ema(value: Any, source: CosmosConfig) -> Any:
    if not source["train.ema_enable"]:
        raise NoCounterpart("train.ema_enable is false")
    return value


def ema_interval(value: int, source: CosmosConfig) -> int:
    return int(of_ema(max(value, 1), source))  # 0 there: every step


def ema_switch(value: bool, source: CosmosConfig) -> Any:
    if not value:
        raise NoCounterpart("leave the section `ema` out, as here")
    return source["train.ema_decay"]


def accumulation(value: int, source: CosmosConfig) -> int:
    micro = source["train.train_policy.mini_batch"]
    if value % micro:
        raise NoCounterpart(f"{value} samples are no multiple of mini_batch {micro}")
    return int(value) // int(micro)


def prompts_per_step(_: Any, source: CosmosConfig) -> int:
    samples = source["train.train_batch_per_replica"] * source["policy.parallelism.n_init_replicas"]
    if samples % source["rollout.n_generation"]:
        raise NoCounterpart(f"{samples} samples are not whole groups of rollout.n_generation")
    return int(samples // source["rollout.n_generation"])


def updates(value: int, source: CosmosConfig) -> int:
    ranks = source["policy.parallelism.dp_shard_size"] * source["policy.parallelism.dp_replicate_size"]
    a_rank = source["train.train_batch_per_replica"] / ranks
    if not value or a_rank % value:
        raise NoCounterpart(f"{value} does not divide the {a_rank:g} samples of a rank")
    return int(a_rank // value)


def once(value: int, _: CosmosConfig) -> int:
    if value != 1:
        raise NoCounterpart("a rollout is trained on once: raise algorithm.updates_per_rollout for more updates")
    return 1


def frames(value: int, source: CosmosConfig) -> int:
    if not source.given.get("policy.diffusers.is_video"):
        raise NoCounterpart("policy.diffusers.is_video is false")
    return value


def shown_frames(value: int, source: CosmosConfig) -> int:
    if value != source["policy.diffusers.train_frames"]:
        raise NoCounterpart("videos are trained, validated and shown at one length: sampling.num_frames")
    return frames(value, source)


def density(value: str, source: CosmosConfig) -> str:
    if value not in ("logit_normal", "mode"):
        source.note(f"policy.diffusers.weighting_scheme {value} draws noise levels uniformly, there too")
        return "uniform"
    return value


def guidance(value: float, source: CosmosConfig) -> float:
    """The w of v_u + w * (v_c - v_u); diffusers' Cosmos pipelines write v_c + g * (v_c - v_u)."""
    if value <= 1:
        return 1.0
    if "cosmos" in source.model:
        source.note(f"sampling.guidance_scale is w = 1 + g: {value:g} there is {1 + value:g} here")
        return 1 + value
    return value


def solver(_: Any, source: CosmosConfig) -> str:
    name, is_ode = source["policy.diffusers.sample.solver"], source["policy.diffusers.sample.deterministic_sampling"]
    if "sana" in source.model:
        source.note("sampling.solver: SANA steps with its own second-order scheduler there, whatever the key says")
        return "dpm2"
    if name == "dpm2":
        source.note("sampling.solver dpm2 is deterministic here, whatever deterministic_sampling says")
        return "dpm2"
    if is_ode and name in ("euler", "flow", "dance", "ddim", "dpm1"):
        return "ode"
    return one_of({"euler": "flow_sde", "flow": "flow_sde", "dance": "dance"})(name, source)


def noise_level(value: float, source: CosmosConfig) -> float:
    if solver(None, source) in ("ode", "dpm2"):
        raise NoCounterpart("the solver is deterministic")
    return value


def advantage_clip(_: Any, source: CosmosConfig) -> float:
    low, high = source["train.train_policy.advantage_low"], source["train.train_policy.advantage_high"]
    if low != -high:
        source.note(f"algorithm.adv_clip_max {high:g} holds on both sides; there it was {low:g} to {high:g}")
    return float(high)


def advantage_std(value: bool, source: CosmosConfig) -> str:
    if value and source["train.train_policy.use_remote_reward"]:
        source.note("algorithm.advantage_std group: with use_remote_reward, Cosmos-RL leaves unbiased_advantage unread")
        return "group"
    return "none" if value else "group"


def lora_targets(value: Any, _: CosmosConfig) -> list[str]:
    if not isinstance(value, list):
        raise NoCounterpart("name the layers, or leave the key out for the attention projections of the family")
    return value


def split(value: str | list[str], _: CosmosConfig) -> str:
    if isinstance(value, list) and len(value) != 1:
        raise NoCounterpart("data.split is one of them")
    return value[0] if isinstance(value, list) else value


def prompt_file(value: str, source: CosmosConfig) -> str:
    if not value.endswith((".txt", ".jsonl")):
        raise NoCounterpart("set validation.prompts to a .txt file, a prompt a line, or a .jsonl one")
    return value


def validate_every(_: Any, source: CosmosConfig) -> int:
    return int(source["validation.freq"]) if source["validation.enable"] else 0


def validate_at_start(_: Any, source: CosmosConfig) -> bool:
    return bool(source["validation.enable"] and source["validation.val_before_train"])


def seeds(value: int, _: CosmosConfig) -> list[int]:
    return list(range(1000001, 1000001 + value))


def save_every(_: Any, source: CosmosConfig) -> int:
    return int(source["train.ckpt.save_freq"]) if source["train.ckpt.enable_checkpoint"] else 0


def export_every(_: Any, source: CosmosConfig) -> int:
    return save_every(_, source) if source["train.ckpt.export_safetensors"] else 0


def keep(value: int, _: CosmosConfig) -> int:
    if value < 1:
        raise NoCounterpart("give the number of checkpoints to keep: checkpoint.keep")
    return value


def has_console(value: list[str], _: CosmosConfig) -> bool:
    return "console" in [logger.lower() for logger in value]
