"""Rewards by name: the files of `wfm_reward/rewards/`, or `package.module:Class` from anywhere."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import wfm_reward.rewards
from wfm_ds.errors import RewardError
from wfm_ds.user_class import import_class, is_user_class
from wfm_reward.base import Reward


def names() -> list[str]:
    """The built-in rewards, sorted. Imports their (light) modules, no models."""
    return sorted(_built_in())


def describe(name: str) -> type[Reward]:
    """Return the class behind a built-in name or `package.module:Class`. Raises RewardError with the nearest name.

    `NAME/LABEL` is NAME a further time, perhaps with other options.
    """
    if is_path(name):
        return import_class(name, Reward, key="reward", error=RewardError)
    rewards, (name, slash, label) = _built_in(), name.partition("/")
    if slash and not label:
        raise RewardError(f"reward {name}/ lacks its label: write {name}, or {name}/LABEL")
    if name not in rewards:
        near = difflib.get_close_matches(name, rewards, n=1)
        raise RewardError(
            f"there is no reward {name!r}"
            + (f"; did you mean {near[0]}?" if near else ";")
            + f" Known: {', '.join(sorted(rewards)) or 'none'}; your own is written package.module:Class"
        )
    return rewards[name]


def is_path(name: str) -> bool:
    """Return True for `package.module:Class`."""
    return is_user_class(name.partition("/")[0])


def create(name: str, device: str, options: Mapping[str, Any]) -> Reward:
    """Return the reward, not loaded yet. Raises RewardError for unknown names and options."""
    reward, given = describe(name), dict(options)
    label = "" if is_path(name) else name.partition("/")[2]
    if label and reward.label_option is not None:
        given.setdefault(reward.label_option, label)
    known = reward.options()
    if unknown := given.keys() - known.keys():
        raise reward.unknown(unknown)
    lacking = [o.name for o in known.values() if o.default is o.empty and o.name not in given]
    if lacking:
        raise RewardError(f"reward {name} needs the option {', '.join(lacking)}")
    parameters = inspect.signature(reward).parameters
    hands_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    frames = None if hands_on or "frames" in parameters else given.pop("frames", None)
    if hands_on or "device" in parameters:
        given["device"] = device
    try:
        made = reward(**given)
    except (TypeError, ValueError) as error:  # an option of another type
        if isinstance(error, RewardError):
            raise
        raise RewardError(f"reward {name}: {error}") from error
    made.device = device
    if frames is not None:
        made.frames = reward.frame_rule(frames)
    return made


def check(name: str, device: str, options: Mapping[str, Any], max_batch: int) -> None:
    """Raise RewardError for what can be known without loading a model: name, options, size of a batch."""
    reward = describe(name)
    if max_batch > reward.max_batch:
        raise RewardError(f"reward {name} takes {reward.max_batch} items at once: max_batch is {max_batch}")
    create(name, device, options)


@functools.cache
def _built_in() -> dict[str, type[Reward]]:
    found: dict[str, type[Reward]] = {}
    for module_info in pkgutil.iter_modules(wfm_reward.rewards.__path__):
        if module_info.name.startswith("_"):
            continue
        for reward in _rewards_in(importlib.import_module(f"wfm_reward.rewards.{module_info.name}")):
            if reward.name in found:
                raise RewardError(f"{reward.__module__} and {found[reward.name].__module__} both define {reward.name}")
            found[reward.name] = reward
    return found


def _rewards_in(module: ModuleType) -> list[type[Reward]]:
    """Concrete rewards that this module defines itself, not those that it imports."""
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Reward)
        and not inspect.isabstract(value)
        and value.__module__ == module.__name__
    ]
