"""Unchecked recipes: parse YAML into values with line numbers, merge recipes, apply overrides.

Reads no files and does not depend on the schema. YAML rules are in yaml_text.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.yaml_text import (
    LIMITS,
    MAX_DEPTH,
    SCALARS,
    TAG,
    TooLarge,
    compose,
    require_within,
    scalar_value,
)

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_PROBLEMS = 40  # shown at once
MAX_OVERRIDES = 1000
SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, or an override."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(slots=True)
class Tree:
    """Recipe values and their locations."""

    values: Any
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """Return the location of a value, or of the innermost enclosing mapping or list that has one."""
        return next(self.places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.places)

    def forget(self, path: KeyPath) -> None:
        """Remove the locations of `path` and everything inside it."""
        self.places = {p: place for p, place in self.places.items() if p[: len(path)] != path}


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem, printed as one line."""

    place: Place
    text: str

    def sort_key(self) -> tuple[bool, str, int, str]:
        return self.place.line is None, self.place.source, self.place.line or 0, self.text

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def refuse(problems: Sequence[Problem]) -> None:
    """Raise RecipeError with one line per problem, files first, sorted by line. Do nothing if there are none."""
    lines = list(dict.fromkeys(str(p) for p in sorted(problems, key=Problem.sort_key)))
    if len(lines) > MAX_PROBLEMS:
        lines[MAX_PROBLEMS:] = [f"and {len(lines) - MAX_PROBLEMS} more problems: fix these first"]
    if lines:
        raise RecipeError("\n".join(lines))


def dotted(path: KeyPath) -> str:
    return ".".join(shortened(str(part)) for part in path)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys. Lists are not flattened."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return result


