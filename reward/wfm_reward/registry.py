"""Look up rewards by name: a built-in reward in `wfm_reward/rewards/`, or any `package.module:Class`."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

import wfm_reward.rewards
from wfm_ds.errors import RewardError
from wfm_ds.user_class import import_class, is_user_class
from wfm_reward.base import DEFAULT_MAX_BATCH, Reward


def list_reward_names() -> list[str]:
    """Return the sorted names of the built-in rewards, without loading models."""
    return sorted(_load_builtin_rewards())


def get_reward_class(name: str) -> type[Reward]:
    """Return the reward class for a built-in name, `NAME/LABEL` or `package.module:Class`.

    Labels allow a recipe to use the reward NAME several times. Raises RewardError with the closest known name if there
    is no such reward.
    """
    name, slash, label = name.partition("/")
    if slash and not label:
        raise RewardError(f"reward {name}/ has no label: write {name} or {name}/LABEL")
    if is_user_class(name):
        return import_class(name, Reward, key="reward", error=RewardError)
    rewards = _load_builtin_rewards()
    if name not in rewards:
        close = difflib.get_close_matches(name, rewards, n=1)
        raise RewardError(
            f"unknown reward {name!r}"
            + (f"; did you mean {close[0]}?" if close else ".")
            + f" Known: {', '.join(sorted(rewards)) or 'none'}; write your own as package.module:Class"
        )
    return rewards[name]


def find_reward_class(name: str, *, is_local: bool) -> type[Reward] | None:
    """Return the class of a reward of a recipe, or None for a user's class that only another service must know.

    is_local: whether this run starts the reward service. Raises RewardError like `get_reward_class`.
    """
    is_known = is_local or name.partition("/")[0] in _load_builtin_rewards()
    return get_reward_class(name) if is_known else None


def create_reward(name: str, device: str, options: Mapping[str, Any]) -> Reward:
    """Create a reward without loading its model. Raises RewardError for an unknown name or invalid options."""
    reward, arguments = get_reward_class(name), dict(options)
    label = name.partition("/")[2]
    if label and reward.label_option is not None:
        arguments.setdefault(reward.label_option, label)
    known = reward.option_parameters()
    if unknown := arguments.keys() - known.keys():
        raise reward.unknown_options_error(unknown)
    missing = [o.name for o in known.values() if o.default is o.empty and o.name not in arguments]
    if missing:
        raise RewardError(f"reward {name} needs the option {', '.join(missing)}")
    parameters = inspect.signature(reward).parameters
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    frames = None if accepts_any or "frames" in parameters else arguments.pop("frames", None)
    if accepts_any or "device" in parameters:
        arguments["device"] = device
    try:
        instance = reward(**arguments)
    except (TypeError, ValueError) as error:  # an option of the wrong type or value
        if isinstance(error, RewardError):
            raise
        raise RewardError(f"reward {name}: {error}") from error
    instance.device = device
    if frames is not None:
        instance.frames = reward.parse_frame_rule(frames)
    return instance


def check_reward(name: str, device: str, options: Mapping[str, Any], max_batch: int | None) -> Reward:
    """Create a reward without loading its model. Raises RewardError if name, options or batch size are invalid."""
    resolve_max_batch(name, max_batch)
    return create_reward(name, device, options)


def resolve_max_batch(name: str, max_batch: int | None) -> int:
    """Return `max_batch`, or the reward's default for None. Raises RewardError if it exceeds the reward's maximum."""
    largest = get_reward_class(name).max_batch
    if max_batch is None:
        return min(DEFAULT_MAX_BATCH, largest)
    if max_batch > largest:
        raise RewardError(f"reward {name} accepts at most {largest} items per batch; max_batch is {max_batch}")
    return max_batch


@functools.cache
def _load_builtin_rewards() -> dict[str, type[Reward]]:
    rewards: dict[str, type[Reward]] = {}
    for module_info in pkgutil.iter_modules(wfm_reward.rewards.__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"wfm_reward.rewards.{module_info.name}")
        for _, reward in inspect.getmembers(module, inspect.isclass):
            if not issubclass(reward, Reward) or reward.__module__ != module.__name__ or inspect.isabstract(reward):
                continue
            if reward.name in rewards:
                other = rewards[reward.name].__module__
                raise RewardError(f"{reward.__module__} and {other} both define {reward.name}")
            rewards[reward.name] = reward
    return rewards
