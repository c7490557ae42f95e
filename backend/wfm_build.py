"""The build backend: setuptools, and one file more at the top of each wheel, of an editable install too.

The file is wfm_ds/distributed/wfm_ds_deepspeed.pth, by which DeepSpeed's own `deepspeed` script understands `-m`
(wfm_ds/distributed/hook.py). setuptools can put it into a wheel, but not into that of an editable install.
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
    return with_hook(wheel_directory, build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return with_hook(wheel_directory, build_meta.build_editable(wheel_directory, config_settings, metadata_directory))


def with_hook(folder: str, name: str) -> str:
    """Add the hook to the wheel and its RECORD, by which an uninstall removes it; returns the wheel's name."""
    wheel = Path(folder) / name
    making = wheel.with_suffix(".making")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(making, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                data = f"{HOOK.name},{digest(HOOK.read_bytes())},{HOOK.stat().st_size}\n".encode() + data
            new.writestr(info, data)
        new.write(HOOK, HOOK.name)
    making.replace(wheel)
    return name


def digest(data: bytes) -> str:
    """The digest of a file as RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