def shortened(text: str) -> str:
    """Truncate a text for a message."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


# ---- from text


def parse(text: str, source: str) -> Tree:
    """Parse a text with one YAML document. An empty document has the value None. Raises RecipeError."""
    try:
        node = compose(text)
    except TooLarge as error:
        raise RecipeError(f"{source}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        hint = " (indent with spaces, not tabs)" if "\\t" in reason else ""
        place = Place(source, mark.line + 1 if mark else 1)
        raise RecipeError(f"{place}: this is not YAML: {reason}{hint}") from error
    except yaml.YAMLError as error:  # invalid character: no mark, but a position
        place = Place(source, text.count("\n", 0, getattr(error, "position", 0)) + 1)
        raise RecipeError(f"{place}: this is not YAML: it contains a control character") from error
    tree = Tree(None, {(): Place(source, 1)})
    if node is not None:
        refuse(_Reader(tree, lambda line: Place(source, line)).problems_of(node))
    return tree


def parse_value(text: str, place: Place) -> Any:
    """Parse the YAML value of an override. Raises RecipeError."""
    try:
        node = compose(text)
    except TooLarge as error:
        raise RecipeError(f"{place}: {error}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{place}: the value is not YAML: put text with special characters in quotes") from error
    tree = Tree(None)
    if node is not None:
        refuse(_Reader(tree, lambda line: place).problems_of(node))
    return tree.values


class _Reader:
    """Converts YAML nodes to values and records their lines. Collects all problems instead of stopping at the first."""

    def __init__(self, tree: Tree, at_line: Callable[[int], Place]) -> None:
        self.tree, self.at_line = tree, at_line
        self.problems: list[Problem] = []
        self._open: list[yaml.Node] = []  # enclosing nodes, to detect recursive aliases
        self._nodes = 0  # nodes read so far; aliases count every time

    def problems_of(self, node: yaml.Node) -> list[Problem]:
        """Fill the tree and return the problems. Raises RecipeError if aliases expand beyond the limits."""
        try:
            self.tree.values = self.read(node, (), node)
        except TooLarge as error:
            raise RecipeError(f"{self._place(node)}: {error}") from error
        return self.problems

    def read(self, node: yaml.Node, path: KeyPath, key: yaml.Node) -> Any:
        if path:
            self.tree.places[path] = self._place(key)
        if any(node is outer for outer in self._open):
            return self._wrong(key, f"{dotted(path)} contains itself")
        self._nodes += 1
        require_within(self._nodes, len(path))
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
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag != TAG + "str" or not isinstance(key, yaml.ScalarNode):
                self._wrong(key, f"a key must be text, got {_source_of(key)}: put it in quotes")
            elif unfit := unfit_character(key.value):
                self._wrong(key, f"the key {shortened(key.value)!r} contains {unfit}: remove it")
            elif key.value in pairs:
                self._wrong(
                    key, f"duplicate key {dotted((*path, key.value))}; first at {self._place(pairs[key.value][0])}"
                )
            else:
                pairs[key.value] = (key, value)
        return pairs

    def _scalar(self, node: yaml.Node) -> Any:
        kind = node.tag.removeprefix(TAG)
        if not isinstance(node, yaml.ScalarNode) or kind not in ("str", *SCALARS):
            return self._wrong(node, f"the YAML type {node.tag} cannot be used in a recipe")
        try:
            value = scalar_value(node.value, kind)
        except (KeyError, ValueError):
            return self._wrong(node, f"{shortened(node.value)!r} is not of the YAML type {kind}")
        if value != value:
            return self._wrong(node, "nan is not allowed")
        if isinstance(value, str) and (unfit := unfit_character(value)):
            return self._wrong(node, f"the text {shortened(value)!r} contains {unfit}: remove it")
        return value

    def _place(self, node: yaml.Node) -> Place:
        return self.at_line(node.start_mark.line + 1)

    def _wrong(self, node: yaml.Node, text: str) -> None:
        self.problems.append(Problem(self._place(node), text))


def _source_of(node: yaml.Node) -> str:
    return shortened(str(node.value)) if isinstance(node, yaml.ScalarNode) else "a list or mapping"


def unfit_character(text: str) -> str:
    """Return the name of a character that paths and files cannot store, or "". Quoted escapes can produce one."""
    if "\0" in text:
        return "a NUL character"
    return "half of a surrogate pair" if any("\ud800" <= c <= "\udfff" for c in text) else ""


# ---- from several sources


def merge(base: Tree, variant: Tree) -> Tree:
    """Merge the variant's mappings into the base. Other values and lists replace the base's.

    If the variant selects a different algorithm, the base's algorithm keys are dropped.
    """
    replaced: set[KeyPath] = set()
    values = _merge(base.values, variant.values, (), replaced)
    remaining = {p: at for p, at in base.places.items() if not any(p[:n] in replaced for n in range(len(p) + 1))}
    return Tree(values, remaining | variant.places)


def _merge(old: Any, new: Any, path: KeyPath, replaced: set[KeyPath]) -> Any:
    """Return the merged value and add the paths that the variant replaces to `replaced`."""
    is_fresh = path == ("algorithm",) and _renames(old, new)
    if isinstance(old, dict) and isinstance(new, dict) and not is_fresh:
        return old | {k: _merge(old.get(k), v, (*path, k), replaced) for k, v in new.items()}
    replaced.add(path)
    return new


def _renames(old: Any, new: Any) -> bool:
    return isinstance(old, dict) and isinstance(new, dict) and new.get("name", old.get("name")) != old.get("name")


def override(tree: Tree, words: Sequence[str]) -> None:
    """Apply `section.key=value` overrides to the tree, in order. Values are YAML; numbers in the path index lists.

    Raises RecipeError for malformed overrides, values that are not YAML, and list indices out of range.
    """
    if len(words) > MAX_OVERRIDES:
        raise RecipeError(f"{len(words):,} overrides, at most {MAX_OVERRIDES:,} are allowed: use a file")
    parsed = [_split(word) for word in words]
    # A new algorithm drops the keys of the old one, so it is applied first, regardless of the order.
    for path, value, place in sorted(parsed, key=lambda item: item[0] != ("algorithm", "name")):
        if path == ("algorithm", "name") and _renames(tree.values.get("algorithm"), {"name": value}):
            tree.forget(("algorithm",))
            tree.places[("algorithm",)] = place
            tree.values["algorithm"] = {}
        _put(tree, path, value, place)


def _split(word: str) -> tuple[KeyPath, Any, Place]:
    place = Place(f"override {shortened(word)}")
    key, equals, text = word.partition("=")
    path = tuple(key.split("."))
    if len(path) > MAX_DEPTH:
        raise RecipeError(f"{place}: nested more than {MAX_DEPTH} levels deep; {LIMITS}")
    if unfit := unfit_character(key):
        raise RecipeError(f"{place}: the key contains {unfit}: remove it")
    if not equals or not all(path):
        raise RecipeError(f"{place}: expected section.key=value")
    if not text.strip():
        name = shortened(key)
        raise RecipeError(
            f"{place}: the value is missing: write {name}=null for none, or {name}=\"''\" for an empty text"
        )
    return path, parse_value(text, place), place


def _put(tree: Tree, path: KeyPath, value: Any, place: Place) -> None:
    holder = tree.values
    real: KeyPath = ()  # with integers for list entries
    for part in path[:-1]:
        step = _step(holder, real, part, place)
        inner = holder.get(step) if isinstance(holder, dict) else holder[step]
        if not isinstance(inner, dict | list):  # replace a scalar or nothing, as in algorithm.old_decay.slope=.1
            inner = holder[step] = {}
            tree.places[(*real, step)] = place
        holder, real = inner, (*real, step)
    last = _step(holder, real, path[-1], place)
    tree.forget((*real, last))
    tree.places[(*real, last)] = place
    holder[last] = value


def _step(holder: Any, path: KeyPath, part: str | int, place: Place) -> Any:
    """Return `part` as a key of a mapping or an index of a list."""
    if isinstance(holder, dict):
        return part
    if not str(part).isdecimal() or int(part) >= len(holder):
        last = len(holder) - 1
        have = f"a list with entries 0 to {last}" if holder else "an empty list"
        raise RecipeError(f"{place}: {dotted(path)} is {have}: there is no entry {part}")
    return int(part)
