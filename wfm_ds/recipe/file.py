"""Read, merge, override, validate and write recipe files. Errors name the location, the key and the expected value."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from wfm_ds.errors import RecipeError
from wfm_ds.recipe import shipped_recipes
from wfm_ds.recipe.key_renames import convert_old_names, find_old_names
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.schema_description import (
    SCHEMA_ROOT,
    SchemaNode,
    closest_match,
    describe_type,
    format_value,
    iterate_sections,
    member_names,
    scalar_types,
)
from wfm_ds.recipe.tiny import shrink_recipe
from wfm_ds.recipe.tiny_families import find_tiny_family, match_released_name
from wfm_ds.recipe.tree import (
    KeyPath,
    RecipeProblem,
    RecipeTree,
    SourceLocation,
    apply_overrides,
    join_key_path,
    merge_trees,
    parse_yaml,
    raise_problems,
    shorten_text,
)
from wfm_ds.recipe.yaml_text import MAX_CHARACTERS, to_yaml
from wfm_ds.user_class import CLASS_PATH_FORM

MAX_INTEGER = 2**63 - 1
KEY_IN_TEXT = re.compile(r"[a-z_]+(?:\.[a-z_]+)*")


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load and validate a recipe from a YAML file. If `path` is not a file, it is the name of a shipped recipe.

    A file may name a base recipe under the key `defaults`. Values in the file override values of the base recipe.
    overrides: `section.key=value` arguments, applied last.
    Raises RecipeError with one line per problem: file and line (or override), key and expected value.
    """
    return _resolve_recipe(read_recipe_tree(resolve_recipe_path(path)), overrides)


def load_tiny_recipe(path: Path, overrides: Sequence[str] = (), *, world_size: int = 1) -> Recipe:
    """Load the tiny version of a recipe (tiny.py).

    Values of `--tiny` take precedence over the file, and overrides take precedence over both.
    world_size: number of ranks. A larger engine.sequence_parallel is reduced to this number.
    Raises RecipeError like `load_recipe`, and if the model family is unknown.
    """
    path = resolve_recipe_path(path)
    recipe = _resolve_recipe(read_recipe_tree(path), ())
    replaces_model = any(word.startswith("model.path=") for word in overrides)
    family = match_released_name(recipe.model.path) if replaces_model else find_tiny_family(recipe.model.path)
    values = shrink_recipe(recipe, shipped_recipes.recipe_name(path), family, world_size=world_size)
    return _resolve_recipe(RecipeTree(values, {(): SourceLocation(f"{path} --tiny")}), overrides)


