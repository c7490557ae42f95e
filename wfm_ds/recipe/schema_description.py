"""Describe the recipe schema, for error messages and the page docs/recipes.md; explain validation errors."""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms import find_user_settings
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.section import CLASS_PATTERN
from wfm_ds.recipe.tree import KeyPath, RecipeProblem, RecipeTree, join_key_path, shorten_text
from wfm_ds.user_class import CLASS_PATH_FORM

BOUND_SYMBOLS: dict[Any, tuple[str, str]] = {
    annotated_types.Gt: ("gt", ">"),
    annotated_types.Ge: ("ge", ">="),
    annotated_types.Lt: ("lt", "<"),
    annotated_types.Le: ("le", "<="),
}
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
MAX_SHOWN_CHARACTERS = 60
MAX_INTEGER = 2**63 - 1
KEY_IN_TEXT = re.compile(r"[a-z_]+(?:\.[a-z_]+)*")


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """The type of a recipe key, entry or section, and the constraints on its values.

    discriminator: for a union, the key that selects the member, such as `name` for algorithms.
    """

    type: Any
    constraints: tuple[Any, ...] = ()
    discriminator: str | None = None

    @classmethod
    def from_annotation(cls, annotation: Any, constraints: Sequence[Any] = ()) -> SchemaNode:
        """Return the node of a type annotation, without Annotated."""
        selector = None
        while get_origin(annotation) is Annotated:
            annotation, *extra = get_args(annotation)
            for item in extra:
                constraints = [*constraints, *(item.metadata if isinstance(item, FieldInfo) else [item])]
                selector = str(item.discriminator) if isinstance(item, FieldInfo) and item.discriminator else selector
        return cls(annotation, tuple(constraints), selector)

    @classmethod
    def from_field(cls, field: FieldInfo) -> SchemaNode:
        slot = cls.from_annotation(field.annotation, field.metadata)
        return cls(slot.type, slot.constraints, str(field.discriminator) if field.discriminator else slot.discriminator)

    def union_members(self) -> list[SchemaNode]:
        """Return the members of a union except None, flattened. For other types, return [self]."""
        if get_origin(self.type) not in (Union, types.UnionType):
            return [self]
        inner = (
            SchemaNode.from_annotation(m, self.constraints) for m in get_args(self.type) if m is not types.NoneType
        )
        return [leaf for member in inner for leaf in member.union_members()]

    def user_section(self, value: Any) -> type[BaseModel] | None:
        """Return the settings class of a user's algorithm, or None for other sections and failed imports."""
        try:
            return find_user_settings(value) if self.discriminator == "name" else None
        except RecipeError:
            return None

    def section_class(self, value: Any) -> type[BaseModel] | None:
        """Return the Section class that validates the mapping `value`, or None if this is not a section."""
        sections = [m.type for m in self.union_members() if isinstance(m.type, type) and issubclass(m.type, BaseModel)]
        if own := self.user_section(value):
            return own
        if self.discriminator is not None:
            name = value.get(self.discriminator) if isinstance(value, dict) else None
            return next((s for s in sections if name in discriminator_values(s, self.discriminator)), None)
        return sections[0] if sections else None

    def find_union_member(self, tag: str | int) -> SchemaNode | None:
        """Return the union member for a tag in a pydantic error's `loc`, or None if no member has it.

        The tag is the value of the selector key, such as the name of an algorithm, or a pydantic Tag.
        """
        for member in self.union_members():
            tags = [item.tag for item in member.constraints if isinstance(item, Tag)]
            if self.discriminator is not None:
                tags += discriminator_values(member.type, self.discriminator)
            if tag in tags:
                return member
        return None

    def child(self, key: str | int, value: Any) -> SchemaNode | None:
        """Return the schema of one entry of this section, list or mapping. Returns None if the entry is unknown.

        key: key or list index of the entry. value: all values of this section, list or mapping.
        """
        section = self.section_class(value)
        if section is not None:
            field = section.model_fields.get(str(key))
            return None if field is None else SchemaNode.from_field(field)
        for member in self.union_members():
            items, origin = get_args(member.type), get_origin(member.type)
            if origin is list:
                return SchemaNode.from_annotation(items[0])
            if origin is tuple and isinstance(key, int) and key < len(items):
                return SchemaNode.from_annotation(items[key])
            if origin is dict:
                return SchemaNode.from_annotation(items[1])
        return None


