"""The recipes that come with the package: recipes/ of a checkout, which a wheel holds inside the package.

A recipe argument is a path, else the name of one of them. What they name relative to the folder above (`recipes/...`)
and is not there is looked for beside them, so that they run in any folder.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from wfm_ds.errors import RecipeError

PACKAGE = Path(__file__).parent.parent
HERE = "recipes/"  # the beginning of a path that a shipped recipe means as its neighbour's


def folder() -> Path:
    """The folder of the shipped recipes: inside an installed package, else beside it."""
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def names() -> list[str]:
    """All of them by name: sd3_nft, digits/nft, ..."""
    root = folder()
    found = (path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))
    return sorted(found, key=lambda name: (name.count("/"), name))


def of_name(name: str) -> Path | None:
    """Return the file of a shipped recipe's name, with or without recipes/ before and .yaml behind; None for others."""
    bare = name.removeprefix(HERE).removesuffix(".yaml")
    return folder() / f"{bare}.yaml" if bare in names() else None


def require(name: str) -> Path:
    """Return the file of that name. Raises RecipeError with the nearest names."""
    path = of_name(name)
    if path is None:
        raise RecipeError(f"there is no shipped recipe {name!r}{nearest(name)}; wfm recipes lists all")
    return path


def nearest(name: str) -> str:
    """The question after shipped recipes of like names; empty if there are none."""
    close = difflib.get_close_matches(name.removeprefix(HERE).removesuffix(".yaml"), names(), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def placed(value: Any, root: Path) -> Any:
    """The value of a recipe with each text `recipes/...` that names nothing here made a path of the shipped folder."""
    if isinstance(value, dict):
        return {key: placed(entry, root) for key, entry in value.items()}
    if isinstance(value, list):
        return [placed(entry, root) for entry in value]
    if isinstance(value, str) and value.startswith(HERE) and not Path(value).exists():
        there = root / value.removeprefix(HERE)
        return str(there) if there.exists() else value
    return value


def copied(path: Path) -> str:
    """The text of a shipped recipe for a file elsewhere: what it includes or names beside it is written as a path."""
    text = path.read_text("utf-8")
    text = re.sub(r"(?m)^(defaults: )(\S+)", lambda m: f"{m[1]}{(path.parent / m[2]).resolve()}", text)
    return re.sub(rf"(?m)^([^#\n]*: ){HERE}(\S+)", lambda m: f"{m[1]}{folder() / m[2]}", text)


def purpose(path: Path) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines = path.read_text("utf-8").splitlines()
    comment = []
    for line in lines[next((i for i, line in enumerate(lines) if line.startswith("#")), len(lines)) :]:
        if not line.startswith("# ") or line.startswith("#  "):
            break
        comment.append(line.removeprefix("# "))
    return re.split(r"(?<=[.]) (?=[A-Z0-9])| First:", " ".join(comment))[0].rstrip(":.")
