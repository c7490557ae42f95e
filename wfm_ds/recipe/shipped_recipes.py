"""Recipes shipped with the package: the folder recipes/ of a checkout, or its copy inside an installed wheel."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from wfm_ds.errors import RecipeError

PACKAGE_FOLDER = Path(__file__).parent.parent
SHIPPED_PREFIX = "recipes/"  # prefix of paths to shipped files
SCHEMA_FILE = "recipe.schema.json"  # in the folder of the shipped recipes; for editors
MODELINE = "# yaml-language-server: $schema="  # names the schema of a recipe; read by YAML plugins of editors


def recipes_folder() -> Path:
    inside = PACKAGE_FOLDER / "recipes"
    return inside if inside.is_dir() else PACKAGE_FOLDER.parent / "recipes"


def list_recipe_names() -> list[str]:
    root = recipes_folder()
    relative = (path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))
    return sorted(relative, key=lambda name: (name.count("/"), name))


def recipe_name(path: Path) -> str:
    """Return the name of a recipe file: the path in the shipped folder without suffix, or the stem of other files."""
    path, root = path.resolve(), recipes_folder().resolve()
    return path.relative_to(root).with_suffix("").as_posix() if path.is_relative_to(root) else path.stem


def find_recipe(name: str) -> Path | None:
    """Return the file of a shipped recipe, or None if there is none. `name` may include recipes/ and .yaml."""
    bare = name.removeprefix(SHIPPED_PREFIX).removesuffix(".yaml")
    return recipes_folder() / f"{bare}.yaml" if bare in list_recipe_names() else None


def require_recipe(name: str) -> Path:
    """Return the file of a shipped recipe. Raises RecipeError with similar names if there is none."""
    path = find_recipe(name)
    if path is None:
        raise RecipeError(f"unknown shipped recipe {name!r}{suggest_recipes(name)}; list all with: wfm recipes")
    return path


def suggest_recipes(name: str) -> str:
    """Return "; did you mean ...?" with similar names of shipped recipes, or "" if there are none."""
    close = difflib.get_close_matches(name.removeprefix(SHIPPED_PREFIX).removesuffix(".yaml"), list_recipe_names(), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def resolve_shipped_paths(value: Any, root: Path) -> Any:
    """Return `value` with paths to shipped files: each string `recipes/NAME` is replaced by the path ROOT/NAME.

    value: strings in dicts and lists at any depth. A string is kept if the file `recipes/NAME` exists in the working
    directory, or if ROOT/NAME does not exist.
    """
    if isinstance(value, dict):
        return {key: resolve_shipped_paths(entry, root) for key, entry in value.items()}
    if isinstance(value, list):
        return [resolve_shipped_paths(entry, root) for entry in value]
    if isinstance(value, str) and value.startswith(SHIPPED_PREFIX) and not Path(value).exists():
        shipped_path = root / value.removeprefix(SHIPPED_PREFIX)
        return str(shipped_path) if shipped_path.exists() else value
    return value


def schema_path() -> Path:
    return recipes_folder() / SCHEMA_FILE


def schema_modeline() -> str:
    """Return the comment that tells editors where the schema of recipes is on this machine."""
    return f"{MODELINE}{schema_path().resolve().as_uri()}"


def portable_recipe_text(path: Path) -> str:
    """Return the text of a shipped recipe with absolute paths to other shipped files."""
    text = path.read_text("utf-8")
    text = re.sub(rf"(?m)^{re.escape(MODELINE)}.*", lambda _: schema_modeline(), text)
    text = re.sub(r"(?m)^(defaults: )(\S+)", lambda m: f"{m[1]}{(path.parent / m[2]).resolve()}", text)
    return re.sub(rf"(?m)^([^#\n]*: ){SHIPPED_PREFIX}(\S+)", lambda m: f"{m[1]}{recipes_folder() / m[2]}", text)


def read_purpose(path: Path) -> str:
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith(MODELINE)]
    comment = []
    for line in lines[next((i for i, line in enumerate(lines) if line.startswith("#")), len(lines)) :]:
        if not line.startswith("# ") or line.startswith("#  "):
            break
        comment.append(line.removeprefix("# "))
    return re.split(r"(?<=[.]) (?=[A-Z0-9])| First:", " ".join(comment))[0].rstrip(":.")