def load_stored_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the resolved recipe of a run folder or checkpoint, and convert keys that were renamed since it was written.

    Raises RecipeError like load_recipe.
    """
    tree = read_recipe_tree(path)
    convert_old_names(tree)
    return _resolve_recipe(tree, overrides)


def dump_recipe(recipe: Recipe) -> str:
    """Serialize a recipe as YAML that load_recipe reads back as an equal recipe. Unused sections are omitted."""
    values = recipe.model_dump(mode="json")
    unread = recipe.unused_sections
    return to_yaml({name: value for name, value in values.items() if value is not None and name not in unread})


# ---- files


def resolve_recipe_path(path: Path) -> Path:
    """Return the file of the shipped recipe named `path`.

    If `path` is an existing file or no shipped recipe has this name, it is returned unchanged.
    """
    return path if os.path.lexists(path) else shipped_recipes.find_recipe(str(path)) or path


def read_recipe_tree(path: Path) -> RecipeTree:
    """Read a recipe file, merged with the file named by `defaults`, without validating it. Raises RecipeError."""
    variant = _read_tree(path)
    if "defaults" not in variant.values:
        return variant
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
    return merge_trees(base, variant)


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
    """Validate a recipe. Raises RecipeError with one line per problem."""
    explained = [*find_old_names(tree), *_find_misread_values(SCHEMA_ROOT, tree.values, ())]
    problems = [RecipeProblem(tree.locate(path), text) for path, text in explained]
    recipe = None
    try:
        recipe = Recipe.model_validate(tree.values)
    except ValidationError as error:
        problems += _translate_errors(error.errors(), tree, {path for path, _ in explained})
    raise_problems(problems)
    assert recipe is not None, "pydantic rejected the recipe, but no error was reported"
    return recipe


def _find_misread_values(slot: SchemaNode, value: Any, path: KeyPath) -> list[tuple[KeyPath, str]]:
    """Return (key path, message) for each value that pydantic would silently convert, and for each too large integer.

    For example, pydantic converts true to 1 and the text "30" to the number 30. Integers of 2**63 or more are too
    large.
    """
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        inner = [(key, entry, slot.child(key, value)) for key, entry in entries]
        return [
            misread
            for key, entry, s in inner
            if s is not None
            for misread in _find_misread_values(s, entry, (*path, key))
        ]
    allowed = scalar_types(slot)
    if (
        isinstance(value, int | float)
        and int in allowed
        and float not in allowed
        and MAX_INTEGER < abs(value) < math.inf
    ):
        return [
            (
                path,
                f"{join_key_path(path)}: expected {describe_type(slot)}, at most 2**63 - 1, got {format_value(value)}",
            )
        ]
    is_flag_as_number = isinstance(value, bool) and bool not in allowed and bool(allowed & {int, float})
    is_text_as_number = isinstance(value, str) and bool(allowed) and allowed <= {int, float}
    if is_flag_as_number or is_text_as_number:
        return [(path, _describe_unexpected_value(_ErrorLocation(path, slot, value, None)))]
    return []


@dataclass(frozen=True, slots=True)
class _ErrorLocation:
    """Position of a validation error in the recipe's values and in the schema."""

    path: KeyPath
    node: SchemaNode | None  # None for a key that is not in the schema
    value: Any
    parent: _ErrorLocation | None
    is_inexact: bool = False  # pydantic did not say where inside this value the error is

    def enter_child(self, key: str | int) -> _ErrorLocation:
        slot = None if self.node is None else self.node.child(key, self.value)
        is_known = key in self.value if isinstance(self.value, dict) else isinstance(key, int) and key < len(self.value)
        return _ErrorLocation((*self.path, key), slot, self.value[key] if is_known else None, self)


def _locate_error(loc: Sequence[str | int], values: Any) -> _ErrorLocation:
    """Convert the `loc` of a pydantic error to a position in `values`.

    Pydantic adds a tag to `loc` for each tagged union. An error inside a union without tags is located at the union's
    key.
    """
    spot, rest = _ErrorLocation((), SCHEMA_ROOT, values, None), list(loc)
    while rest:
        slot = spot.node
        own = None if slot is None else slot.user_section(spot.value)
        if own is not None:  # a user's section is validated outside of the union, so `loc` has no tag
            spot = replace(spot, node=SchemaNode(own)).enter_child(rest.pop(0))
        elif slot is not None and len(slot.union_members()) > 1 and rest[0] != slot.discriminator:
            member = slot.find_union_member(rest.pop(0))
            if not rest or member is None:
                return replace(spot, is_inexact=bool(rest))
            spot = replace(spot, node=member)
        else:
            spot = spot.enter_child(rest.pop(0))
    return spot


def _translate_errors(errors: Sequence[ErrorDetails], tree: RecipeTree, explained: set[KeyPath]) -> list[RecipeProblem]:
    """Convert pydantic's errors to RecipeProblems.

    Type errors of a key are omitted if the key is in `explained` or also failed a validator.
    """
    located = [(details, _locate_error(details["loc"], tree.values)) for details in errors]
    explained = explained | {spot.path for details, spot in located if details["type"] == "value_error"}
    relevant = [(d, spot) for d, spot in located if d["type"] == "value_error" or spot.path not in explained]
    return [_translate_error(details, spot, tree) for details, spot in relevant]


