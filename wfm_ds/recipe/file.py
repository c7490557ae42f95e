"""Read, merge, override, validate and write recipe files. Errors name the location, the key and the expected value."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from wfm_ds.errors import RecipeError
from wfm_ds.recipe import shipped_recipes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.schema_description import SCHEMA_ROOT, find_misread_values, format_value, translate_errors
from wfm_ds.recipe.tiny import find_tiny_family, match_released_name, shrink_recipe
from wfm_ds.recipe.tree import (
    MAX_CHARACTERS,
    KeyPath,
    RecipeProblem,
    RecipeTree,
    SourceLocation,
    apply_overrides,
    merge_trees,
    parse_yaml,
    raise_problems,
    shorten_text,
    to_yaml,
)

RENAMED_KEYS = {"validation.judges": "validation.held_out_rewards", "rollout.lost_after_s": "rollout.worker_timeout_s"}
"""{old key: new key}, both as `section.key`."""

RENAMED_VALUES = {"data.choose": {"spread": "reward_std"}}
"""{key: {old value: new value}}."""

OLD_MAX_BATCH = 16  # former default of reward.functions.N.max_batch
OLD_DGPO = {"clip_ratio": None, "kl_beta": 0.0}  # values of runs from before these keys existed


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load and validate a recipe from a YAML file. If `path` is not a file, it is the name of a shipped recipe.

    Values in the file override values of the base recipe that it names under the key `defaults`. overrides:
    `section.key=value` arguments, applied last. Raises RecipeError with one line per problem: file and line (or
    override), key and expected value.
    """
    return _resolve_recipe(read_recipe_tree(resolve_recipe_path(path)), overrides)


def load_tiny_recipe(path: Path, overrides: Sequence[str] = (), *, world_size: int = 1) -> Recipe:
    """Load the tiny version of a recipe. Overrides take precedence over its values.

    world_size: number of ranks. A larger engine.sequence_parallel is reduced to this number. Raises RecipeError in the
    same cases as `load_recipe`, and if the model family is unknown.
    """
    path = resolve_recipe_path(path)
    recipe = _resolve_recipe(read_recipe_tree(path), ())
    replaces_model = any(word.startswith("model.path=") for word in overrides)
    family = match_released_name(recipe.model.path) if replaces_model else find_tiny_family(recipe.model.path)
    values = shrink_recipe(recipe, shipped_recipes.recipe_name(path), family, world_size=world_size)
    return _resolve_recipe(RecipeTree(values, {(): SourceLocation(f"{path} --tiny")}), overrides)


