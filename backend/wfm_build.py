"""Build backend: setuptools, with more files in the wheels.

Each wheel, including editable ones, has wfm_ds/distributed/wfm_ds_deepspeed.pth at the top level, which makes the
`deepspeed` script accept `-m` (wfm_ds/distributed/hook.py). A regular wheel has the folders recipes/ and ds_configs/
inside the package wfm_ds.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).parent.parent
HOOK = ROOT / "wfm_ds" / "distributed" / "wfm_ds_deepspeed.pth"
DATA_FILES = ("recipes/*.yaml", "recipes/*.json", "recipes/*/*.yaml", "recipes/prompts/*/*.txt", "ds_configs/*.json")

Settings = dict[str, Any] | None


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    data = {f"wfm_ds/{path.relative_to(ROOT)}": path for pattern in DATA_FILES for path in sorted(ROOT.glob(pattern))}
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    return add_files(wheel_directory, name, {HOOK.name: HOOK} | data)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    return add_files(wheel_directory, name, {HOOK.name: HOOK})


def add_files(folder: str, name: str, files: dict[str, Path]) -> str:
    """Add files {path in the wheel: source} to the wheel and to its RECORD, so that uninstalling removes them.

    Returns the wheel's name.
    """
    wheel = Path(folder) / name
    partial_wheel = wheel.with_suffix(".making")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(partial_wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                lines = (f"{path},{record_digest(file)},{file.stat().st_size}\n" for path, file in files.items())
                data = "".join(lines).encode() + data
            new.writestr(info, data)
        for path, file in files.items():
            new.write(file, path)
    partial_wheel.replace(wheel)
    return name


def record_digest(file: Path) -> str:
    """Return the digest of a file in the format of RECORD."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
