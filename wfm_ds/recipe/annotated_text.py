"""A recipe with the values of its `defaults`, as YAML with comments: `wfm recipes show NAME`."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from wfm_ds.recipe.file import read_recipe_tree, validate_tree
from wfm_ds.recipe.section import Section
from wfm_ds.recipe.tree import RecipeTree
from wfm_ds.recipe.yaml_text import to_inline_yaml


def annotate_recipe(path: Path) -> str:
    """Return a recipe as commented YAML text, with all values that differ from the schema's defaults.

    The comment at the top of the file comes first. Values from the file named by `defaults` are marked with its name.
    The text is a valid recipe. Raises RecipeError.
    """
    tree = read_recipe_tree(path)
    recipe = validate_tree(tree)
    lines = _header(path)
    comments = _Comments(tree, path)
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
        lines += [f"  {key}: {to_inline_yaml(written[key])}{comments.describe(name, key)}" for key in changed]
    return "\n".join(lines) + "\n"


def _header(path: Path) -> list[str]:
    """Return the comment at the top of a file."""
    lines = path.read_text("utf-8-sig").splitlines()
    return list(itertools.takewhile(lambda line: line.startswith("#"), lines))


class _Comments:
    """Comments on the values of a recipe, from the lines of its files."""

    def __init__(self, tree: RecipeTree, path: Path) -> None:
        self.tree, self.path = tree, path
        self._lines: dict[str, list[str]] = {}

    def describe(self, section: str, key: str) -> str:
        """Return the comment on a value.

        If the value is from the file named by `defaults`, the file's name precedes the comment.
        """
        place = self.tree.locate((section, key))
        source = Path(place.source)
        origin = [] if source == self.path else [source.name]
        comment = [self._read_comment(source, place.line)] if place.line is not None else []
        text = ": ".join(part for part in (*origin, *comment) if part)
        return f"  # {text}" if text else ""

    def _read_comment(self, source: Path, number: int) -> str:
        """Return the comment at the end of a line, or ""."""
        lines = self._lines.setdefault(str(source), source.read_text("utf-8-sig").splitlines())
        found = re.search(r"\s#\s*([^\"']*)$", lines[number - 1])
        return found[1] if found else ""
