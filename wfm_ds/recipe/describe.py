"""Descriptions of the recipe schema for error messages and the reference page."""

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
from wfm_ds.recipe.algorithms import user_settings
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import KeyPath, dotted
from wfm_ds.user_class import FORM

BOUNDS = {annotated_types.Gt: ("gt", ">"), annotated_types.Ge: ("ge", ">=")} | {
    annotated_types.Lt: ("lt", "<"),
    annotated_types.Le: ("le", "<="),
}
SIMPLE = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Slot:
    """A node of the schema: a type, its constraints, and the key that selects a member of a union."""

    type: Any
    constraints: tuple[Any, ...] = ()
    selector: str | None = None

    @classmethod
    def of(cls, annotation: Any, constraints: Sequence[Any] = ()) -> Slot:
        """Build the node of a type annotation, unwrapping Annotated."""
        selector = None
        while get_origin(annotation) is Annotated:
            annotation, *extra = get_args(annotation)
            for item in extra:
                constraints = [*constraints, *(item.metadata if isinstance(item, FieldInfo) else [item])]
                selector = str(item.discriminator) if isinstance(item, FieldInfo) and item.discriminator else selector
        return cls(annotation, tuple(constraints), selector)

    @classmethod
    def of_field(cls, field: FieldInfo) -> Slot:
        slot = cls.of(field.annotation, field.metadata)
        return cls(slot.type, slot.constraints, str(field.discriminator) if field.discriminator else slot.selector)

    def members(self) -> list[Slot]:
        """Return the members of a union without None, or [self] if the type is not a union."""
        if get_origin(self.type) not in (Union, types.UnionType):
            return [self]
        inner = (Slot.of(m, self.constraints) for m in get_args(self.type) if m is not types.NoneType)
        return [leaf for member in inner for leaf in member.members()]

    def own_section(self, value: Any) -> type[BaseModel] | None:
        """Return the settings class of the user's algorithm that `value` names, or None if it cannot be imported."""
        try:
            return user_settings(value) if self.selector == "name" else None
        except RecipeError:
            return None

    def section(self, value: Any) -> type[BaseModel] | None:
        """Return the section class that the mapping `value` must match, or None if there is none."""
        sections = [m.type for m in self.members() if isinstance(m.type, type) and issubclass(m.type, BaseModel)]
        if own := self.own_section(value):
            return own
        if self.selector is not None:
            name = value.get(self.selector) if isinstance(value, dict) else None
            return next((s for s in sections if name in choices(s, self.selector)), None)
        return sections[0] if sections else None

    def find_union_member(self, tag: str | int) -> Slot | None:
        """Return the union member with a tag of pydantic's error location: the value of the selector key, or a Tag.

        None for unions without tags.
        """
        for member in self.members():
            tags = [item.tag for item in member.constraints if isinstance(item, Tag)]
            if self.selector is not None:
                tags += choices(member.type, self.selector)
            if tag in tags:
                return member
        return None

    def inner(self, key: str | int, value: Any) -> Slot | None:
        """Return the node of an entry of `value`, or None for keys that are not in the schema."""
        section = self.section(value)
        if section is not None:
            field = section.model_fields.get(str(key))
            return None if field is None else Slot.of_field(field)
        for member in self.members():
            items, origin = get_args(member.type), get_origin(member.type)
            if origin is list:
                return Slot.of(items[0])
            if origin is tuple and isinstance(key, int) and key < len(items):
                return Slot.of(items[key])
            if origin is dict:
                return Slot.of(items[1])
        return None


ROOT = Slot(Recipe)


def choices(section: type[BaseModel], key: str) -> tuple[Any, ...]:
    """Return the allowed literals of a section's key, such as the name of an algorithm."""
    return get_args(section.model_fields[key].annotation)


def words(slot: Slot) -> str:
    """Describe the allowed values, to follow "expected": "a whole number > 0", "one of a, b, c"."""
    if slot.selector is not None:
        return f"a mapping with {slot.selector}: {' or '.join(names(slot))}"
    return " or ".join(_member_words(member) for member in slot.members())


def names(slot: Slot) -> list[str]:
    """Return all values of the selector key, such as the names of all algorithms."""
    assert slot.selector is not None
    return [str(name) for member in slot.members() for name in choices(member.type, slot.selector)]


def _member_words(slot: Slot) -> str:
    origin, items = get_origin(slot.type), get_args(slot.type)
    if origin is Literal:
        return f"one of {', '.join(map(str, items))}" if len(items) > 1 else str(items[0])
    if origin is list:
        at_least = [c.min_length for c in slot.constraints if isinstance(c, annotated_types.MinLen)]
        return f"a list{f' of at least {at_least[0]}' if at_least else ''}, each {words(Slot.of(items[0]))}"
    if origin is tuple:
        each = list(dict.fromkeys(words(Slot.of(item)) for item in items))
        return f"a list of {len(items)}, {'each ' if len(each) == 1 else ''}{', '.join(each)}"
    if isinstance(slot.type, type) and issubclass(slot.type, BaseModel):
        return f"a mapping with keys of {', '.join(slot.type.model_fields)}"
    if origin is dict:
        return "a mapping"
    if any(getattr(c, "pattern", None) for c in slot.constraints):
        return FORM
    bounds = [f"{BOUNDS[type(c)][1]} {getattr(c, BOUNDS[type(c)][0])}" for c in slot.constraints if type(c) in BOUNDS]
    return " ".join([SIMPLE.get(slot.type, "anything"), " and ".join(bounds)]).strip()


def kinds(slot: Slot) -> set[type]:
    """Return the Python types allowed for a scalar; `object` for any."""
    scalar_kinds: set[type] = set()
    for member in slot.members():
        if get_origin(member.type) is Literal:
            scalar_kinds |= {type(item) for item in get_args(member.type)}
        elif member.type is Any:
            scalar_kinds.add(object)
        elif isinstance(member.type, type):
            scalar_kinds.add(str if member.type is Path else member.type)
    return scalar_kinds


def shown(value: Any) -> str:
    """Format a value for a message, close to how the user wrote it."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"a mapping ({', '.join(map(str, value)) or 'empty'})"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def nearest(word: str, valid: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)), None)


def sections() -> Iterator[tuple[KeyPath, str, type[BaseModel]]]:
    """Yield (path, title, class) of every section in the schema, in schema order, parents first.

    The title is the dotted path, or the name of an algorithm. List entries have the path part N.
    """
    for name, field in Recipe.model_fields.items():
        yield from _sections_in(Slot.of_field(field), (name,))


def _sections_in(slot: Slot, path: KeyPath) -> Iterator[tuple[KeyPath, str, type[BaseModel]]]:
    for member in slot.members():
        if isinstance(member.type, type) and issubclass(member.type, BaseModel):
            title = str(choices(member.type, slot.selector)[0]) if slot.selector else dotted(path)
            yield path, title, member.type
            for key, field in member.type.model_fields.items():
                yield from _sections_in(Slot.of_field(field), (*path, key))
        elif get_origin(member.type) is list:
            yield from _sections_in(Slot.of(get_args(member.type)[0]), (*path, "N"))
