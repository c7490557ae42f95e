"""Generate docs/recipes.md, the reference page of all recipe keys, and recipes/recipe.schema.json, for editors.

`python -m wfm_ds.cli.recipe_docs docs/recipes.md` writes both files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from wfm_ds.program import run_command
from wfm_ds.recipe.algorithms import (
    AlgorithmSettings,
    ConditioningFramesSettings,
    DistillationSettings,
    ForwardProcessSettings,
    SupervisedSettings,
)
from wfm_ds.recipe.editor_schema import format_schema
from wfm_ds.recipe.schema_description import SchemaNode, describe_type, iterate_sections
from wfm_ds.recipe.shipped_recipes import schema_path
from wfm_ds.recipe.tree import KeyPath

INTRO_TEXT = """\
# Recipe reference

Every key of a recipe. Check a recipe and overrides:

```bash
wfm check mine.yaml optimizer.lr=1e-4
```

[Writing recipes](recipe_guide.md) explains sections, overrides and variants. The sections `run`, `model`, `data`,
`sampling` and `algorithm` are required (`vlm_sft` has no `sampling`). An omitted section has the defaults below, or is
off if its description says so.

The parentheses after a key contain its type, or its allowed values, and its default. The section of an algorithm lists
a shared key again if its default or its values differ.

"""

SECTION_USERS = {
    "rollout": "reinforcement learning and distillation, rejected for supervised algorithms",
    "reward": "reinforcement learning and for `algorithm.reward` of `dmd2`, rejected otherwise",
}

SHARED_SETTINGS: dict[type[AlgorithmSettings], str] = {
    SupervisedSettings: "supervised algorithms",
    ConditioningFramesSettings: "all RL algorithms",
    ForwardProcessSettings: "RL algorithms on the forward process",
    DistillationSettings: "distillation algorithms",
}
"""{base class with a separate section on the page: algorithms that share its keys}. Base classes precede subclasses."""

SHORT_TYPES = (
    (r"(a mapping) with keys of [\w, ]+", r"\1"),  # the page lists the keys in the section of the mapping
    (r"> (\S+) and <= (\S+)", r"in (\1, \2]"),
    (r"> (\S+) and < (\S+)", r"in (\1, \2)"),
    (r">= (\S+) and < (\S+)", r"in [\1, \2)"),
    (r">= (\S+) and <= (\S+)", r"in [\1, \2]"),
    ("a list of at least 1", "non-empty list"),
    (",? each ", ": "),
    ("one of ", ""),
    ("a whole number", "int"),
    ("a number", "float"),
    ("true or false", "bool"),
    (r"\ba (list|mapping|path)", r"\1"),
)
"""(pattern, replacement) pairs that shorten the text of `describe_type`, applied in this order."""


def render_page() -> str:
    parts, printed = [INTRO_TEXT], set[type[AlgorithmSettings]]()
    for path, title, section in iterate_sections():
        shared = list_bases(section)
        parts += [base_section(base) for base in shared if base not in printed]
        printed.update(shared)
        summary = link_pages(join_lines(section.__doc__ or ""))
        parts.append(f"## {section_heading(path, title)}\n\n{summary}{optional_note(path)}{base_note(shared)}\n\n")
        parts.append(key_list(own_keys(section)))
    return "".join(parts).rstrip("\n") + "\n"


def key_list(keys: Sequence[str]) -> str:
    return "\n".join(keys) + "\n\n"


def list_bases(section: type[BaseModel]) -> list[type[AlgorithmSettings]]:
    return [base for base in SHARED_SETTINGS if issubclass(section, base)]


def base_section(base: type[AlgorithmSettings]) -> str:
    algorithms = [f"`{title}`" for _, title, section in iterate_sections() if issubclass(section, base)]
    above = {key for other in list_bases(base) if other is not base for key in other.model_fields}
    keys = [key_entry(key, field) for key, field in base.model_fields.items() if key not in above and key != "name"]
    return f"## {base_heading(base)}\n\nFor {', '.join(algorithms[:-1])} and {algorithms[-1]}.\n\n{key_list(keys)}"


def base_heading(base: type[AlgorithmSettings]) -> str:
    return f"`algorithm`: keys of {SHARED_SETTINGS[base]}"


def base_note(bases: Sequence[type[AlgorithmSettings]]) -> str:
    links = [f"[{SHARED_SETTINGS[base]}](#{heading_anchor(base_heading(base))})" for base in bases]
    return f" Shared keys: {', '.join(links)}." if links else ""


def heading_anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def own_keys(section: type[BaseModel]) -> list[str]:
    """Return a list entry for each key of a recipe section, without `heading_keys`.

    Also omits keys that have the same entry in a base class from SHARED_SETTINGS.
    """
    shared: dict[str, FieldInfo] = {}
    for base in list_bases(section):
        shared |= base.model_fields
    keys = []
    for key, field in section.model_fields.items():
        if key in heading_keys(section):
            continue
        if key not in shared or key_entry(key, field) != key_entry(key, shared[key]):
            keys.append(key_entry(key, field))
    return keys


def heading_keys(section: type[BaseModel]) -> set[str]:
    return {
        key
        for key, field in section.model_fields.items()
        if len(get_args(field.annotation)) == 1 and field.is_required() and get_origin(field.annotation) is Literal
    }


def section_heading(path: KeyPath, title: str) -> str:
    if path == ("algorithm",):
        return f"`algorithm` with `name: {title}`"
    if path == ("sampling", "window"):
        return f"`sampling.window` with `kind: {title}`"
    return f"`{title}`"


def optional_note(path: KeyPath) -> str:
    if len(path) == 1 and (users := SECTION_USERS.get(str(path[0]))):
        return f" Required for {users}."
    return ""


def key_entry(name: str, field: FieldInfo) -> str:
    return f"* `{name}` ({type_text(field)}; {default_text(field)}): {link_pages(join_lines(field.description or ''))}"


def type_text(field: FieldInfo) -> str:
    text = describe_type(SchemaNode.from_field(field))
    for pattern, short in SHORT_TYPES:
        text = re.sub(pattern, short, text)
    return text


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "its defaults"
    plain = json.dumps(value)
    return f"`{plain.strip(chr(34)) if isinstance(value, str) else plain}`"


def join_lines(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def link_pages(text: str) -> str:
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](\1.md)", text)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), write_files, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="wfm_ds.cli.recipe_docs", description="Write the reference page and the schema of recipes."
    )
    p.add_argument("page", type=Path, help="the page to write")
    return p


def write_files(args: argparse.Namespace) -> None:
    args.page.write_text(render_page(), encoding="utf-8")
    schema_path().write_text(format_schema(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
