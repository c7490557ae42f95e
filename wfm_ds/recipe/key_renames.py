"""Convert renamed recipe keys and values, and a changed default.

If a user's recipe or override contains an old name, the error message states the new name. Resolved recipes that
earlier versions wrote to run folders and checkpoints are converted when they are loaded (recipe/file.py).
"""

from __future__ import annotations

from typing import Any

from wfm_ds.recipe.tree import KeyPath, RecipeTree

RENAMED_KEYS = {
    "validation.judges": "validation.held_out_rewards",
    "rollout.lost_after_s": "rollout.worker_timeout_s",
}
"""{old key: new key}, both as `section.key`."""

RENAMED_VALUES = {"data.choose": {"spread": "reward_std"}}
"""{key: {old value: new value}}."""

OLD_MAX_BATCH = 16  # former default of reward.functions.N.max_batch


def find_old_names(tree: RecipeTree) -> list[tuple[KeyPath, str]]:
    """Return (key path, message for the user) for each old key or value in the recipe."""
    messages: list[tuple[KeyPath, str]] = []
    for old, new in RENAMED_KEYS.items():
        section, key = old.split(".")
        if key in section_values(tree, section):
            messages.append(((section, key), f"{old} has been renamed to {new}: change the key"))
    for name, values in RENAMED_VALUES.items():
        section, key = name.split(".")
        value = section_values(tree, section).get(key)
        if isinstance(value, str) and value in values:
            messages.append(((section, key), f"{name}: {value} has been renamed to {values[value]}: change the value"))
    return messages


def convert_old_names(tree: RecipeTree) -> None:
    """Rename old keys and values in the recipe.

    If a key is present under both its old and its new name, the value of the new name wins.
    """
    for old, new in RENAMED_KEYS.items():
        (section, old_key), (new_section, new_key) = old.split("."), new.split(".")
        values = section_values(tree, section)
        if old_key in values:
            location = tree.locate((section, old_key))
            value = values.pop(old_key)
            tree.forget_locations((section, old_key))
            if new_key not in tree.values.setdefault(new_section, {}):
                tree.values[new_section][new_key] = value
                tree.locations[(new_section, new_key)] = location
    for name, renamed in RENAMED_VALUES.items():
        section, key = name.split(".")
        values = section_values(tree, section)
        if isinstance(values.get(key), str):
            values[key] = renamed.get(values[key], values[key])
    remove_old_batch_sizes(tree)


def remove_old_batch_sizes(tree: RecipeTree) -> None:
    """Remove `max_batch: 16`, the default of earlier versions, from all rewards.

    Without the key, the effect is the same.
    """
    for section, key in (("reward", "functions"), ("validation", "held_out_rewards")):
        rewards = section_values(tree, section).get(key)
        for reward in rewards if isinstance(rewards, list) else []:
            if isinstance(reward, dict) and reward.get("max_batch") == OLD_MAX_BATCH:
                del reward["max_batch"]


def section_values(tree: RecipeTree, section: str) -> dict[str, Any]:
    values = tree.values.get(section)
    return values if isinstance(values, dict) else {}
