"""Read a camera path from a JSON file, an .npy file or a key sequence."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wfm_ds.data.npy import read_npy, to_float32
from wfm_ds.data.trajectories import INTRINSICS, POSES, Floats, require_rigid

KEY_SEQUENCE = re.compile(r"[a-z]+-\d+(,[a-z]+-\d+)*", re.IGNORECASE)


def read_camera(camera: str, lens: Sequence[float] | None) -> dict[str, Floats]:
    """Return float32 {c2w: [F,4,4], intrinsics: [4] or [F,4]}. Intrinsics are in pixels of the source and not rescaled.

    camera: a .json file with `c2w` and optional `intrinsics`, an .npy file with c2w, or keys with frame counts such as
    `w-80,jw-40` (as in the diffusers SANA-WM pipeline).
    lens: fx, fy, cx, cy. Required if the camera file has no intrinsics, otherwise not allowed.
    Raises ValueError for invalid content and OSError if a file cannot be read.
    """
    arrays = read_camera_file(Path(camera)) if Path(camera).suffix else {POSES: poses_from_keys(camera)}
    if (lens is None) == (INTRINSICS not in arrays):
        raise ValueError(
            "the camera file already has intrinsics" if lens else "the camera has no intrinsics: pass them too"
        )
    arrays |= {} if lens is None else {INTRINSICS: np.asarray(lens, np.float32)}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name} has NaN or infinite numbers")
    if arrays[POSES].ndim != 3 or arrays[POSES].shape[1:] != (4, 4):
        raise ValueError(f"c2w must be [F, 4, 4], got {list(arrays[POSES].shape)}")
    require_rigid(arrays[POSES])
    return arrays


def read_camera_file(file: Path) -> dict[str, Floats]:
    """Read c2w from an .npy file, or c2w and optional intrinsics from a .json file."""
    if file.suffix == ".npy":
        with file.open("rb") as stream:
            return {POSES: read_npy(stream)}
    try:
        content: Any = json.loads(file.read_bytes())
        names = [POSES, *([INTRINSICS] if INTRINSICS in content else [])]
        return {name: to_float32(np.asarray(content[name])) for name in names}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError("not a JSON object with c2w") from error


def poses_from_keys(keys: str) -> Floats:
    """Return c2w [N+1,4,4] for keys pressed during N frames: wasd moves, ijkl turns the camera. Raises ValueError."""
    if KEY_SEQUENCE.fullmatch(keys) is None:
        raise ValueError("neither a .json or .npy file nor keys with frame counts such as w-80,jw-40")
    from diffusers.pipelines.sana_wm.cam_utils import action_string_to_c2w

    poses: Floats = action_string_to_c2w(keys)
    return poses