def _translate_error(details: ErrorDetails, spot: _ErrorLocation, tree: RecipeTree) -> RecipeProblem:
    text, path = details["msg"], spot.path
    match details["type"]:
        case "value_error":
            text = str(details["ctx"]["error"])
            path = path or _find_mentioned_key(text, tree)
            is_placed = not spot.path or text.startswith(
                f"{join_key_path(spot.path)} "
            )  # the message already names the key
            text = text if is_placed else f"{join_key_path(spot.path)}: {text}"
        case _ if spot.is_inexact:
            text = _describe_unexpected_value(spot)
        case "finite_number" if spot.node is not None:
            expected = f"{describe_type(spot.node)} that is finite"
            text = f"{join_key_path(path)}: expected {expected}, got {format_value(spot.value)}"
        case "extra_forbidden":
            text = _describe_unknown_key(spot)
        case "missing":
            text = _describe_missing_key(spot)
        case "union_tag_invalid" | "union_tag_not_found" if (
            spot.node is not None and spot.node.discriminator is not None
        ):
            text, path = _describe_unknown_name(spot)
        case _ if spot.node is not None:
            text = _describe_unexpected_value(spot)
    return RecipeProblem(tree.locate(path), text)


def _describe_unexpected_value(spot: _ErrorLocation) -> str:
    assert spot.node is not None
    is_unquoted = str in scalar_types(spot.node) and isinstance(spot.value, bool | int | float)
    hint = "; put it in quotes" if is_unquoted else ""
    return f"{join_key_path(spot.path)}: expected {describe_type(spot.node)}, got {format_value(spot.value)}{hint}"


def _describe_missing_key(spot: _ErrorLocation) -> str:
    assert spot.node is not None
    if isinstance(spot.path[-1], int) and spot.parent is not None:  # a list is too short
        return _describe_unexpected_value(spot.parent)
    section = spot.node.section_class(None)
    if section is not None and len(spot.path) == 1:
        needed = [name for name, field in section.model_fields.items() if field.is_required()]
        return f"the section {join_key_path(spot.path)} is missing; it needs {' and '.join(needed)}"
    what = "section" if len(spot.path) == 1 else "key"
    return f"the {what} {join_key_path(spot.path)} is missing; expected {describe_type(spot.node)}"


def _describe_unknown_key(spot: _ErrorLocation) -> str:
    """Return the message for an unknown key. It suggests the closest key, or other sections that have this key."""
    assert spot.parent is not None
    assert spot.parent.node is not None
    section, word = spot.parent.node.section_class(spot.parent.value), str(spot.path[-1])
    assert section is not None
    title = join_key_path(tuple(part for part in spot.parent.path if isinstance(part, str)))
    if spot.parent.path == ("algorithm",):
        title = str(spot.parent.value["name"])
    near = closest_match(word, section.model_fields)
    elsewhere = [t for _, t, other in iterate_sections() if word in other.model_fields]
    there = f"{word} is a key of {', '.join(elsewhere)}" if elsewhere else ""
    if near:
        hint = f"did you mean {near}?" + (f" ({there})" if there else "")
    else:
        hint = there or f"valid keys: {', '.join(section.model_fields)}"
    return f"{join_key_path(spot.path)} is not {f'a key of {title}' if title else 'a section'}; {hint}"


def _describe_unknown_name(spot: _ErrorLocation) -> tuple[str, KeyPath]:
    """Return (message, key path) for a missing or unknown selector key, such as `algorithm.name`."""
    assert spot.node is not None
    assert spot.node.discriminator is not None
    key, valid = spot.node.discriminator, member_names(spot.node)
    if key not in spot.value:
        return f"the key {join_key_path((*spot.path, key))} is missing; expected one of {', '.join(valid)}", spot.path
    valid = [*valid, CLASS_PATH_FORM] if spot.path == ("algorithm",) else valid
    path = (*spot.path, key)
    return f"{join_key_path(path)}: expected one of {', '.join(valid)}, got {format_value(spot.value[key])}", path


def _find_mentioned_key(text: str, tree: RecipeTree) -> KeyPath:
    """Return the longest recipe key that an error message mentions, or () if there is none."""
    mentioned = [tuple(word.split(".")) for word in KEY_IN_TEXT.findall(text)]
    known = [path for path in mentioned if path[0] in Recipe.model_fields and path in tree.locations]
    return max(known, key=len, default=())
