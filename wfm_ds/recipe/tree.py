"""Recipes before validation: parse YAML with line numbers, merge recipes, apply overrides and write YAML.

Where YAML 1.1 would surprise users, scalars follow YAML 1.2: `1e-4` is a number; `on`, `off`, `yes`, `no` and dates are
text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from wfm_ds.errors import RecipeError

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_PROBLEMS = 40  # shown at once
MAX_SHOWN_CHARACTERS = 200
MAX_CHARACTERS = 1 << 20
YAML_TAG = "tag:yaml.org,2002:"
SCALAR_PATTERNS = {  # {YAML type: (pattern of unquoted scalars, their possible first characters)}
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


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Origin of a recipe value: a line of a file, or a command-line override."""

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
        """Return the source location of the value at `path`, or of the innermost enclosing value that has one."""
        return next(self.locations[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.locations)

    def forget_locations(self, path: KeyPath) -> None:
        self.locations = {p: place for p, place in self.locations.items() if p[: len(path)] != path}


@dataclass(frozen=True, slots=True)
class RecipeProblem:
    location: SourceLocation
    text: str

    def __str__(self) -> str:
        return f"{self.location}: {self.text}"


def raise_problems(problems: Sequence[RecipeProblem]) -> None:
    """Raise RecipeError with one line per problem, if there are any: problems in files by line, then in overrides."""
    places = [(p.location.line is None, p.location.source, p.location.line or 0, p.text, str(p)) for p in problems]
    lines = list(dict.fromkeys(line for *_, line in sorted(places)))
    if len(lines) > MAX_PROBLEMS:
        lines[MAX_PROBLEMS:] = [f"and {len(lines) - MAX_PROBLEMS} more problems: fix these first"]
    if lines:
        raise RecipeError("\n".join(lines))


def join_key_path(path: KeyPath) -> str:
    return ".".join(shorten_text(str(part)) for part in path)


def flatten_keys(values: Mapping[str, Any], prefix: str = "", *, whole: Collection[str] = ()) -> dict[str, Any]:
    """Flatten nested mappings: {"a": {"b": 1}} becomes {"a.b": 1}. Lists and the mappings in `whole` are kept."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        is_flat = not isinstance(value, Mapping) or key in whole
        result |= {key: value} if is_flat else flatten_keys(value, f"{key}.", whole=whole)
    return result


def shorten_text(text: str, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


# ---- YAML


class _RecipeLoader(yaml.SafeLoader):
    """YAML loader with the scalar rules of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 -- PyYAML's interface


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes strings that YAML 1.1 or 1.2 would parse as a number, boolean, date or null."""


for _name, (_pattern, _first) in SCALAR_PATTERNS.items():
    _RecipeLoader.add_implicit_resolver(YAML_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(YAML_TAG + _name, _pattern, _first)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    is_flat = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence(YAML_TAG + "seq", items, flow_style=is_flat)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # Unless double-quoted, PyYAML loses these rare line breaks.
    style = '"' if set(text) & set("\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar(YAML_TAG + "str", text, style=style)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_text)


def compose_yaml(text: str, source: object) -> yaml.Node | None:
    """Return the root node of a YAML document, or None if the text is empty.

    Raises RecipeError if the text is too long or nested too deeply, and yaml.YAMLError if it is not one valid document.
    """
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(f"{source}: a recipe has at most {MAX_CHARACTERS:,} characters")
    loader = _RecipeLoader(text)
    try:
        return loader.get_single_node()
    except RecursionError as error:
        raise RecipeError(f"{source}: nested too deeply") from error
    finally:
        loader.dispose()


def parse_scalar(text: str, kind: str) -> str | bool | int | float | None:
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
    """Return `values` as YAML that parse_yaml reads back unchanged."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _InlineDumper(_Dumper):
    """YAML dumper that writes everything on one line."""


_InlineDumper.add_representer(list, yaml.SafeDumper.represent_list)


def to_inline_yaml(value: Any) -> str:
    text: str = yaml.dump(
        value, Dumper=_InlineDumper, sort_keys=False, allow_unicode=True, width=math.inf, default_flow_style=True
    )
    return text.removesuffix("...\n").strip()


def parse_yaml(text: str, source: str) -> RecipeTree:
    """Parse one YAML document. An empty document has the value None. Raises RecipeError with line numbers."""
    try:
        node = compose_yaml(text, source)
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
    try:
        node = compose_yaml(text, place)
    except yaml.YAMLError as error:
        raise RecipeError(f"{place}: the value is not YAML: put text with special characters in quotes") from error
    tree = RecipeTree(None)
    if node is not None:
        raise_problems(_NodeReader(tree, lambda line: place).read_document(node))
    return tree.values


class _NodeReader:
    """Converts YAML nodes to Python values and records their lines."""

    def __init__(self, tree: RecipeTree, at_line: Callable[[int], SourceLocation]) -> None:
        self.tree, self.locate_line = tree, at_line
        self.problems: list[RecipeProblem] = []

    def read_document(self, node: yaml.Node) -> list[RecipeProblem]:
        """Store values and locations. Return the problems. Raises RecipeError if an alias contains itself."""
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
                shown = shorten_text(str(key.value)) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                self._add_problem(key, f"a key must be text, got {shown}: put it in quotes")
            elif key.value in pairs:
                name, first = join_key_path((*path, key.value)), self._locate_node(pairs[key.value][0])
                self._add_problem(key, f"duplicate key {name}; first at {first}")
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


# ---- from several sources


def merge_trees(base: RecipeTree, variant: RecipeTree) -> RecipeTree:
    """Merge `variant` over `base`: mappings are merged recursively; lists and scalars are replaced.

    If `variant` selects a different algorithm, all algorithm keys of `base` are dropped. If `variant` names another
    model, `model.revision` of `base` is dropped.
    """
    replaced: set[KeyPath] = set()
    values = _merge_values(base.values, variant.values, (), replaced)
    remaining = {p: at for p, at in base.locations.items() if not any(p[:n] in replaced for n in range(len(p) + 1))}
    return RecipeTree(values, remaining | variant.locations)


def _merge_values(old: Any, new: Any, path: KeyPath, replaced: set[KeyPath]) -> Any:
    is_fresh = path == ("algorithm",) and changes_value("name", old, new)
    if isinstance(old, dict) and isinstance(new, dict) and not is_fresh:
        if path == ("model",) and changes_value("path", old, new):
            old = {k: v for k, v in old.items() if k != "revision"}
            replaced.add(("model", "revision"))
        return old | {k: _merge_values(old.get(k), v, (*path, k), replaced) for k, v in new.items()}
    replaced.add(path)
    return new


def changes_value(key: str, old: Any, new: Any) -> bool:
    return isinstance(old, dict) and isinstance(new, dict) and new.get(key, old.get(key)) != old.get(key)


def apply_overrides(tree: RecipeTree, words: Sequence[str]) -> None:
    """Apply `section.key=value` overrides to the tree, in order. A number in the path is a list index.

    Raises RecipeError for malformed overrides, values that are not YAML, and list indices out of range.
    """
    parsed = [_parse_override(word) for word in words]
    sets_revision = any(path == ("model", "revision") for path, _, _ in parsed)
    # A new algorithm drops the keys of the old one, so it is applied first, regardless of the order.
    for path, value, place in sorted(parsed, key=lambda item: item[0] != ("algorithm", "name")):
        if path == ("algorithm", "name") and changes_value("name", tree.values.get("algorithm"), {"name": value}):
            tree.forget_locations(("algorithm",))
            tree.locations[("algorithm",)] = place
            tree.values["algorithm"] = {}
        is_model = path == ("model", "path") and not sets_revision
        if is_model and changes_value("path", tree.values.get("model"), {"path": value}):
            tree.forget_locations(("model", "revision"))  # of another model
            tree.values["model"].pop("revision", None)
        _set_value(tree, path, value, place)


def _parse_override(word: str) -> tuple[KeyPath, Any, SourceLocation]:
    place = SourceLocation(f"override {shorten_text(word)}")
    key, equals, text = word.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise RecipeError(f"{place}: expected section.key=value")
    if not text.strip():
        name = shorten_text(key)
        raise RecipeError(f"{place}: the value is missing: write {name}=null for none, or {name}=\"''\" for empty text")
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
    if isinstance(holder, dict):
        return part
    if not str(part).isdecimal() or int(part) >= len(holder):
        last = len(holder) - 1
        have = f"a list with entries 0 to {last}" if holder else "an empty list"
        raise RecipeError(f"{place}: {join_key_path(path)} is {have}: there is no entry {part}")
    return int(part)
