"""Built-in data sets for tiny recipes: small versions of the demo data in the user's cache folder."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from wfm_ds.demos.actions_data import write_clip
from wfm_ds.demos.digits_data import write_digits
from wfm_ds.demos.files import write_json_rows, write_video
from wfm_ds.demos.long_actions_data import WalkSet, write_walk
from wfm_ds.demos.room_data import write_room
from wfm_ds.demos.shapes_data import FPS
from wfm_ds.demos.squares_data import write_edits, write_squares
from wfm_ds.errors import DataError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tiny import describe_tiny_recipe, tiny_data_folder
from wfm_ds.storage import atomic
from wfm_reward.moving_demo import NUM_VARIANTS, draw_clip, list_clips, render_frames

NUM_ACTION_CLIPS, NUM_WALK_CLIPS = 24, 3


def write_action_clips(folder: Path, *, is_long: bool = False) -> int:
    folder.mkdir(parents=True)
    for number in range(1, NUM_ACTION_CLIPS + 1):
        if is_long:
            write_walk(folder, number, WalkSet(folder.name, NUM_ACTION_CLIPS, NUM_WALK_CLIPS))
        else:
            write_clip(folder, number, wrong=0.0)
        path = folder / f"{number:04}.json"
        write_json_rows(path, [json.loads(path.read_text()) | {"domain": 0}])
    return NUM_ACTION_CLIPS


def write_controls(out: Path) -> int:
    """Write the clips of the moving-shapes demo with control videos, and return the number of clips.

    Videos with equal names in the folders target, control (a square in the position of the shape) and control_mask (the
    path of the square) belong together. The folders target and control have captions. pairs.jsonl has preference pairs;
    the rejected clip has another caption.
    """
    clips, pairs = list_clips(), []
    for number, clip in enumerate(clips, 1):
        square = draw_clip(replace(clip, shape="square"))
        path = np.broadcast_to(square.max(axis=0), square.shape)
        for name, cells in (("target", draw_clip(clip)), ("control", square), ("control_mask", path)):
            file = out / name / f"{number:02}.mkv"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_video(file, render_frames(cells), FPS)
            if name != "control_mask":
                file.with_suffix(".txt").write_text(clip.prompt + "\n")
        files = {name: f"{name}/{number:02}.mkv" for name in ("control", "control_mask")}
        rejected = (number - 1 + NUM_VARIANTS) % len(clips) + 1
        pair = {"prompt": clip.prompt, "chosen": f"target/{number:02}.mkv", "rejected": f"target/{rejected:02}.mkv"}
        pairs.append(pair | files)
    write_json_rows(out / "pairs.jsonl", pairs)
    return len(clips)


WRITERS: Mapping[str, Callable[[Path], int]] = MappingProxyType(
    {
        "digits": write_digits,
        "room": write_room,
        "brightness": write_action_clips,
        "walks": partial(write_action_clips, is_long=True),
        "squares": write_squares,
        "edits": write_edits,
        "controls": write_controls,
    }
)


def load_tiny_recipe(path: Path, overrides: Sequence[str], *, world_size: int, announce: bool = True) -> Recipe:
    """Load the tiny version of a recipe, and write its built-in data set if it is missing.

    announce: print what --tiny replaced. Raises RecipeError, or DataError if the data set cannot be written.
    """
    recipe = recipe_file.load_tiny_recipe(path, overrides, world_size=world_size)
    if announce:
        sys.stderr.write(f"{describe_tiny_recipe(recipe)}\n")
    write_tiny_data(recipe)
    return recipe


def write_tiny_data(recipe: Recipe) -> None:
    """Write the built-in data set of a tiny recipe, unless it exists. Several processes may call this at the same time.

    Raises DataError if the cache folder cannot be written.
    """
    root = tiny_data_folder()
    if not isinstance(recipe.data.path, str) or not Path(recipe.data.path).is_relative_to(root):
        return
    name = Path(recipe.data.path).relative_to(root).parts[0]
    if (root / name).is_dir():
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            if not (root / name).is_dir():
                with atomic.temporary_folder(root) as folder:
                    WRITERS[name](folder / name)
                    (folder / name).rename(root / name)
    except OSError as error:
        raise DataError(f"{root / name} cannot be written ({error}); set WFM_CACHE to a writable folder") from error
