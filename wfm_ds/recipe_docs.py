"""Generate docs/recipes.md, the reference page of recipes, from the schema.

`python -m wfm_ds.recipe_docs docs/recipes.md` writes the page. `python -m wfm_ds.recipe_docs --json-schema` prints a
JSON schema for editors.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from wfm_ds.program import run_command
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.schema_description import SchemaNode, describe_type, iterate_sections
from wfm_ds.recipe.tree import KeyPath

INTRO_TEXT = """\
# Recipe reference

Every key of a recipe, with its type, default and meaning. Check a recipe and its overrides with

```bash
wfm check mine.yaml optimizer.lr=1e-4
```

[Writing recipes](recipe_guide.md) explains sections, overrides and variants. The sections `run`, `model`, `data`,
`sampling` and `algorithm` are required (`vlm_sft` has no `sampling`). An omitted section has the defaults below, or is
off if its description says so. A key without a default must be given.

"""

RL_SECTIONS = ("rollout", "reward")


def render_page() -> str:
    """Return the Markdown text of the page."""
    parts = [INTRO_TEXT]
    for path, title, section in iterate_sections():
        summary = link_pages(join_lines(section.__doc__ or ""))
        parts.append(f"## {section_heading(path, title)}\n\n{summary}{optional_note(path)}\n\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|\n")
        parts += [field_row(name, field) for name, field in section.model_fields.items()]
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


def section_heading(path: KeyPath, title: str) -> str:
    if path == ("algorithm",):
        return f"`algorithm` with `name: {title}`"
    if path == ("sampling", "window"):
        return f"`sampling.window` with `kind: {title}`"
    return f"`{title}`"


def optional_note(path: KeyPath) -> str:
    """Return a note if the section is required, else "". Docstrings of optional sections say how to turn them off."""
    if len(path) > 1:
        return ""
    if path[0] in RL_SECTIONS:
        return " Required for reinforcement learning, rejected for `sft` and `dpo`."
    return " Required." if Recipe.model_fields[str(path[0])].is_required() else ""


def field_row(name: str, field: FieldInfo) -> str:
    cells = [
        f"`{name}`",
        describe_type(SchemaNode.from_field(field)),
        default_text(field),
        link_pages(join_lines(field.description or "")),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return ""
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
    """Replace page names in the text, docs/NAME.md, by links."""
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](\1.md)", text)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the resolved recipe. It does not contain `defaults`."""
    return Recipe.model_json_schema()


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), write_page, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="wfm_ds.recipe_docs", description="Write the reference page of recipes.")
    p.add_argument("page", type=Path, nargs="?", help="the file to write (default: stdout)")
    p.add_argument("--json-schema", action="store_true", help="print the JSON schema instead of the page")
    return p


def write_page(args: argparse.Namespace) -> None:
    text = json.dumps(json_schema(), indent=2) + "\n" if args.json_schema else render_page()
    if args.page is None:
        sys.stdout.write(text)
    else:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
