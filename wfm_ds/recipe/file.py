"""Recipe files: read, merge, override, check, write. Every error states the location, the key and the expected
value."""

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
from wfm_ds.recipe import shipped
from wfm_ds.recipe.describe import ROOT, Slot, kinds, names, nearest, sections, shown, words
from wfm_ds.recipe.key_renames import convert_old_names, find_old_names
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import KeyPath, Problem, Tree, dotted, merge, override, parse, refuse, shortened
from wfm_ds.recipe.yaml_text import MAX_CHARACTERS, to_yaml
from wfm_ds.user_class import FORM

MAX_WHOLE = 2**63 - 1
KEY_IN_TEXT = re.compile(r"[a-z_]+(?:\.[a-z_]+)*")


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe from a YAML file, merged over the file of its `defaults`, with `section.key=value` overrides.

    If the path does not exist, it may be the name of a shipped recipe (shipped_recipes.py).
    Raises RecipeError with one line per problem: file and line (or override), key and expected value.
    """
    return _resolve_recipe(_read_with_defaults(named(path)), overrides)


def load_stored_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the resolved recipe of a run folder or checkpoint. Renamed keys of earlier versions are converted.

    Raises RecipeError like load_recipe.
    """
    tree = _read_with_defaults(path)
    convert_old_names(tree)
    return _resolve_recipe(tree, overrides)


def dump(recipe: Recipe) -> str:
    """Return YAML that load_recipe reads back as an equal recipe. Unused sections are omitted."""
    values = recipe.model_dump(mode="json")
    unread = recipe.unread_sections
    return to_yaml({name: value for name, value in values.items() if value is not None and name not in unread})


# ---- files


def named(path: Path) -> Path:
    """Return the path if it exists, else the file of the shipped recipe with this name, else the path."""
    return path if os.path.lexists(path) else shipped.of_name(str(path)) or path


def _read_with_defaults(path: Path) -> Tree:
    variant = _read(path)
    if "defaults" not in variant.values:
        return variant
    name, place = variant.values.pop("defaults"), variant.place(("defaults",))
    variant.forget(("defaults",))
    if not isinstance(name, str):
        raise RecipeError(f"{place}: defaults: expected the path of one recipe, got {shown(name)}")
    base_path = path.parent / name
    if not os.path.isfile(base_path):  # unlike Path.is_file, it accepts a path of any length
        shown_path = shortened(str(base_path))
        raise RecipeError(f"{place}: defaults: file {shown_path} not found (relative to the including file)")
    base = _read(base_path)
    if "defaults" in base.values:
        place = base.place(("defaults",))
        raise RecipeError(f"{place}: an included recipe cannot have its own defaults (included by {path})")
    return merge(base, variant)


def _read(path: Path) -> Tree:
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)  # limited: it may be a device that never ends
    except FileNotFoundError as error:
        raise RecipeError(f"{path}: recipe file not found{shipped.nearest(str(path))}") from error
    except IsADirectoryError as error:
        raise RecipeError(f"{path} is a folder: pass the recipe file in it") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not a UTF-8 text file") from error
    except OSError as error:
        raise RecipeError(f"{shortened(str(path))}: cannot be read: {error.strerror}") from error
    tree = parse(text, str(path))
    needed = [name for name, field in Recipe.model_fields.items() if field.is_required()]
    if tree.values is None:
        raise RecipeError(f"{path}:1: the file is empty; a recipe needs the sections {', '.join(needed)}")
    if not isinstance(tree.values, dict):
        got = "a list" if isinstance(tree.values, list) else shown(tree.values)
        raise RecipeError(f"{path}:1: expected a mapping of sections ({', '.join(needed)}, ...), got {got}")
    if path.is_relative_to(shipped.folder()):
        tree.values = shipped.placed(tree.values, shipped.folder())
    return tree


# ---- checks


