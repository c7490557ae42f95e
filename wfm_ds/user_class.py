"""Import user-defined classes `package.module:Class`: rewards, algorithms, model families, data readers.

Every process imports them from PYTHONPATH or the working directory.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from pathlib import Path
from typing import Any

from wfm_ds.errors import UserError

CLASS_PATH_FORM = "package.module:Class"


def is_user_class(name: str) -> bool:
    """Return True if `name` has the form `package.module:Class`, False if it names a built-in."""
    return ":" in name


def import_class(path: str, base: type[Any], *, key: str, error: type[UserError]) -> type[Any]:
    """Import the class at `path` (package.module:Class).

    Raises `error`, with a message that starts with `key` and the path, if the import fails or the class is not a
    concrete subclass of `base`.
    """
    module_name, _, class_name = path.partition(":")
    imported = import_object(path, key=key, error=error)
    if not inspect.isclass(imported) or not issubclass(imported, base):
        base_name = f"{base.__module__}.{base.__name__}"
        raise error(f"{key} {path}: {module_name} has no class {class_name!r} that is a subclass of {base_name}")
    if missing := sorted(getattr(imported, "__abstractmethods__", ())):
        raise error(f"{key} {path}: the class does not implement {', '.join(missing)}")
    return imported


def import_object(path: str, *, key: str, error: type[UserError], form: str = CLASS_PATH_FORM) -> Any:
    """Import the object at `path` (package.module:NAME). Returns None if the module does not define NAME.

    Raises `error` if `path` does not have this form or the module cannot be imported.
    """
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise error(f"{key} {path}: expected {form}")
    try:
        module = importlib.import_module(module_name)
    except Exception as problem:
        raise error(f"{key} {path}: {_import_failure(module_name, problem)}") from problem
    return getattr(module, name, None)


def _import_failure(module_name: str, problem: Exception) -> str:
    parents = [module_name.rsplit(".", n)[0] for n in range(module_name.count(".") + 1)]
    if isinstance(problem, ModuleNotFoundError) and problem.name in parents:
        return f"cannot import {module_name!r} ({problem}): run in its folder, or add this folder to PYTHONPATH"
    if isinstance(problem, SyntaxError):
        where = f"{problem.filename}:{problem.lineno}"
    else:
        frames = [f for f in traceback.extract_tb(problem.__traceback__) if "importlib" not in f.filename]
        frame = next(reversed([f for f in frames if f.filename != __file__]), None)
        where = f"{frame.filename}:{frame.lineno}" if frame else module_name
    text = " ".join((problem.msg if isinstance(problem, SyntaxError) else str(problem)).split())
    return f"importing {module_name!r} failed in {where}: {type(problem).__name__}: {text}"


def source_file(cls: type[Any]) -> Path:
    return Path(inspect.getfile(cls))
