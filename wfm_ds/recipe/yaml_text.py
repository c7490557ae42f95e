"""YAML for recipes: parse text to nodes within size limits, convert scalars, write values.

Rules of YAML 1.2 replace surprising ones of YAML 1.1: `1e-4` is a number; `on`, `off`, `yes`, `no` and dates are text.
Limits on length, nesting and expanded aliases keep parsing fast for any input.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from wfm_ds.errors import RecipeError

MAX_CHARACTERS = 1 << 20
MAX_NODES = 10_000
"""Maximum number of keys and values in a file or override. An alias counts as all values that it expands to."""
MAX_DEPTH = 32
LIMITS = f"a recipe has at most {MAX_CHARACTERS:,} characters, {MAX_NODES:,} keys and values and {MAX_DEPTH} levels"

YAML_TAG = "tag:yaml.org,2002:"
SCALAR_PATTERNS = {  # patterns of unquoted scalars, and their possible first characters
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


class _RecipeLoader(yaml.SafeLoader):
    """YAML loader that enforces the limits on the number and depth of nodes."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 -- PyYAML's interface

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node (called by PyYAML for each key and value). Raises TooLarge."""
        self._nodes, self._depth = self._nodes + 1, self._depth + 1
        require_within_limits(self._nodes, self._depth)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes texts which YAML 1.1 or 1.2 would read as another type."""


for _name, (_pattern, _first) in SCALAR_PATTERNS.items():
    _RecipeLoader.add_implicit_resolver(YAML_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(YAML_TAG + _name, _pattern, _first)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    is_flat = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence(YAML_TAG + "seq", items, flow_style=is_flat)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML loses these rare line breaks in styles without escapes.
    style = '"' if set(text) & set("\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar(YAML_TAG + "str", text, style=style)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_text)


class TooLarge(RecipeError):
    """The text, or its expanded aliases, exceeds the limits."""


def require_within_limits(nodes: int, depth: int) -> None:
    """Raise TooLarge if a recipe has too many nodes or is nested too deeply."""
    if nodes > MAX_NODES:
        raise TooLarge(f"more than {MAX_NODES:,} keys and values, with expanded aliases; {LIMITS}")
    if depth > MAX_DEPTH:
        raise TooLarge(f"nested more than {MAX_DEPTH} levels deep; {LIMITS}")


def compose_yaml(text: str) -> yaml.Node | None:
    """Parse the text and return the root node of its document, or None if it is empty.

    Raises TooLarge or yaml.YAMLError.
    """
    if len(text) > MAX_CHARACTERS:
        raise TooLarge(f"more than {MAX_CHARACTERS:,} characters; {LIMITS}")
    loader = _RecipeLoader(text)
    try:
        return loader.get_single_node()
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
    """Return YAML text that parse_yaml reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
