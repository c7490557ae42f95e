"""Recipes as trees before they are checked: YAML text to values that know their line, merging, overrides.

Pure: no file is read here and no key is known here. YAML is read by the 1.2 rules where 1.1 surprises: `1e-4` is a
number, `on`, `off`, `yes`, `no` and dates are text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from wfm_ds.errors import RecipeError

KeyPath: TypeAlias = tuple[str | int, ...]

TAG = "tag:yaml.org,2002:"
SCALARS = {  # what an unquoted scalar is, and the characters it may begin with
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^[-+]?[0-9][0-9_]{0,99}$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.nan|\.NaN)$"
        ),
        list("-+.0123456789"),
    ),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 -- PyYAML's interface


class _Dumper(yaml.SafeDumper):
    """Quotes a text that readers of YAML 1.1 or 1.2 would take for something else."""


for _name, (_pattern, _first) in SCALARS.items():
    _Loader.add_implicit_resolver(TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(TAG + _name, _pattern, _first)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    is_flat = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence(TAG + "seq", items, flow_style=is_flat)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML loses these rare line breaks in any style without escapes.
    style = '"' if set(text) & set("\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar(TAG + "str", text, style=style)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, or an override."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(slots=True)
class Tree:
    """Values, and where they were written."""

    values: Any
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """Of the value, or of the nearest mapping or list around it."""
        return next(self.places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.places)

    def forget(self, path: KeyPath) -> None:
        """Drop what is known of the places at and below `path`."""
        self.places = {p: place for p, place in self.places.items() if p[: len(path)] != path}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, as one line."""

    place: Place
    text: str

    def sort_key(self) -> tuple[bool, str, int, str]:
        return self.place.line is None, self.place.source, self.place.line or 0, self.text

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def refuse(problems: Sequence[Problem]) -> None:
    """Raise RecipeError with one line a problem, files before overrides, by line; nothing if there is no problem."""
    if problems:
        raise RecipeError("\n".join(dict.fromkeys(str(p) for p in sorted(problems, key=Problem.sort_key))))


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


# ---- from text


def parse(text: str, source: str) -> Tree:
    """The one YAML document of `text`. Raises RecipeError. An empty document has the value None."""
    try:
        node = _compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        hint = " (indent with spaces, not tabs)" if "\\t" in reason else ""
        place = Place(source, mark.line + 1 if mark else 1)
        raise RecipeError(f"{place}: this is not YAML: {reason}{hint}") from error
    except yaml.YAMLError as error:  # a character that YAML does not allow: no mark, but a position
        place = Place(source, text.count("\n", 0, getattr(error, "position", 0)) + 1)
        raise RecipeError(f"{place}: this is not YAML: it contains a control character") from error
    tree = Tree(None, {(): Place(source, 1)})
    if node is not None:
        refuse(_Reader(tree, lambda line: Place(source, line)).problems_of(node))
    return tree


