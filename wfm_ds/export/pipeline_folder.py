"""Reads the index of a diffusers pipeline folder, and links its unchanged files into a new pipeline folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wfm_ds.errors import ModelError
from wfm_ds.storage import atomic
from wfm_ds.storage.filesystem import read_regular

log = logging.getLogger(__name__)

INDEX_FILE = "model_index.json"
CALL_FILE = "call.json"  # file of wfm_ds next to model_index.json: arguments of the pipeline call
SCHEDULER_FOLDER, SCHEDULER_FILE = "scheduler", "scheduler_config.json"  # names of diffusers
# The config files, with diffusers' names, of components that an export can replace.
REPLACEABLE_CONFIGS: Mapping[str, str] = MappingProxyType(
    {SCHEDULER_FOLDER: SCHEDULER_FILE, "guider": "guider_config.json"}
)

# Errors of hard links: another file system, no support, too many links, another user's file (fs.protected_hardlinks).
UNLINKABLE_ERRORS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def read_index(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's model_index.json. Raises ModelError if it is missing or not a JSON object."""
    path = folder / INDEX_FILE
    try:
        index = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); {folder} must be a diffusers pipeline folder") from error
    if not isinstance(index, dict):
        raise ModelError(f"{path}: must be a JSON object; {folder} must be a diffusers pipeline folder")
    return index


def pipeline_components(index: dict[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    """Return {component: (library, class)} of a pipeline index. Unused components have the value (None, None)."""
    pairs = {name: value for name, value in index.items() if not name.startswith("_") and isinstance(value, list)}
    return {
        name: (value[0], value[1])
        for name, value in pairs.items()
        if len(value) == 2 and all(part is None or isinstance(part, str) for part in value)
    }


def link_unchanged_files(base: Path, out: Path, *, changed: Collection[str]) -> None:
    """Hard-link the files of the pipeline `base` into `out`, except the files of the `changed` components.

    Do not open the linked files for writing, because this would change `base`. Symbolic links are resolved first, so
    `out` does not depend on a Hub cache. Files that cannot be linked are copied. Raises ModelError if `base` is not a
    pipeline folder, and OSError if files cannot be read or written.
    """
    present = [
        name for name, (_, class_name) in pipeline_components(read_index(base)).items() if class_name is not None
    ]
    files = [base / INDEX_FILE, *(base / name for name in (CALL_FILE,) if (base / name).exists())]
    for name in present:
        if name not in changed:
            files.extend(_list_files(base / name))
    link_files(base, out, files)


def link_files(base: Path, out: Path, files: Iterable[Path]) -> None:
    """Hard-link these files of `base` into `out`, or copy them if they cannot be linked."""
    copied, copied_bytes = 0, 0
    for file in files:
        source, target = file.resolve(strict=True), out / file.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in UNLINKABLE_ERRORS:
                raise
            shutil.copy2(source, target)
            copied, copied_bytes = copied + 1, copied_bytes + target.stat().st_size
    if copied:
        log.warning(
            "%s: %d unchanged files (%.1f MiB) were copied, because they cannot be hard-linked from %s; "
            "every export uses that space again",
            out,
            copied,
            copied_bytes / 2**20,
            base,
        )


def replace_component(folder: Path, name: str, config: Mapping[str, Any]) -> None:
    """Write a component's config into a pipeline folder that lacks it, and name its class in model_index.json.

    name: a component in REPLACEABLE_CONFIGS.
    """
    index = read_index(folder) | {name: ["diffusers", config["_class_name"]]}
    write_json(folder / INDEX_FILE, index)
    (folder / name).mkdir()
    write_json(folder / name / REPLACEABLE_CONFIGS[name], config)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON atomically. Other hard links to the old file do not change. Raises OSError if writing fails."""
    atomic.write_text(file, json.dumps(content, indent=2) + "\n")


def _list_files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise ModelError(f"{folder}: the model index lists this component, but the folder does not exist")
    for directory, _, names in os.walk(folder, followlinks=True):
        yield from (Path(directory, name) for name in sorted(names))
