"""YAML for recipes: parse text to nodes within size limits, convert scalars, write values.

Where YAML 1.1 would surprise users, scalars follow YAML 1.2: `1e-4` is a number; `on`, `off`, `yes`, `no` and dates are
text. Limits on length, nesting and expanded aliases keep parsing fast for any input.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from wfm_ds.errors import RecipeError

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


def compose_yaml(text: str) -> yaml.Node | None:
    """Return the root node of a YAML document, or None if the text is empty.

    Raises RecipeError if the text is too long or nested too deeply, and yaml.YAMLError if it is not one valid document.
    """
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(f"a recipe has at most {MAX_CHARACTERS:,} characters")
    loader = _RecipeLoader(text)
    try:
        return loader.get_single_node()
    except RecursionError as error:
        raise RecipeError("nested too deeply") from error
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
    """Serialize `values` as YAML that parse_yaml reads back unchanged."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _InlineDumper(_Dumper):
    """YAML dumper that writes everything on one line."""


_InlineDumper.add_representer(list, yaml.SafeDumper.represent_list)


def to_inline_yaml(value: Any) -> str:
    """Return a value as YAML on one line, to be written after a key and a colon."""
    text: str = yaml.dump(
        value, Dumper=_InlineDumper, sort_keys=False, allow_unicode=True, width=math.inf, default_flow_style=True
    )
    return text.removesuffix("...\n").strip()
