"""Room demo: the pixels of the clips agree with the camera poses and intrinsics."""

import json

import numpy as np
import pytest

from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.samples import LocalFile
from wfm_ds.demos import room_data as room
from wfm_ds.errors import DataError


def projected(points, pose, lens):
    """Return the pixels [n,2] (x, y, measured from the edge of pixel 0) of points [n,3] seen by a camera."""
    seen = (points - pose[:3, 3]) @ pose[:3, :3]
    fx, fy, cx, cy = lens
    return np.stack([fx * seen[:, 0] / seen[:, 2] + cx, fy * seen[:, 1] / seen[:, 2] + cy], axis=1)


def test_pixels_of_tiles_agree_with_pose_and_intrinsics(tmp_path):
    assert room.write_room(tmp_path / "room") == room.NUM_CLIPS
    with pytest.raises(DataError, match="not an empty folder"):
        room.write_room(tmp_path / "room")
    clips, framing = tmp_path / "room" / "clips", Framing(height=32, width=32, num_frames=9, fps=8)
    middles = np.arange(-1.75, 2, 0.5)
    # on the wall in front of the camera
    tiles = np.array([[x, y, 2.0] for x in middles for y in (-0.75, -0.25, 0.25, 0.75)])
    dark = (np.floor(tiles[:, :2] / room.TILE).sum(1) % 2).astype(bool)
    checked = 0
    for number in (1, 7, 24):
        lens = json.loads((clips / f"{number:04}.json").read_text())["camera"]["intrinsics"]
        frames = load_media(LocalFile(str(clips / f"{number:04}.mkv")), framing, draw_centre)
        for pose, frame in zip(np.load(clips / f"{number:04}.c2w.npy"), frames, strict=True):
            x, y = projected(tiles, pose, lens).T
            inside = (x > 1) & (x < 31) & (y > 1) & (y < 31)
            colours = frame[np.floor(y[inside]).astype(int), np.floor(x[inside]).astype(int)].astype(int)
            wanted = np.where(dark[inside, None], 0.6, 1.0) * room.WALLS[2, 1]
            assert np.abs(colours - wanted).max() <= 1
            checked += inside.sum()
    assert checked > 200


def test_the_same_bytes_on_every_run(tmp_path):
    for name in ("one", "other"):
        room.write_room(tmp_path / name)
    for file in sorted((tmp_path / "one").rglob("*.*")):
        assert file.read_bytes() == (tmp_path / "other" / file.relative_to(tmp_path / "one")).read_bytes()
