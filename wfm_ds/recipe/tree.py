"""Recipes before validation: parse YAML to values with line numbers, merge recipes, apply overrides.

Reads no files and does not depend on the schema. The YAML rules are in yaml_text.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.yaml_text import SCALAR_PATTERNS, YAML_TAG, compose_yaml, parse_scalar

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_PROBLEMS = 40  # shown at once
MAX_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Source of a recipe value: a line of a file, or a command-line override."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(slots=True)
class RecipeTree:
    """Unvalidated values of a recipe, with the source location of each key."""

    values: Any
    locations: dict[KeyPath, SourceLocation] = field(default_factory=dict)

    def locate(self, path: KeyPath) -> SourceLocation:
        """Return the source location of the value at `path`.

        If it has none, return the location of the innermost enclosing value that has one.
        """
        return next(self.locations[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.locations)

    def forget_locations(self, path: KeyPath) -> None:
        self.locations = {p: place for p, place in self.locations.items() if p[: len(path)] != path}


@dataclass(frozen=True, slots=True)
class RecipeProblem:
    location: SourceLocation
    text: str

    def sort_key(self) -> tuple[bool, str, int, str]:
        return self.location.line is None, self.location.source, self.location.line or 0, self.text

    def __str__(self) -> str:
        return f"{self.location}: {self.text}"


def raise_problems(problems: Sequence[RecipeProblem]) -> None:
    """Raise RecipeError with one line per problem, if there are any.

    Problems in files come first, ordered by line. Problems in overrides follow.
    """
    lines = list(dict.fromkeys(str(p) for p in sorted(problems, key=RecipeProblem.sort_key)))
    if len(lines) > MAX_PROBLEMS:
        lines[MAX_PROBLEMS:] = [f"and {len(lines) - MAX_PROBLEMS} more problems: fix these first"]
    if lines:
        raise RecipeError("\n".join(lines))


def join_key_path(path: KeyPath) -> str:
    return ".".join(shorten_text(str(part)) for part in path)


def flatten_keys(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: {"a": {"b": 1}} becomes {"a.b": 1}. Lists are kept as values."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= flatten_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return result


def shorten_text(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


# ---- from text


def parse_yaml(text: str, source: str) -> RecipeTree:
    """Parse one YAML document. An empty document has the value None.

    Raises RecipeError with line numbers if the text is invalid.
    """
    try:
        node = compose_yaml(text)
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        hint = " (indent with spaces, not tabs)" if "\\t" in reason else ""
        place = SourceLocation(source, mark.line + 1 if mark else 1)
        raise RecipeError(f"{place}: this is not YAML: {reason}{hint}") from error
    except yaml.YAMLError as error:  # invalid character: no mark, but a position
        place = SourceLocation(source, text.count("\n", 0, getattr(error, "position", 0)) + 1)
        raise RecipeError(f"{place}: this is not YAML: it contains a control character") from error
    tree = RecipeTree(None, {(): SourceLocation(source, 1)})
    if node is not None:
        raise_problems(_NodeReader(tree, lambda line: SourceLocation(source, line)).read_document(node))
    return tree


def parse_override_value(text: str, place: SourceLocation) -> Any:
    """Parse the YAML value of a `section.key=value` override. Raises RecipeError if it is not valid YAML."""
    try:
        node = compose_yaml(text)
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{place}: the value is not YAML: put text with special characters in quotes") from error
    tree = RecipeTree(None)
    if node is not None:
        raise_problems(_NodeReader(tree, lambda line: place).read_document(node))
    return tree.values


class _NodeReader:
    """Converts YAML nodes to Python values and records their lines. Collects all problems before failing."""

    def __init__(self, tree: RecipeTree, at_line: Callable[[int], SourceLocation]) -> None:
        self.tree, self.locate_line = tree, at_line
        self.problems: list[RecipeProblem] = []

    def read_document(self, node: yaml.Node) -> list[RecipeProblem]:
        """Store the values and locations in the tree, and return the problems.

        Raises RecipeError if an alias contains itself.
        """
        try:
            self.tree.values = self.read_node(node, (), node)
        except RecursionError as error:
            raise RecipeError(f"{self._locate_node(node)}: an alias contains itself") from error
        return self.problems

    def read_node(self, node: yaml.Node, path: KeyPath, key: yaml.Node) -> Any:
        if path:
            self.tree.locations[path] = self._locate_node(key)
        if isinstance(node, yaml.MappingNode) and node.tag == YAML_TAG + "map":
            pairs = self._read_pairs(node, path).items()
            return {name: self.read_node(value, (*path, name), k) for name, (k, value) in pairs}
        if isinstance(node, yaml.SequenceNode) and node.tag == YAML_TAG + "seq":
            return [self.read_node(value, (*path, i), value) for i, value in enumerate(node.value)]
        return self._read_scalar(node)

    def _read_pairs(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag != YAML_TAG + "str" or not isinstance(key, yaml.ScalarNode):
                self._add_problem(key, f"a key must be text, got {_describe_key(key)}: put it in quotes")
            elif key.value in pairs:
                self._add_problem(
                    key,
                    f"duplicate key {join_key_path((*path, key.value))}; first at "
                    f"{self._locate_node(pairs[key.value][0])}",
                )
            else:
                pairs[key.value] = (key, value)
        return pairs

    def _read_scalar(self, node: yaml.Node) -> Any:
        kind = node.tag.removeprefix(YAML_TAG)
        if not isinstance(node, yaml.ScalarNode) or kind not in ("str", *SCALAR_PATTERNS):
            return self._add_problem(node, f"the YAML type {node.tag} cannot be used in a recipe")
        try:
            value = parse_scalar(node.value, kind)
        except (KeyError, ValueError):
            return self._add_problem(node, f"{shorten_text(node.value)!r} is not of the YAML type {kind}")
        if value != value:
            return self._add_problem(node, "nan is not allowed")
        return value

    def _locate_node(self, node: yaml.Node) -> SourceLocation:
        return self.locate_line(node.start_mark.line + 1)

    def _add_problem(self, node: yaml.Node, text: str) -> None:
        self.problems.append(RecipeProblem(self._locate_node(node), text))


def _describe_key(node: yaml.Node) -> str:
    return shorten_text(str(node.value)) if isinstance(node, yaml.ScalarNode) else "a list or mapping"


# ---- from several sources


def merge_trees(base: RecipeTree, variant: RecipeTree) -> RecipeTree:
    """Merge `variant` over `base`: mappings are merged recursively; lists and scalars are replaced.

    If the variant selects a different algorithm, all algorithm keys of the base are dropped.
    """
    replaced: set[KeyPath] = set()
    values = _merge_values(base.values, variant.values, (), replaced)
    remaining = {p: at for p, at in base.locations.items() if not any(p[:n] in replaced for n in range(len(p) + 1))}
    return RecipeTree(values, remaining | variant.locations)


def _merge_values(old: Any, new: Any, path: KeyPath, replaced: set[KeyPath]) -> Any:
    """Merge `new` over `old` and add the path of each replaced base value to the set `replaced`."""
    is_fresh = path == ("algorithm",) and _changes_algorithm(old, new)
    if isinstance(old, dict) and isinstance(new, dict) and not is_fresh:
        return old | {k: _merge_values(old.get(k), v, (*path, k), replaced) for k, v in new.items()}
    replaced.add(path)
    return new


def _changes_algorithm(old: Any, new: Any) -> bool:
    return isinstance(old, dict) and isinstance(new, dict) and new.get("name", old.get("name")) != old.get("name")


def apply_overrides(tree: RecipeTree, words: Sequence[str]) -> None:
    """Apply `section.key=value` overrides to the tree, in order.

    Values are YAML. A number in the path is a list index. Raises RecipeError for malformed overrides, values that are
    not YAML, and list indices out of range.
    """
    parsed = [_parse_override(word) for word in words]
    # A new algorithm drops the keys of the old one, so it is applied first, regardless of the order.
    for path, value, place in sorted(parsed, key=lambda item: item[0] != ("algorithm", "name")):
        if path == ("algorithm", "name") and _changes_algorithm(tree.values.get("algorithm"), {"name": value}):
            tree.forget_locations(("algorithm",))
            tree.locations[("algorithm",)] = place
            tree.values["algorithm"] = {}
        _set_value(tree, path, value, place)


def _parse_override(word: str) -> tuple[KeyPath, Any, SourceLocation]:
    place = SourceLocation(f"override {shorten_text(word)}")
    key, equals, text = word.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise RecipeError(f"{place}: expected section.key=value")
    if not text.strip():
        name = shorten_text(key)
        raise RecipeError(
            f"{place}: the value is missing: write {name}=null for none, or {name}=\"''\" for an empty text"
        )
    return path, parse_override_value(text, place), place


def _set_value(tree: RecipeTree, path: KeyPath, value: Any, place: SourceLocation) -> None:
    holder = tree.values
    real: KeyPath = ()  # path so far, with list indices as integers
    for part in path[:-1]:
        step = _resolve_key(holder, real, part, place)
        inner = holder.get(step) if isinstance(holder, dict) else holder[step]
        if not isinstance(
            inner, dict | list
        ):  # turn a missing or scalar value into a mapping, as in algorithm.old_decay.slope=.1
            inner = holder[step] = {}
            tree.locations[(*real, step)] = place
        holder, real = inner, (*real, step)
    last = _resolve_key(holder, real, path[-1], place)
    tree.forget_locations((*real, last))
    tree.locations[(*real, last)] = place
    holder[last] = value


def _resolve_key(holder: Any, path: KeyPath, part: str | int, place: SourceLocation) -> Any:
    """Return `part` as a mapping key or a list index. Raises RecipeError if a list has no such index."""
    if isinstance(holder, dict):
        return part
    if not str(part).isdecimal() or int(part) >= len(holder):
        last = len(holder) - 1
        have = f"a list with entries 0 to {last}" if holder else "an empty list"
        raise RecipeError(f"{place}: {join_key_path(path)} is {have}: there is no entry {part}")
    return int(part)
