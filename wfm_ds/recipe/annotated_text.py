"""Format a recipe, merged with the file in its `defaults`, as YAML with comments, for `wfm recipes show NAME`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wfm_ds.recipe.file import read_recipe_parts, section_values, validate_tree
from wfm_ds.recipe.section import Section
from wfm_ds.recipe.shipped_recipes import MODELINE
from wfm_ds.recipe.tree import KeyPath, RecipeTree, SourceLocation, changes_value, merge_trees, to_inline_yaml

MAX_REPLACED_CHARACTERS = 36  # longer values of the base recipe are not repeated


def annotate_recipe(path: Path) -> str:
    """Return a recipe as commented YAML text, with all values that differ from the schema's defaults.

    Comments mark values from the file in `defaults` and name the values that the recipe replaces. Raises RecipeError.
    """
    variant, base = read_recipe_parts(path)
    tree = variant if base is None else merge_trees(base, variant)
    recipe = validate_tree(tree)
    replaced = {} if base is None else find_replaced_values(base, variant)
    sources = {place.source for place in tree.locations.values()}
    texts = {source: Path(source).read_text("utf-8-sig").splitlines() for source in sources}
    header = itertools.takewhile(lambda line: line.startswith("#"), texts[str(path)])
    lines = [line for line in header if not line.startswith(MODELINE)]
    for name in type(recipe).model_fields:
        section = getattr(recipe, name)
        written = tree.values.get(name)
        if not isinstance(section, Section) or not isinstance(written, dict):
            continue
        non_default = section.non_default_keys(*type(section).model_fields)
        changed = [key for key in written if key in non_default]
        if changed:
            lines.append(f"{name}:")
        elif type(recipe).model_fields[name].default is None:  # a section that is used because it is there
            lines.append(f"{name}: {{}}")
        for key in changed:
            place = tree.locate((name, key))
            above, beside = _find_comments(texts[place.source], place)
            source = replaced.get((name, key), "") if place.source == str(path) else Path(place.source).name
            comment = ": ".join(filter(None, [source, beside]))
            lines += [*above, f"  {key}: {to_inline_yaml(written[key])}{f'  # {comment}' if comment else ''}"]
    return "\n".join(lines) + "\n"


def find_replaced_values(base: RecipeTree, variant: RecipeTree) -> dict[KeyPath, str]:
    notes: dict[KeyPath, str] = {}
    for section, values in variant.values.items():
        before: dict[str, Any] = section_values(base, section)
        if not isinstance(values, dict) or (section == "algorithm" and changes_value("name", before, values)):
            continue
        for key in values.keys() & before.keys():
            shown = to_inline_yaml(before[key])
            if before[key] != values[key] and len(shown) <= MAX_REPLACED_CHARACTERS:
                notes[section, key] = f"replaces {shown} of {Path(base.locate(()).source).name}"
    return notes


def _find_comments(lines: Sequence[str], place: SourceLocation) -> tuple[list[str], str]:
    """Return (comment lines above a value, comment on its line). lines: lines of the file that contains the value."""
    if place.line is None:
        return [], ""
    above = list(itertools.takewhile(lambda line: re.match(r"\s+#", line), reversed(lines[: place.line - 1])))
    beside = re.search(r"\s#\s*([^\"']*)$", lines[place.line - 1])
    return [f"  {line.strip()}" for line in reversed(above)], beside[1] if beside else ""
