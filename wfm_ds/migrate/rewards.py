"""Rewards of a Cosmos-RL configuration as entries of reward.functions.

Cosmos-RL asks a service for them, which answers with named outputs; `score_key` names one of these, or a sum.
"""

from __future__ import annotations

from typing import Any

from wfm_ds.migrate.config import CosmosConfig, NoCounterpart

WFM_REWARD = "model.rl.reward_config"
USE_REMOTE = "train.train_policy.use_remote_reward"
SERVICE = (
    "rewards named remote/NAME come from the service that REMOTE_REWARD_ENQUEUE_URL, REMOTE_REWARD_FETCH_URL and "
    "REMOTE_REWARD_TOKEN name, as there; without the prefix a reward of wfm_ds is computed (docs/rewards.md)"
)


def remote(name: str, output: str, source: CosmosConfig) -> dict[str, Any]:
    """The reward NAME of a service, with the output, or the sum of outputs, that is its score."""
    source.note(SERVICE)
    return {"name": f"remote/{name}", "options": {"output": output}}


def named_rewards(value: list[dict[str, Any]] | None, source: CosmosConfig) -> list[dict[str, Any]]:
    """The list that names a score_key for each; None where the configuration has no such list."""
    if not source[USE_REMOTE]:
        if value is None:
            raise NoCounterpart("the script's own functions compute the rewards")
        source.note(f"{USE_REMOTE} is false: Cosmos-RL leaves its remote_reward unread; here they are computed")
    elif value is None:
        value = [{"name": "dance_grpo", "score_key": "overall_reward"}]
    return known_rewards([_entry(function, source) for function in value], source)


def _entry(function: dict[str, Any], source: CosmosConfig) -> dict[str, Any]:
    name = function["name"]
    output = function.get("score_key", name)
    entry = remote(name, output, source) if source[USE_REMOTE] else {"name": name}
    if not source[USE_REMOTE] and output != name:
        entry["options"] = {"output": output}
    clip = [function.get("clip_min", -5.0), function.get("clip_max", 5.0)]
    return entry | {"weight": function.get("weight", 1.0), "clip": clip}


def weighted_rewards(value: dict[str, float], source: CosmosConfig) -> list[dict[str, Any]]:
    """The older form, {name: weight}; a service's output has the reward's name in it."""
    functions = [
        (remote(name, name, source) if source[USE_REMOTE] else {"name": name}) | {"weight": weight}
        for name, weight in value.items()
    ]
    return known_rewards(functions, source)


def wfm_rewards(_: Any, source: CosmosConfig) -> list[dict[str, Any]]:
    """The rewards of the wfm mode. Each has advantages of its own there, so clips belong to each function."""
    functions: list[dict[str, Any]] = []
    service = f"{WFM_REWARD}.remote_reward"
    if source[f"{service}.enabled"]:
        entry = remote(source[f"{service}.reward_fn"], source[f"{service}.score_key"], source)
        functions.append(entry | {"clip": [source[f"{service}.reward_clip_{end}"] for end in ("min", "max")]})
    others = {"aesthetic": "aesthetic", "image_reward": "image_reward", "fake_reward": "mock"}
    functions += [{"name": ours} for theirs, ours in others.items() if source[f"{WFM_REWARD}.{theirs}.enabled"]]
    if not functions:
        raise NoCounterpart("no reward is enabled")
    return known_rewards(functions, source)


def known_rewards(functions: list[dict[str, Any]], source: CosmosConfig) -> list[dict[str, Any]]:
    """The same, with a note for each local reward that wfm_ds lacks."""
    from wfm_reward import registry

    local = {function["name"] for function in functions if not function["name"].startswith("remote/")}
    for name in sorted(local - set(registry.names())):
        source.note(
            f"reward {name} does not come with wfm_ds: write it, or name it remote/{name} to have it from the service "
            "that computes it there (docs/rewards.md)"
        )
    return functions


def reward_clip(_: Any, source: CosmosConfig) -> list[float]:
    source.note("reward.clip saturates rewards beyond it, as there; remove it where a reward is not within it")
    return [source[f"train.train_policy.remote_reward.reward_clip_{end}"] for end in ("min", "max")]
