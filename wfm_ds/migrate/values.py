"""How a value of a Cosmos-RL configuration is said in a recipe, where that takes more than another name.

The table of the keys, which uses these functions, is in keys.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wfm_ds.errors import RecipeError

SFT, NFT, DDRL, WFM_SFT = "SFT", "DiffusionNFT", "DDRL", "SFT of the wfm mode"


class NoCounterpart(RecipeError):
    """This value of a key that is otherwise known cannot be said in a recipe; the text is the reason."""


@dataclass(slots=True)
class CosmosConfig:
    """A configuration with flat dotted keys, what is meant by those it lacks, and what was noted while reading it."""

    mode: str
    given: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return self.given[key] if key in self.given else self.defaults[key]

    def has_table(self, prefix: str) -> bool:
        return any(key.startswith(f"{prefix}.") for key in self.given)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def model(self) -> str:
        """What the configuration calls its model, in lower case."""
        return str(self.given.get("policy.model_name_or_path", self.given.get("checkpoint.load_path", ""))).lower()


Convert = Callable[[Any, CosmosConfig], Any]


def one_of(words: Mapping[Any, str]) -> Callable[[Any, CosmosConfig], str]:
    """A choice by name."""

    def convert(value: Any, _: CosmosConfig) -> str:
        if value not in words:
            raise NoCounterpart(f"{value!r} is none of {', '.join(map(str, words))}")
        return words[value]

    return convert


# ---- what takes more than another name


def folder_of_model(value: str, source: CosmosConfig) -> str:
    """Recipes read folders: a name on the Hugging Face hub becomes the folder that it is to be downloaded to."""
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
    return (
        "zero3" if source["policy.parallelism.dp_shard_size"] != 1 and not source.has_table("policy.lora") else "zero2"
    )


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
    if "train.max_num_steps" not in source.given:
        raise NoCounterpart("a share of the steps, whose number the configuration does not say")
    num_steps: int = source["train.max_num_steps"]
    return round(value * num_steps)


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
    a_rank = source["train.train_batch_per_replica"] / source["policy.parallelism.dp_shard_size"]
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
    """diffusers' Cosmos pipelines write v_c + g * (v_c - v_u), the others v_u + w * (v_c - v_u)."""
    if value <= 1:
        return 1.0
    if "cosmos" in source.model:
        source.note(f"sampling.guidance_scale is w = 1 + g: {value:g} there is {1 + value:g} here")
        return 1 + value
    return value


def edm_guidance(value: float, source: CosmosConfig) -> float:
    source.note(f"sampling.guidance_scale is w = 1 + g: {value:g} there is {1 + value:g} here")
    return 1 + value


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


def advantage_std(value: bool, _: CosmosConfig) -> str:
    return "none" if value else "group"


def lora_targets(value: Any, _: CosmosConfig) -> list[str]:
    if not isinstance(value, list):
        raise NoCounterpart("name the layers, or leave the key out for the attention projections of the family")
    return value


def named_rewards(value: list[dict[str, Any]], source: CosmosConfig) -> list[dict[str, Any]]:
    for function in value:
        key = function.get("score_key", function["name"])
        if key != function["name"]:
            source.note(
                f"reward {function['name']}: score_key {key} is the option `output` of the rewards that have it"
            )
    functions = [
        {
            "name": function["name"],
            "weight": function.get("weight", 1.0),
            "clip": [function.get("clip_min", -5.0), function.get("clip_max", 5.0)],
        }
        for function in value
    ]
    return known_rewards(functions, source)


def weighted_rewards(value: dict[str, float], source: CosmosConfig) -> list[dict[str, Any]]:
    return known_rewards([{"name": name, "weight": weight} for name, weight in value.items()], source)


def known_rewards(functions: list[dict[str, Any]], source: CosmosConfig) -> list[dict[str, Any]]:
    from wfm_reward import registry

    for name in sorted({f["name"] for f in functions} - set(registry.names())):
        source.note(
            f"reward {name} does not come with wfm_ds: write it, or name it remote/{name} to have it from the service "
            "that computes it there (docs/rewards.md)"
        )
    return functions


def reward_clip(_: Any, source: CosmosConfig) -> list[float]:
    source.note("reward.clip saturates rewards beyond it, as there; remove it where a reward is not within it")
    return [source[f"train.train_policy.remote_reward.reward_clip_{end}"] for end in ("min", "max")]


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


# ---- of the wfm mode


def output_of_job(_: Any, source: CosmosConfig) -> str:
    return "/".join(["outputs", *(str(source[f"job.{part}"]) for part in ("project", "group", "name"))])


def groups_of_instances(_: Any, source: CosmosConfig) -> int:
    """There each copy of the model makes one sample of a group."""
    samples = source["model.fsdp_shard_size"] * source["model.dp_replicate_size"]
    if samples % source["model.rl.num_rollout"]:
        raise NoCounterpart(f"{samples} copies of the model are not whole groups of model.rl.num_rollout")
    return int(samples // source["model.rl.num_rollout"])


def wide(value: list[int], _: CosmosConfig) -> tuple[int, int]:
    return value[1], value[0]  # width first there


def split(value: str | list[str], _: CosmosConfig) -> str:
    if isinstance(value, list) and len(value) != 1:
        raise NoCounterpart("data.split is one of them")
    return value[0] if isinstance(value, list) else value


def first(value: list[int], _: CosmosConfig) -> int:
    return value[0]


def callbacks(value: list[dict[str, Any]], _: CosmosConfig) -> tuple[Any, Any]:
    """The clip of grad_clip, and how often samples are drawn."""
    found = {str(entry.get("name")): entry.get("args", {}) for entry in value}
    every = [found[name].get("every_n", 0) for name in ("every_n_sample_ema", "every_n_sample_reg") if name in found]
    return found.get("grad_clip", {}).get("clip_norm", 1.0), every[0] if every else 0


def wfm_validate_every(_: Any, source: CosmosConfig) -> int:
    return int(source["trainer.validation_iter"]) if source["trainer.run_validation"] else 0


def of_data_term(value: bool, source: CosmosConfig) -> bool:
    if not source["model.rl.data_beta"]:
        raise NoCounterpart("it is about the diffusion loss, which model.rl.data_beta 0 leaves out")
    return value


def wfm_rewards(_: Any, source: CosmosConfig) -> list[dict[str, Any]]:
    """Advantages are made of each reward by itself there, so clips are a matter of each function."""
    table = "model.rl.reward_config"
    functions: list[dict[str, Any]] = []
    if source[f"{table}.remote_reward.enabled"]:
        bounds = [source[f"{table}.remote_reward.reward_clip_{end}"] for end in ("min", "max")]
        functions.append({"name": source[f"{table}.remote_reward.reward_fn"], "clip": bounds})
    others = {"aesthetic": "aesthetic", "image_reward": "image_reward", "fake_reward": "mock"}
    functions += [{"name": ours} for theirs, ours in others.items() if source[f"{table}.{theirs}.enabled"]]
    if not functions:
        raise NoCounterpart("no reward is enabled")
    return known_rewards(functions, source)


def caption_dropout(value: list[dict[str, Any]], _: CosmosConfig) -> float:
    rates = [entry["dropout_rate"] for entry in value if entry.get("type") == "text_attr" and "dropout_rate" in entry]
    return float(rates[0]) if rates else 0.0


def bounded(value: float, _: CosmosConfig) -> float:
    if float(value) == float("inf"):
        raise NoCounterpart("no bound, as here where the key is left out")
    return float(value)
