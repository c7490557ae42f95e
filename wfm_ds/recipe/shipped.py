"""Recipes shipped with the package: recipes/ of a checkout, or a copy inside an installed wheel.

A recipe argument is a path or the name of a shipped recipe. Paths `recipes/...` in shipped recipes that do not exist in
the working directory are resolved in the shipped folder, so that shipped recipes run from anywhere.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from wfm_ds.errors import RecipeError

PACKAGE = Path(__file__).parent.parent
HERE = "recipes/"  # prefix of paths to other shipped files


def folder() -> Path:
    """Return the folder of the shipped recipes: inside the package, or next to it in a checkout."""
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def names() -> list[str]:
    """Return the names of all shipped recipes: sd3_nft, digits/nft, ..."""
    root = folder()
    relative = (path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))
    return sorted(relative, key=lambda name: (name.count("/"), name))


def of_name(name: str) -> Path | None:
    """Return the file of a shipped recipe, or None. The name may have the prefix recipes/ and the suffix .yaml."""
    bare = name.removeprefix(HERE).removesuffix(".yaml")
    return folder() / f"{bare}.yaml" if bare in names() else None


def require(name: str) -> Path:
    """Return the file of a shipped recipe. Raises RecipeError with similar names."""
    path = of_name(name)
    if path is None:
        raise RecipeError(f"unknown shipped recipe {name!r}{nearest(name)}; list all with: wfm recipes")
    return path


def nearest(name: str) -> str:
    """Return the hint "; did you mean ...?" with similar names, or an empty string."""
    close = difflib.get_close_matches(name.removeprefix(HERE).removesuffix(".yaml"), names(), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def placed(value: Any, root: Path) -> Any:
    """Replace every text `recipes/...` that does not exist here by the path in the shipped folder, recursively."""
    if isinstance(value, dict):
        return {key: placed(entry, root) for key, entry in value.items()}
    if isinstance(value, list):
        return [placed(entry, root) for entry in value]
    if isinstance(value, str) and value.startswith(HERE) and not Path(value).exists():
        shipped_path = root / value.removeprefix(HERE)
        return str(shipped_path) if shipped_path.exists() else value
    return value


def copied(path: Path) -> str:
    """Return the text of a shipped recipe with absolute paths to other shipped files, to be saved elsewhere."""
    text = path.read_text("utf-8")
    text = re.sub(r"(?m)^(defaults: )(\S+)", lambda m: f"{m[1]}{(path.parent / m[2]).resolve()}", text)
    return re.sub(rf"(?m)^([^#\n]*: ){HERE}(\S+)", lambda m: f"{m[1]}{folder() / m[2]}", text)


def purpose(path: Path) -> str:
    """Return the first sentence of the comment at the top of a recipe."""
    lines = path.read_text("utf-8").splitlines()
    comment = []
    for line in lines[next((i for i, line in enumerate(lines) if line.startswith("#")), len(lines)) :]:
        if not line.startswith("# ") or line.startswith("#  "):
            break
        comment.append(line.removeprefix("# "))
    return re.split(r"(?<=[.]) (?=[A-Z0-9])| First:", " ".join(comment))[0].rstrip(":.")