def _resolve_recipe(tree: Tree, overrides: Sequence[str]) -> Recipe:
    """Apply the overrides and validate."""
    for argument in overrides:
        if argument.partition("=")[0] == "defaults":
            raise RecipeError(f"override {argument}: defaults must be in a file, not in an override")
    override(tree, overrides)
    for name in Recipe.model_fields:
        if name in tree.values and tree.values[name] is None:
            del tree.values[name]  # its location is kept for the error if the section is required
    return _validate(tree)


def _validate(tree: Tree) -> Recipe:
    explained = [*find_old_names(tree), *_misread(ROOT, tree.values, ())]
    problems = [Problem(tree.place(path), text) for path, text in explained]
    recipe = None
    try:
        recipe = Recipe.model_validate(tree.values)
    except ValidationError as error:
        problems += _problems(error.errors(), tree, {path for path, _ in explained})
    refuse(problems)
    assert recipe is not None, "pydantic rejected the recipe, but no error was reported"
    return recipe


def _misread(slot: Slot, value: Any, path: KeyPath) -> list[tuple[KeyPath, str]]:
    """Find values that pydantic would silently convert: true to 1, the text "30" to the number 30."""
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        inner = [(key, entry, slot.inner(key, value)) for key, entry in entries]
        return [misread for key, entry, s in inner if s is not None for misread in _misread(s, entry, (*path, key))]
    allowed = kinds(slot)
    if isinstance(value, int | float) and int in allowed and float not in allowed and MAX_WHOLE < abs(value) < math.inf:
        return [(path, f"{dotted(path)}: expected {words(slot)}, at most 2**63 - 1, got {shown(value)}")]
    is_flag_as_number = isinstance(value, bool) and bool not in allowed and bool(allowed & {int, float})
    is_text_as_number = isinstance(value, str) and bool(allowed) and allowed <= {int, float}
    if is_flag_as_number or is_text_as_number:
        return [(path, _unexpected(_Spot(path, slot, value, None)))]
    return []


@dataclass(frozen=True, slots=True)
class _Spot:
    """Location of an error in the file and in the schema."""

    path: KeyPath
    slot: Slot | None  # None for a key that is not in the schema
    value: Any
    outer: _Spot | None
    is_inexact: bool = False  # the error is somewhere inside this value

    def enter(self, key: str | int) -> _Spot:
        slot = None if self.slot is None else self.slot.inner(key, self.value)
        is_known = key in self.value if isinstance(self.value, dict) else isinstance(key, int) and key < len(self.value)
        return _Spot((*self.path, key), slot, self.value[key] if is_known else None, self)


def _locate(loc: Sequence[str | int], values: Any) -> _Spot:
    """Convert pydantic's error location, which contains a tag for every union on the way.

    An error inside an untagged union is located at the union's key.
    """
    spot, rest = _Spot((), ROOT, values, None), list(loc)
    while rest:
        slot = spot.slot
        own = None if slot is None else slot.own_section(spot.value)
        if own is not None:  # validated outside of the union: no tag
            spot = replace(spot, slot=Slot(own)).enter(rest.pop(0))
        elif slot is not None and len(slot.members()) > 1 and rest[0] != slot.selector:
            member = slot.find_union_member(rest.pop(0))
            if not rest or member is None:
                return replace(spot, is_inexact=bool(rest))
            spot = replace(spot, slot=member)
        else:
            spot = spot.enter(rest.pop(0))
    return spot


def _problems(errors: Sequence[ErrorDetails], tree: Tree, explained: set[KeyPath]) -> list[Problem]:
    """Translate pydantic's errors. A key's type error is dropped if the key is in `explained` or failed a check."""
    located = [(details, _locate(details["loc"], tree.values)) for details in errors]
    explained = explained | {spot.path for details, spot in located if details["type"] == "value_error"}
    relevant = [(d, spot) for d, spot in located if d["type"] == "value_error" or spot.path not in explained]
    return [_problem(details, spot, tree) for details, spot in relevant]