def parse_value(text: str, place: Place) -> Any:
    """The YAML value of an override. Raises RecipeError."""
    try:
        node = _compose(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{place}: the value is not YAML; put text with special characters in quotes") from error
    tree = Tree(None)
    if node is not None:
        refuse(_Reader(tree, lambda line: place).problems_of(node))
    return tree.values


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


class _Reader:
    """Turns nodes into values, notes the line of each, and collects problems instead of stopping at the first."""

    def __init__(self, tree: Tree, at_line: Callable[[int], Place]) -> None:
        self.tree, self.at_line = tree, at_line
        self.problems: list[Problem] = []
        self._open: list[yaml.Node] = []  # an alias to one of these refers to itself

    def problems_of(self, node: yaml.Node) -> list[Problem]:
        """Fill the tree; what is wrong with the document."""
        self.tree.values = self.read(node, (), node)
        return self.problems

    def read(self, node: yaml.Node, path: KeyPath, key: yaml.Node) -> Any:
        if path:
            self.tree.places[path] = self._place(key)
        if any(node is outer for outer in self._open):
            return self._wrong(key, f"{dotted(path)} contains itself")
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
                pairs = self._pairs(node, path).items()
                return {name: self.read(value, (*path, name), k) for name, (k, value) in pairs}
            if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
                return [self.read(value, (*path, i), value) for i, value in enumerate(node.value)]
            return self._scalar(node)
        finally:
            self._open.pop()

    def _pairs(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag != TAG + "str" or not isinstance(key, yaml.ScalarNode):
                self._wrong(key, f"a key must be text, got {_source_of(key)}; put it in quotes if it is meant")
            elif key.value in own:
                self._wrong(
                    key, f"{dotted((*path, key.value))} is written twice; first at {self._place(own[key.value][0])}"
                )
            else:
                own[key.value] = (key, value)
        return own

    def _scalar(self, node: yaml.Node) -> Any:
        kind = node.tag.removeprefix(TAG)
        if not isinstance(node, yaml.ScalarNode) or kind not in ("str", *SCALARS):
            return self._wrong(node, f"the YAML type {node.tag} cannot be used in a recipe")
        try:
            value = _scalar_value(node.value, kind)
        except (KeyError, ValueError):
            return self._wrong(node, f"{node.value!r} is not of the YAML type {kind}")
        if value != value:
            return self._wrong(node, "nan is not a number to work with")
        return value

    def _place(self, node: yaml.Node) -> Place:
        return self.at_line(node.start_mark.line + 1)

    def _wrong(self, node: yaml.Node, text: str) -> None:
        self.problems.append(Problem(self._place(node), text))


def _source_of(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"


def _scalar_value(text: str, kind: str) -> str | bool | int | float | None:
    match kind:
        case "null":
            return None
        case "bool":
            return {"true": True, "false": False}[text.lower()]
        case "int":
            return int(text.replace("_", ""))
        case "float":
            return float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
        case _:
            return text


def to_yaml(values: Any) -> str:
    """Text that `parse` reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


# ---- from several sources


def merge(base: Tree, variant: Tree) -> Tree:
    """The base with the variant's mappings merged in; other values, lists too, replace the base's.

    A variant that names another algorithm gets none of the base algorithm's keys.
    """
    merged = Tree(base.values, dict(base.places))
    merged.values = _merge(merged, variant, base.values, variant.values, ())
    return merged


def _merge(into: Tree, variant: Tree, old: Any, new: Any, path: KeyPath) -> Any:
    is_fresh = path == ("algorithm",) and _renames(old, new)
    if isinstance(old, dict) and isinstance(new, dict) and not is_fresh:
        into.places[path] = variant.place(path)
        added = {k: _merge(into, variant, old.get(k), v, (*path, k)) for k, v in new.items()}
        return old | added
    into.forget(path)
    into.places |= {p: place for p, place in variant.places.items() if p[: len(path)] == path}
    return new


def _renames(old: Any, new: Any) -> bool:
    return isinstance(old, dict) and isinstance(new, dict) and new.get("name", old.get("name")) != old.get("name")


def override(tree: Tree, words: Sequence[str]) -> None:
    """Apply `section.key=value` words to the tree, in order. The value is YAML; a number in the path indexes a list.

    Raises RecipeError for words of another form, for values that are not YAML, and for entries that a list lacks.
    """
    parsed = [_split(word) for word in words]
    # A change of algorithm drops the keys of the old one, so it comes first: the order of the words does not matter.
    for path, value, place in sorted(parsed, key=lambda item: item[0] != ("algorithm", "name")):
        if path == ("algorithm", "name") and _renames(tree.values.get("algorithm"), {"name": value}):
            tree.forget(("algorithm",))
            tree.places[("algorithm",)] = place
            tree.values["algorithm"] = {}
        _put(tree, path, value, place)


def _split(word: str) -> tuple[KeyPath, Any, Place]:
    place = Place(f"override {word}")
    key, equals, text = word.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise RecipeError(f"{place}: expected section.key=value")
    if not text.strip():
        raise RecipeError(f"{place}: there is no value; write {key}=null for none, or {key}=\"''\" for an empty text")
    return path, parse_value(text, place), place


def _put(tree: Tree, path: KeyPath, value: Any, place: Place) -> None:
    holder = tree.values
    real: KeyPath = ()  # with numbers for list entries
    for part in path[:-1]:
        step = _step(holder, real, part, place)
        inner = holder.get(step) if isinstance(holder, dict) else holder[step]
        if not isinstance(inner, dict | list):  # algorithm.old_decay.slope=.1 where a word stood or nothing
            inner = holder[step] = {}
            tree.places[(*real, step)] = place
        holder, real = inner, (*real, step)
    last = _step(holder, real, path[-1], place)
    tree.forget((*real, last))
    tree.places[(*real, last)] = place
    holder[last] = value


def _step(holder: Any, path: KeyPath, part: str | int, place: Place) -> Any:
    """`part` as a key of a mapping or an index of a list."""
    if isinstance(holder, dict):
        return part
    if not str(part).isdecimal() or int(part) >= len(holder):
        last = len(holder) - 1
        have = f"has the entries 0 to {last}" if holder else "is empty"
        raise RecipeError(f"{place}: {dotted(path)} is a list that {have}, it has no {part}")
    return int(part)
