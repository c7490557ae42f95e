"""Describe the recipe schema for error messages and the reference page docs/recipes.md."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms import find_user_settings
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import KeyPath, join_key_path
from wfm_ds.user_class import CLASS_PATH_FORM

BOUND_SYMBOLS = {annotated_types.Gt: ("gt", ">"), annotated_types.Ge: ("ge", ">=")} | {
    annotated_types.Lt: ("lt", "<"),
    annotated_types.Le: ("le", "<="),
}
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
MAX_SHOWN_CHARACTERS = 60


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
        """Build the node of a type annotation, unwrapping Annotated."""
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
        """Return the node of the entry `key`. value: the section, list or mapping.

        Returns None if the schema has no such entry.
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
    return [
        str(name) for member in slot.union_members() for name in discriminator_values(member.type, slot.discriminator)
    ]


def _describe_member(slot: SchemaNode) -> str:
    origin, items = get_origin(slot.type), get_args(slot.type)
    if origin is Literal:
        return f"one of {', '.join(map(str, items))}" if len(items) > 1 else str(items[0])
    if origin is list:
        at_least = [c.min_length for c in slot.constraints if isinstance(c, annotated_types.MinLen)]
        return (
            f"a list{f' of at least {at_least[0]}' if at_least else ''}, each "
            f"{describe_type(SchemaNode.from_annotation(items[0]))}"
        )
    if origin is tuple:
        each = list(dict.fromkeys(describe_type(SchemaNode.from_annotation(item)) for item in items))
        return f"a list of {len(items)}, {'each ' if len(each) == 1 else ''}{', '.join(each)}"
    if isinstance(slot.type, type) and issubclass(slot.type, BaseModel):
        return f"a mapping with keys of {', '.join(slot.type.model_fields)}"
    if origin is dict:
        return "a mapping"
    if any(getattr(c, "pattern", None) for c in slot.constraints):
        return CLASS_PATH_FORM
    bounds = [
        f"{BOUND_SYMBOLS[type(c)][1]} {getattr(c, BOUND_SYMBOLS[type(c)][0])}"
        for c in slot.constraints
        if type(c) in BOUND_SYMBOLS
    ]
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
    """Format a value for a message, similar to how the user wrote it in YAML."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"a mapping ({', '.join(map(str, value)) or 'empty'})"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "..."


def closest_match(word: str, valid: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)), None)


def iterate_sections() -> Iterator[tuple[KeyPath, str, type[BaseModel]]]:
    """Yield (key path, title, Section class) of every section in schema order, parents before children.

    title: the dotted path, or the value of the selector key, such as the name of an algorithm. In key paths, the text N
    stands for any index of a list.
    """
    for name, field in Recipe.model_fields.items():
        yield from _iterate_node_sections(SchemaNode.from_field(field), (name,))


def _iterate_node_sections(slot: SchemaNode, path: KeyPath) -> Iterator[tuple[KeyPath, str, type[BaseModel]]]:
    for member in slot.union_members():
        if isinstance(member.type, type) and issubclass(member.type, BaseModel):
            title = (
                str(discriminator_values(member.type, slot.discriminator)[0])
                if slot.discriminator
                else join_key_path(path)
            )
            yield path, title, member.type
            for key, field in member.type.model_fields.items():
                yield from _iterate_node_sections(SchemaNode.from_field(field), (*path, key))
        elif get_origin(member.type) is list:
            yield from _iterate_node_sections(SchemaNode.from_annotation(get_args(member.type)[0]), (*path, "N"))