SCHEMA_ROOT = SchemaNode(Recipe)


def discriminator_values(section: type[BaseModel], key: str) -> tuple[Any, ...]:
    """Return the allowed values of a section's selector key, such as the name of an algorithm."""
    return get_args(section.model_fields[key].annotation)


def describe_type(slot: SchemaNode) -> str:
    """Describe the allowed values in words that can follow "expected": "a whole number > 0" or "one of a, b, c"."""
    if slot.discriminator is not None:
        return f"a mapping with {slot.discriminator}: {' or '.join(member_names(slot))}"
    return " or ".join(_describe_member(member) for member in slot.union_members())


def member_names(slot: SchemaNode) -> list[str]:
    """Return all values of a union's selector key, such as the names of all algorithms."""
    assert slot.discriminator is not None
    return [str(name) for m in slot.union_members() for name in discriminator_values(m.type, slot.discriminator)]


def _describe_member(slot: SchemaNode) -> str:
    origin, items = get_origin(slot.type), get_args(slot.type)
    if origin is Literal:
        return f"one of {', '.join(map(str, items))}" if len(items) > 1 else str(items[0])
    if origin is list:
        at_least = [c.min_length for c in slot.constraints if isinstance(c, annotated_types.MinLen)]
        each = describe_type(SchemaNode.from_annotation(items[0]))
        return f"a list{f' of at least {at_least[0]}' if at_least else ''}, each {each}"
    if origin is tuple:
        kinds = list(dict.fromkeys(describe_type(SchemaNode.from_annotation(item)) for item in items))
        return f"a list of {len(items)}, {'each ' if len(kinds) == 1 else ''}{', '.join(kinds)}"
    if isinstance(slot.type, type) and issubclass(slot.type, BaseModel):
        return f"a mapping with keys of {', '.join(slot.type.model_fields)}"
    if origin is dict:
        return "a mapping"
    if any(getattr(c, "pattern", None) == CLASS_PATTERN for c in slot.constraints):
        return CLASS_PATH_FORM
    limits = [(item, *BOUND_SYMBOLS[type(item)]) for item in slot.constraints if type(item) in BOUND_SYMBOLS]
    bounds = [f"{symbol} {getattr(item, name)}" for item, name, symbol in limits]
    return " ".join([TYPE_NAMES.get(slot.type, "anything"), " and ".join(bounds)]).strip()


def scalar_types(slot: SchemaNode) -> set[type]:
    """Return the Python types allowed for a scalar value. `object` stands for any type."""
    scalar_kinds: set[type] = set()
    for member in slot.union_members():
        if get_origin(member.type) is Literal:
            scalar_kinds |= {type(item) for item in get_args(member.type)}
        elif member.type is Any:
            scalar_kinds.add(object)
        elif isinstance(member.type, type):
            scalar_kinds.add(str if member.type is Path else member.type)
    return scalar_kinds


