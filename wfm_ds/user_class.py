"""Classes of the user's own, named as `package.module:Class`: rewards, algorithms, model families, kinds of data.

Every process of a run imports them by itself: ranks, rollout workers and reward workers find the module on PYTHONPATH
or in the working directory, from which `python -m` imports too.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from pathlib import Path
from typing import Any

from wfm_ds.errors import UserError

FORM = "package.module:Class"


def is_user_class(name: str) -> bool:
    """Tell a `package.module:Class` from a name of ours."""
    return ":" in name


def import_class(path: str, base: type[Any], *, key: str, error: type[UserError]) -> type[Any]:
    """The class at `path`, which must be a concrete subclass of `base`. Raises `error`, one sentence that begins with
    `key` and the path, also for whatever its module raises while it is imported."""
    module_name, _, class_name = path.partition(":")
    found = import_object(path, key=key, error=error)
    if not inspect.isclass(found) or not issubclass(found, base):
        wanted = f"{base.__module__}.{base.__name__}"
        raise error(f"{key} {path}: {module_name} has no class {class_name!r} that is a {wanted}")
    if lacking := sorted(getattr(found, "__abstractmethods__", ())):
        raise error(f"{key} {path}: the class lacks {', '.join(lacking)}")
    return found


def import_object(path: str, *, key: str, error: type[UserError], form: str = FORM) -> Any:
    """Whatever is at `path`; None if its module has no such name. Raises `error` as `import_class` does for a path of
    another form, and for whatever the module raises while it is imported."""
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise error(f"{key} {path}: expected {form}")
    try:
        module = importlib.import_module(module_name)
    except Exception as problem:
        raise error(f"{key} {path}: {_reason(module_name, problem)}") from problem
    return getattr(module, name, None)


def _reason(module_name: str, problem: Exception) -> str:
    """Why an import failed: there is no such module, or its code raised something, and where."""
    parents = [module_name.rsplit(".", n)[0] for n in range(module_name.count(".") + 1)]
    if isinstance(problem, ModuleNotFoundError) and problem.name in parents:
        return f"cannot import {module_name!r} ({problem}); is its folder on PYTHONPATH?"
    if isinstance(problem, SyntaxError):
        where = f"{problem.filename}:{problem.lineno}"
    else:
        own = [f for f in traceback.extract_tb(problem.__traceback__) if "importlib" not in f.filename]
        frame = next(reversed([f for f in own if f.filename != __file__]), None)
        where = f"{frame.filename}:{frame.lineno}" if frame else module_name
    text = " ".join((problem.msg if isinstance(problem, SyntaxError) else str(problem)).split())
    return f"importing {module_name!r} fails in {where}: {type(problem).__name__}: {text}"


def source_file(cls: type[Any]) -> Path:
    """The file that defines a class."""
    return Path(inspect.getfile(cls))
