"""`python -m wfm_ds.data.room OUT_DIR`: clips of a tiled room and the paths of the camera that saw them, drawn here.

Small enough for tests and for a first try of a model that is told a camera; poses and lens are those of the drawing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from wfm_ds.data.written import require_new, write_video
from wfm_ds.program import program
from wfm_ds.seeds import derive_seed

Floats = npt.NDArray[np.float64]

NUM_CLIPS, NUM_FRAMES, SIDE = 24, 9, 32  # of square pixels
FPS = 8
LENS = (24.0, 24.0, SIDE / 2, SIDE / 2)  # fx, fy, cx, cy in pixels
HALF = np.array([2.0, 1.0, 2.0])  # the room, from its middle to its walls, in metres: x right, y down, z ahead
TILE = 0.5
WALLS = np.array([[[220, 70, 60], [70, 170, 80]], [[230, 220, 200], [90, 80, 70]], [[60, 90, 210], [240, 180, 40]]])
TURN, STEP = 5.0, 0.08  # at most, of a frame: degrees, metres


def path_of(turn: float, ahead: float, aside: float) -> Floats:
    """Return camera-to-world poses [9,4,4] with the axes of OpenCV, of a camera that turns by so many degrees a frame
    and goes so many metres."""
    poses = np.tile(np.eye(4), (NUM_FRAMES, 1, 1))
    for before, pose, angle in zip(poses, poses[1:], np.radians(turn) * np.arange(1, NUM_FRAMES), strict=False):
        pose[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
        pose[:3, 3] = before[:3, 3] + pose[:3, :3] @ [aside, 0, ahead]
    return poses


def seen(poses: Floats) -> npt.NDArray[np.uint8]:
    """Return what cameras [F,4,4] in the room see, frames [F,32,32,3]."""
    fx, fy, cx, cy = LENS
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    rays = np.stack([(x - cx) / fx, (y - cy) / fy, np.ones_like(x)], axis=-1)
    ways = np.einsum("fij,hwj->fhwi", poses[:, :3, :3], rays)
    ways = np.where(np.abs(ways) < 1e-9, 1e-9, ways)
    eyes = poses[:, None, None, :3, 3]
    distances = (np.copysign(HALF, ways) - eyes) / ways  # to each of the three walls that a ray may meet
    axis = distances.argmin(axis=-1)
    points = eyes + distances.min(axis=-1)[..., None] * ways
    along = np.arange(3) != axis[..., None]  # a wall's tiles are counted along its own two axes
    dark = (np.floor(points / TILE) * along).sum(axis=-1) % 2
    ahead = np.take_along_axis(ways, axis[..., None], axis=-1)[..., 0] > 0
    colours = WALLS[axis, ahead.astype(np.int64)]
    frames: npt.NDArray[np.uint8] = np.rint(colours * (1 - 0.4 * dark[..., None])).astype(np.uint8)
    return frames


def write_clip(folder: Path, number: int) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Write NNNN.mkv, .c2w.npy and .json; return the camera's poses and its frames."""
    draw = np.random.Generator(np.random.PCG64(derive_seed(0, "room", number)))
    turn, ahead, aside = draw.uniform(-1, 1, 3) * [TURN, STEP, STEP]
    poses, stem = path_of(turn, ahead, aside), f"{number:04}"
    frames = seen(poses)
    write_video(folder / f"{stem}.mkv", frames, FPS)
    np.save(folder / f"{stem}.c2w.npy", poses.astype(np.float32))
    prompt = f"a tiled room, the camera turns {'right' if turn > 0 else 'left'}"
    camera = {"c2w": f"{stem}.c2w.npy", "intrinsics": LENS}
    (folder / f"{stem}.json").write_text(json.dumps({"prompt": prompt, "camera": camera}) + "\n")
    return poses, frames


def write_room(out: Path) -> int:
    """Write clips/NNNN.mkv with .c2w.npy and .json; of the last of them start.png, its first frame, camera.json and
    prompts.txt, for `wfm generate`. Return the number of clips. The same bytes on every run with the same versions.

    Raises DataError if the folder exists and is not empty.
    """
    require_new(out)
    (out / "clips").mkdir(parents=True)
    for number in range(1, NUM_CLIPS + 1):
        poses, frames = write_clip(out / "clips", number)
    Image.fromarray(frames[0]).save(out / "start.png")
    (out / "camera.json").write_text(json.dumps({"c2w": poses.round(6).tolist(), "intrinsics": LENS}) + "\n")
    (out / "prompts.txt").write_text("a tiled room\n")
    return NUM_CLIPS


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="wfm_ds.data.room", description="Write clips of a room with the camera's paths.")
    p.add_argument("out_dir", type=Path, help="a new or empty folder; gets clips/ (SFT and RL) and a camera for one")
    return p


def run(args: argparse.Namespace) -> None:
    sys.stdout.write(f"{write_room(args.out_dir)} clips with cameras in {args.out_dir / 'clips'}\n")


if __name__ == "__main__":
    sys.exit(main())