def load_stored_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the resolved recipe of a run folder or checkpoint, and rename old keys. Raises RecipeError."""
    tree = read_recipe_tree(path)
    convert_old_names(tree)
    return _resolve_recipe(tree, overrides)


def dump_recipe(recipe: Recipe) -> str:
    """Return a recipe as YAML that load_recipe reads back as an equal recipe. Unused sections are omitted."""
    values = recipe.model_dump(mode="json")
    unread = recipe.unused_sections
    return to_yaml({name: value for name, value in values.items() if value is not None and name not in unread})


# ---- files


def resolve_recipe_path(path: Path) -> Path:
    """Return `path` if it exists or no shipped recipe has this name, otherwise the file of the shipped recipe."""
    return path if os.path.lexists(path) else shipped_recipes.find_recipe(str(path)) or path


def read_recipe_tree(path: Path) -> RecipeTree:
    variant, base = read_recipe_parts(path)
    return variant if base is None else merge_trees(base, variant)


def read_recipe_parts(path: Path) -> tuple[RecipeTree, RecipeTree | None]:
    """Return (values of a recipe file without `defaults`, values of the file that `defaults` names, or None).

    The values are not validated. Raises RecipeError if a file cannot be read.
    """
    variant = _read_tree(path)
    if "defaults" not in variant.values:
        return variant, None
    name, place = variant.values.pop("defaults"), variant.locate(("defaults",))
    variant.forget_locations(("defaults",))
    if not isinstance(name, str):
        raise RecipeError(f"{place}: defaults: expected the path of one recipe, got {format_value(name)}")
    base_path = path.parent / name
    if not os.path.isfile(base_path):  # unlike Path.is_file, it accepts a path of any length
        shown_path = shorten_text(str(base_path))
        raise RecipeError(f"{place}: defaults: file {shown_path} not found (relative to the including file)")
    base = _read_tree(base_path)
    if "defaults" in base.values:
        place = base.locate(("defaults",))
        raise RecipeError(f"{place}: an included recipe cannot have its own defaults (included by {path})")
    return variant, base


def _read_tree(path: Path) -> RecipeTree:
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)  # limited: the path may be a device that never ends
    except FileNotFoundError as error:
        raise RecipeError(f"{path}: recipe file not found{shipped_recipes.suggest_recipes(str(path))}") from error
    except IsADirectoryError as error:
        raise RecipeError(f"{path} is a folder: pass the recipe file in it") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not a UTF-8 text file") from error
    except OSError as error:
        raise RecipeError(f"{shorten_text(str(path))}: cannot be read: {error.strerror}") from error
    tree = parse_yaml(text, str(path))
    needed = [name for name, field in Recipe.model_fields.items() if field.is_required()]
    if tree.values is None:
        raise RecipeError(f"{path}:1: the file is empty; a recipe needs the sections {', '.join(needed)}")
    if not isinstance(tree.values, dict):
        got = "a list" if isinstance(tree.values, list) else format_value(tree.values)
        raise RecipeError(f"{path}:1: expected a mapping of sections ({', '.join(needed)}, ...), got {got}")
    if path.is_relative_to(shipped_recipes.recipes_folder()):
        tree.values = shipped_recipes.resolve_shipped_paths(tree.values, shipped_recipes.recipes_folder())
    return tree


# ---- checks


def _resolve_recipe(tree: RecipeTree, overrides: Sequence[str]) -> Recipe:
    for argument in overrides:
        if argument.partition("=")[0] == "defaults":
            raise RecipeError(f"override {argument}: defaults must be in a file, not in an override")
    apply_overrides(tree, overrides)
    for name in Recipe.model_fields:
        if name in tree.values and tree.values[name] is None:
            del tree.values[name]  # its location is kept for the error if the section is required
    return validate_tree(tree)


def validate_tree(tree: RecipeTree) -> Recipe:
    explained = [*find_old_names(tree), *find_misread_values(SCHEMA_ROOT, tree.values, ())]
    problems = [RecipeProblem(tree.locate(path), text) for path, text in explained]
    recipe = None
    try:
        recipe = Recipe.model_validate(tree.values)
    except ValidationError as error:
        problems += translate_errors(error.errors(), tree, {path for path, _ in explained})
    raise_problems(problems)
    assert recipe is not None, "pydantic rejected the recipe, but no error was reported"
    return recipe


# ---- names of earlier versions


def find_old_names(tree: RecipeTree) -> list[tuple[KeyPath, str]]:
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
    """Rename old keys and values in the recipe, and add keys whose defaults differ from the behavior of older versions.

    If a key is present under both its old and its new name, the new name's value is kept.
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
    algorithm = section_values(tree, "algorithm")
    if algorithm.get("name") == "dgpo" and "clip_ratio" not in algorithm:
        algorithm |= OLD_DGPO
    for section, key in (("reward", "functions"), ("validation", "held_out_rewards")):
        rewards = section_values(tree, section).get(key)
        for reward in rewards if isinstance(rewards, list) else []:
            if isinstance(reward, dict) and reward.get("max_batch") == OLD_MAX_BATCH:
                del reward["max_batch"]


def section_values(tree: RecipeTree, section: str) -> dict[str, Any]:
    values = tree.values.get(section)
    return values if isinstance(values, dict) else {}
