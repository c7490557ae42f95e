"""`wfm data room OUT_DIR`: write the room demo, rendered clips of a tiled room with exact camera paths."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from wfm_ds.demos.files import SOUND_RATE, data_parser, require_new_folder, write_video
from wfm_ds.seeds import derive_seed

Floats = npt.NDArray[np.float64]

NUM_CLIPS, NUM_FRAMES, SIDE = 24, 9, 32  # SIDE: height and width in pixels
FPS = 8
LENS = (24.0, 24.0, SIDE / 2, SIDE / 2)  # fx, fy, cx, cy in pixels
HALF_SIZE = np.array([2.0, 1.0, 2.0])  # of the room in metres: x right, y down, z forward
TILE = 0.5
WALLS = np.array([[[220, 70, 60], [70, 170, 80]], [[230, 220, 200], [90, 80, 70]], [[60, 90, 210], [240, 180, 40]]])
MAX_TURN, MAX_STEP = 5.0, 0.08  # per frame, in degrees and metres
PITCH = 440.0  # of a camera that does not turn, in Hz


def camera_path(turn: float, forward: float, sideways: float) -> Floats:
    """Return camera-to-world poses [9 frames,4,4] in OpenCV axes.

    turn: rotation per frame in degrees. forward, sideways: motion per frame in metres.
    """
    poses = np.tile(np.eye(4), (NUM_FRAMES, 1, 1))
    for previous, pose, angle in zip(poses, poses[1:], np.radians(turn) * np.arange(1, NUM_FRAMES), strict=False):
        pose[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
        pose[:3, 3] = previous[:3, 3] + pose[:3, :3] @ [sideways, 0, forward]
    return poses


def render_frames(poses: Floats) -> npt.NDArray[np.uint8]:
    """Render the room from camera-to-world poses [F,4,4]. Returns frames [F,32,32,3]."""
    fx, fy, cx, cy = LENS
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    rays = np.stack([(x - cx) / fx, (y - cy) / fy, np.ones_like(x)], axis=-1)
    directions = np.einsum("fij,hwj->fhwi", poses[:, :3, :3], rays)
    directions = np.where(np.abs(directions) < 1e-9, 1e-9, directions)
    origins = poses[:, None, None, :3, 3]
    distances = (
        np.copysign(HALF_SIZE, directions) - origins
    ) / directions  # to the only wall per axis that the ray can hit
    axis = distances.argmin(axis=-1)
    points = origins + distances.min(axis=-1)[..., None] * directions
    along = np.arange(3) != axis[..., None]  # count tiles along the two axes of the wall
    dark = (np.floor(points / TILE) * along).sum(axis=-1) % 2
    is_forward = np.take_along_axis(directions, axis[..., None], axis=-1)[..., 0] > 0
    colours = WALLS[axis, is_forward.astype(np.int64)]
    frames: npt.NDArray[np.uint8] = np.rint(colours * (1 - 0.4 * dark[..., None])).astype(np.uint8)
    return frames


def make_sound(turn: float) -> npt.NDArray[np.int16]:
    """Return the sound of a clip, int16 [samples]: a tone, which is higher the more the camera turns right."""
    seconds = np.arange(NUM_FRAMES * SOUND_RATE // FPS) / SOUND_RATE
    tone = 8000 * np.sin(2 * np.pi * PITCH * 2 ** (turn / MAX_TURN) * seconds)
    sound: npt.NDArray[np.int16] = np.rint(tone).astype(np.int16)
    return sound


def write_clip(folder: Path, number: int) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Write NNNN.mkv, .c2w.npy and .json. Return (camera poses [9,4,4], frames [9,32,32,3])."""
    generator = np.random.Generator(np.random.PCG64(derive_seed(0, "room", number)))
    turn, forward, sideways = generator.uniform(-1, 1, 3) * [MAX_TURN, MAX_STEP, MAX_STEP]
    poses, stem = camera_path(turn, forward, sideways), f"{number:04}"
    frames = render_frames(poses)
    write_video(folder / f"{stem}.mkv", frames, FPS, make_sound(turn))
    np.save(folder / f"{stem}.c2w.npy", poses.astype(np.float32))
    prompt = f"a tiled room, the camera turns {'right' if turn > 0 else 'left'}"
    camera = {"c2w": f"{stem}.c2w.npy", "intrinsics": LENS}
    (folder / f"{stem}.json").write_text(json.dumps({"prompt": prompt, "camera": camera}) + "\n")
    return poses, frames


def write_room(out: Path) -> int:
    """Write the demo data and return the number of clips. Raises DataError if `out` is not empty.

    * clips/: clips NNNN.mkv with .c2w.npy and .json.
    * start.png, camera.json, prompts.txt: first frame, camera and prompt for `wfm generate`.
    """
    require_new_folder(out)
    (out / "clips").mkdir(parents=True)
    for number in range(1, NUM_CLIPS + 1):
        poses, frames = write_clip(out / "clips", number)
    Image.fromarray(frames[0]).save(out / "start.png")
    (out / "camera.json").write_text(json.dumps({"c2w": poses.round(6).tolist(), "intrinsics": LENS}) + "\n")
    (out / "prompts.txt").write_text("a tiled room\n")
    return NUM_CLIPS


parser = partial(
    data_parser,
    "Write the data of the room demo: clips with camera paths.",
    "new or empty folder for clips/ (SFT and RL) and an example camera",
)


def run(args: argparse.Namespace) -> None:
    sys.stdout.write(f"{write_room(args.out_dir)} clips with cameras in {args.out_dir / 'clips'}\n")