def format_value(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"a mapping ({shorten_text(', '.join(map(str, value)), MAX_SHOWN_CHARACTERS) or 'empty'})"
    return shorten_text(repr(value), MAX_SHOWN_CHARACTERS)


def iterate_sections() -> Iterator[tuple[KeyPath, str, type[BaseModel]]]:
    """Yield (key path, title, Section class) of every section in schema order, parents before children.

    title: the dotted path, or the value of the selector key, such as the name of an algorithm. N in a key path stands
    for any list index.
    """
    for name, field in Recipe.model_fields.items():
        yield from _iterate_node_sections(SchemaNode.from_field(field), (name,))


def _iterate_node_sections(slot: SchemaNode, path: KeyPath) -> Iterator[tuple[KeyPath, str, type[BaseModel]]]:
    for member in slot.union_members():
        if isinstance(member.type, type) and issubclass(member.type, BaseModel):
            name = slot.discriminator and discriminator_values(member.type, slot.discriminator)[0]
            title = str(name) if name else join_key_path(path)
            yield path, title, member.type
            for key, field in member.type.model_fields.items():
                yield from _iterate_node_sections(SchemaNode.from_field(field), (*path, key))
        elif get_origin(member.type) is list:
            yield from _iterate_node_sections(SchemaNode.from_annotation(get_args(member.type)[0]), (*path, "N"))


# ---- messages for validation errors


def find_misread_values(slot: SchemaNode, value: Any, path: KeyPath) -> list[tuple[KeyPath, str]]:
    """Return (key path, message) for each value that pydantic would silently convert or accept, such as true for 1."""
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        inner = [(key, entry, slot.child(key, value)) for key, entry in entries]
        found = [find_misread_values(node, entry, (*path, key)) for key, entry, node in inner if node is not None]
        return [misread for misreads in found for misread in misreads]
    allowed = scalar_types(slot)
    is_whole = isinstance(value, int | float) and int in allowed and float not in allowed
    if is_whole and MAX_INTEGER < abs(value) < math.inf:
        expected = f"{describe_type(slot)}, at most 2**63 - 1"
        return [(path, f"{join_key_path(path)}: expected {expected}, got {format_value(value)}")]
    is_flag_as_number = isinstance(value, bool) and bool not in allowed and bool(allowed & {int, float})
    is_text_as_number = isinstance(value, str) and bool(allowed) and allowed <= {int, float}
    if is_flag_as_number or is_text_as_number:
        return [(path, _describe_unexpected_value(_ErrorLocation(path, slot, value, None)))]
    return []


@dataclass(frozen=True, slots=True)
class _ErrorLocation:
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


def translate_errors(errors: Sequence[ErrorDetails], tree: RecipeTree, explained: set[KeyPath]) -> list[RecipeProblem]:
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
            text, key = str(details["ctx"]["error"]), join_key_path(path)
            text = text if not key or text.startswith(f"{key} ") else f"{key}: {text}"  # name the key once
            path = path or _find_mentioned_key(text, tree)
        case _ if spot.is_inexact:
            text = _describe_unexpected_value(spot)
        case "finite_number" if spot.node is not None:
            expected = f"{describe_type(spot.node)} that is finite"
            text = f"{join_key_path(path)}: expected {expected}, got {format_value(spot.value)}"
        case "extra_forbidden":
            text = _describe_unknown_key(spot)
        case "missing":
            text = _describe_missing_key(spot)
        case "union_tag_invalid" | "union_tag_not_found" if spot.node and spot.node.discriminator:
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
    assert spot.parent is not None
    assert spot.parent.node is not None
    section, word = spot.parent.node.section_class(spot.parent.value), str(spot.path[-1])
    assert section is not None
    title = join_key_path(tuple(part for part in spot.parent.path if isinstance(part, str)))
    if spot.parent.path == ("algorithm",):
        title = str(spot.parent.value["name"])
    near = difflib.get_close_matches(word, section.model_fields, n=1)
    elsewhere = [t for _, t, other in iterate_sections() if word in other.model_fields]
    there = f"{word} is a key of {', '.join(elsewhere)}" if elsewhere else ""
    if near:
        hint = f"did you mean {near[0]}?" + (f" ({there})" if there else "")
    else:
        hint = there or f"valid keys: {', '.join(section.model_fields)}"
    return f"{join_key_path(spot.path)} is not {f'a key of {title}' if title else 'a section'}; {hint}"


def _describe_unknown_name(spot: _ErrorLocation) -> tuple[str, KeyPath]:
    assert spot.node is not None
    assert spot.node.discriminator is not None
    key, valid = spot.node.discriminator, member_names(spot.node)
    if key not in spot.value:
        return f"the key {join_key_path((*spot.path, key))} is missing; expected one of {', '.join(valid)}", spot.path
    valid = [*valid, CLASS_PATH_FORM] if spot.path == ("algorithm",) else valid
    path = (*spot.path, key)
    return f"{join_key_path(path)}: expected one of {', '.join(valid)}, got {format_value(spot.value[key])}", path


def _find_mentioned_key(text: str, tree: RecipeTree) -> KeyPath:
    mentioned = [tuple(word.split(".")) for word in KEY_IN_TEXT.findall(text)]
    known = [path for path in mentioned if path[0] in Recipe.model_fields and path in tree.locations]
    return max(known, key=len, default=())
