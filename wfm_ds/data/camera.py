"""The path of a camera that a user names: a JSON or .npy file, or the keys that lead it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wfm_ds.data.npy import floats_of, read_npy
from wfm_ds.data.trajectories import INTRINSICS, POSES, Floats, require_rigid

KEYS = re.compile(r"[a-z]+-\d+(,[a-z]+-\d+)*", re.IGNORECASE)


def read_camera(named: str, lens: Sequence[float] | None) -> dict[str, Floats]:
    """Return c2w [F,4,4] and intrinsics [4] or [F,4], float32, in pixels of whatever the lens was told of.

    named: a JSON file with `c2w` and perhaps `intrinsics`; an .npy file of c2w; or keys and numbers of frames such as
    `w-80,jw-40`, as the stock SANA-WM pipeline takes them. lens: fx, fy, cx, cy where `named` does not say them. Raises
    ValueError for anything else, and OSError for a file that cannot be read.
    """
    told = written(Path(named)) if Path(named).suffix else {POSES: led(named)}
    if (lens is None) == (INTRINSICS not in told):
        raise ValueError("it has intrinsics of its own" if lens else "it has no intrinsics: name them beside it")
    told |= {} if lens is None else {INTRINSICS: np.asarray(lens, np.float32)}
    for name, array in told.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name}: it has NaN or infinite numbers")
    if told[POSES].ndim != 3 or told[POSES].shape[1:] != (4, 4):
        raise ValueError(f"c2w must be [F, 4, 4], got {list(told[POSES].shape)}")
    require_rigid(told[POSES])
    return told


def written(file: Path) -> dict[str, Floats]:
    if file.suffix == ".npy":
        with file.open("rb") as opened:
            return {POSES: read_npy(opened)}
    try:
        known: Any = json.loads(file.read_bytes())
        names = [POSES, *([INTRINSICS] if INTRINSICS in known else [])]
        return {name: floats_of(np.asarray(known[name])) for name in names}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError("it is not a JSON object with c2w") from error


def led(keys: str) -> Floats:
    """Return c2w [N+1,4,4] of a camera that keys lead for N frames, from where it stands: w a s d move it, i j k l turn
    it. Raises ValueError for others."""
    if KEYS.fullmatch(keys) is None:
        raise ValueError("it is neither a .json or .npy file nor keys with numbers of frames, such as w-80,jw-40")
    from diffusers.pipelines.sana_wm.cam_utils import action_string_to_c2w

    poses: Floats = action_string_to_c2w(keys)
    return poses
