"""Build backend: setuptools, with one more file at the top level of each wheel, including editable ones.

The file is wfm_ds/distributed/wfm_ds_deepspeed.pth, which makes the `deepspeed` script accept `-m`
(wfm_ds/distributed/hook.py). setuptools can add it to a regular wheel, but not to an editable one.
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

HOOK = Path(__file__).parent.parent / "wfm_ds" / "distributed" / "wfm_ds_deepspeed.pth"

Settings = dict[str, Any] | None


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    return add_hook(wheel_directory, build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return add_hook(wheel_directory, build_meta.build_editable(wheel_directory, config_settings, metadata_directory))


def add_hook(folder: str, name: str) -> str:
    """Add the hook to the wheel and to its RECORD, so that uninstalling removes it. Return the wheel's name."""
    wheel = Path(folder) / name
    partial_wheel = wheel.with_suffix(".making")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(partial_wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                data = f"{HOOK.name},{record_digest(HOOK.read_bytes())},{HOOK.stat().st_size}\n".encode() + data
            new.writestr(info, data)
        new.write(HOOK, HOOK.name)
    partial_wheel.replace(wheel)
    return name


def record_digest(data: bytes) -> str:
    """Return the digest of a file in the format of RECORD."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
