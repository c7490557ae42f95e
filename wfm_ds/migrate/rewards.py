"""Convert the rewards of a Cosmos-RL configuration to entries of reward.functions."""

from __future__ import annotations

from typing import Any

from wfm_ds.migrate.config import POLICY, CosmosConfig, NoCounterpart

WFM_REWARD = "model.rl.reward_config"
USE_REMOTE = f"{POLICY}.use_remote_reward"
SERVICE_NOTE = (
    "rewards named remote/NAME use Cosmos-RL's service at REMOTE_REWARD_ENQUEUE_URL and REMOTE_REWARD_FETCH_URL with "
    "REMOTE_REWARD_TOKEN; without the prefix remote/, wfm_ds computes the reward (docs/rewards.md)"
)


def remote_reward(name: str, output: str, source: CosmosConfig) -> dict[str, Any]:
    """Return the recipe entry for a reward of Cosmos-RL's service.

    output: name of the output that is the score, or a sum of output names.
    """
    source.add_note(SERVICE_NOTE)
    return {"name": f"remote/{name}", "options": {"output": output}}


def convert_named_rewards(value: list[dict[str, Any]] | None, source: CosmosConfig) -> list[dict[str, Any]]:
    """Convert a list of rewards with `name` and `score_key`. value: the list, or None if the configuration has none."""
    if not source[USE_REMOTE]:
        if value is None:
            raise NoCounterpart("the rewards are computed by functions in the user's script")
        source.add_note(
            f"{USE_REMOTE} is false: Cosmos-RL ignores its remote_reward; wfm_ds computes these rewards locally"
        )
    elif value is None:
        value = [{"name": "dance_grpo", "score_key": "overall_reward"}]
    return add_unknown_reward_notes([_reward_entry(function, source) for function in value], source)


def _reward_entry(function: dict[str, Any], source: CosmosConfig) -> dict[str, Any]:
    name = function["name"]
    output = function.get("score_key", name)
    entry = remote_reward(name, output, source) if source[USE_REMOTE] else {"name": name}
    if not source[USE_REMOTE] and output != name:
        entry["options"] = {"output": output}
    clip = [function.get("clip_min", -5.0), function.get("clip_max", 5.0)]
    return entry | {"weight": function.get("weight", 1.0), "clip": clip}


def convert_weighted_rewards(value: dict[str, float], source: CosmosConfig) -> list[dict[str, Any]]:
    """Convert rewards in the older form {name: weight}, in which the score is the output called `name`."""
    functions = [
        (remote_reward(name, name, source) if source[USE_REMOTE] else {"name": name}) | {"weight": weight}
        for name, weight in value.items()
    ]
    return add_unknown_reward_notes(functions, source)


def convert_wfm_rewards(_: Any, source: CosmosConfig) -> list[dict[str, Any]]:
    """Convert the rewards of a `--wfm-mode` configuration. Raises NoCounterpart if no reward is enabled."""
    functions: list[dict[str, Any]] = []
    service = f"{WFM_REWARD}.remote_reward"
    if source[f"{service}.enabled"]:
        entry = remote_reward(source[f"{service}.reward_fn"], source[f"{service}.score_key"], source)
        functions.append(entry | {"clip": [source[f"{service}.reward_clip_{end}"] for end in ("min", "max")]})
    others = {"aesthetic": "aesthetic", "image_reward": "image_reward", "fake_reward": "mock"}
    functions += [{"name": ours} for theirs, ours in others.items() if source[f"{WFM_REWARD}.{theirs}.enabled"]]
    if not functions:
        raise NoCounterpart("no reward is enabled")
    return add_unknown_reward_notes(functions, source)


def add_unknown_reward_notes(functions: list[dict[str, Any]], source: CosmosConfig) -> list[dict[str, Any]]:
    """Return `functions` after adding a note to `source` for each reward that neither wfm_ds nor a service computes."""
    from wfm_reward import registry

    local = {function["name"] for function in functions if not function["name"].startswith("remote/")}
    for name in sorted(local - set(registry.list_reward_names())):
        source.add_note(
            f"reward {name} is not part of wfm_ds: implement it, or use remote/{name} to request it from Cosmos-RL's "
            "service (docs/rewards.md)"
        )
    return functions


def reward_clip(_: Any, source: CosmosConfig) -> list[float]:
    source.add_note("reward.clip clamps rewards, as in Cosmos-RL; remove it if a reward has a larger range")
    return [source[f"{POLICY}.remote_reward.reward_clip_{end}"] for end in ("min", "max")]