def _problem(details: ErrorDetails, spot: _Spot, tree: Tree) -> Problem:
    """Translate one error of pydantic."""
    text, path = details["msg"], spot.path
    match details["type"]:
        case "value_error":
            text = str(details["ctx"]["error"])
            path = path or _mentioned(text, tree)
            is_placed = not spot.path or text.startswith(f"{dotted(spot.path)} ")  # names its key itself
            text = text if is_placed else f"{dotted(spot.path)}: {text}"
        case _ if spot.is_inexact:
            text = _unexpected(spot)
        case "finite_number" if spot.slot is not None:
            text = f"{dotted(path)}: expected {words(spot.slot)} that is finite, got {shown(spot.value)}"
        case "extra_forbidden":
            text = _unknown(spot)
        case "missing":
            text = _missing(spot)
        case "union_tag_invalid" | "union_tag_not_found" if spot.slot is not None and spot.slot.selector is not None:
            text, path = _unknown_member(spot)
        case _ if spot.slot is not None:
            text = _unexpected(spot)
    return Problem(tree.place(path), text)


def _unexpected(spot: _Spot) -> str:
    assert spot.slot is not None
    is_unquoted = str in kinds(spot.slot) and isinstance(spot.value, bool | int | float)
    hint = "; put it in quotes" if is_unquoted else ""
    return f"{dotted(spot.path)}: expected {words(spot.slot)}, got {shown(spot.value)}{hint}"


def _missing(spot: _Spot) -> str:
    assert spot.slot is not None
    if isinstance(spot.path[-1], int) and spot.outer is not None:  # a list that is too short
        return _unexpected(spot.outer)
    section = spot.slot.section(None)
    if section is not None and len(spot.path) == 1:
        needed = [name for name, field in section.model_fields.items() if field.is_required()]
        return f"the section {dotted(spot.path)} is missing; it needs {' and '.join(needed)}"
    what = "section" if len(spot.path) == 1 else "key"
    return f"the {what} {dotted(spot.path)} is missing; expected {words(spot.slot)}"


def _unknown(spot: _Spot) -> str:
    """Describe a key that its section does not have: suggest the closest key, or the sections that have it."""
    assert spot.outer is not None
    assert spot.outer.slot is not None
    section, word = spot.outer.slot.section(spot.outer.value), str(spot.path[-1])
    assert section is not None
    title = dotted(tuple(part for part in spot.outer.path if isinstance(part, str)))
    if spot.outer.path == ("algorithm",):
        title = str(spot.outer.value["name"])
    near = nearest(word, section.model_fields)
    elsewhere = [t for _, t, other in sections() if word in other.model_fields]
    there = f"{word} is a key of {', '.join(elsewhere)}" if elsewhere else ""
    if near:
        hint = f"did you mean {near}?" + (f" ({there})" if there else "")
    else:
        hint = there or f"valid keys: {', '.join(section.model_fields)}"
    return f"{dotted(spot.path)} is not {f'a key of {title}' if title else 'a section'}; {hint}"


def _unknown_member(spot: _Spot) -> tuple[str, KeyPath]:
    """Describe a missing or unknown selector, such as the name of an algorithm."""
    assert spot.slot is not None
    assert spot.slot.selector is not None
    key, valid = spot.slot.selector, names(spot.slot)
    if key not in spot.value:
        return f"the key {dotted((*spot.path, key))} is missing; expected one of {', '.join(valid)}", spot.path
    valid = [*valid, FORM] if spot.path == ("algorithm",) else valid
    path = (*spot.path, key)
    return f"{dotted(path)}: expected one of {', '.join(valid)}, got {shown(spot.value[key])}", path


def _mentioned(text: str, tree: Tree) -> KeyPath:
    """Return the longest recipe key that the message of a check mentions, so that the error has a line number."""
    mentioned = [tuple(word.split(".")) for word in KEY_IN_TEXT.findall(text)]
    known = [path for path in mentioned if path[0] in Recipe.model_fields and path in tree.places]
    return max(known, key=len, default=())
