"""Data of the actions demo: true and wrong trajectories, and the rewards that a full training run must reach
(marked long, takes minutes)."""

import re
import subprocess
import sys

import numpy as np
import pytest

from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.demos import actions_data as brightness
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import ActionsRecipe
from wfm_reward.brightness_demo import HEIGHT, NUM_FRAMES, WIDTH, decode_moves, measure_pixel_changes

CLIP = Framing(height=HEIGHT, width=WIDTH, num_frames=NUM_FRAMES, clip="centre")


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(brightness, "NUM_CLIPS", 40)
    monkeypatch.setattr(brightness, "NUM_HELD_OUT", 10)
    assert brightness.write_brightness(tmp_path / "world") == 40
    return tmp_path / "world"


def share_followed(folder):
    reader = InputReader(
        input_ndims={"actions": 2},
        num_frames=NUM_FRAMES,
        actions=ActionsRecipe(),
        width=3,
        scaling=None,
        validate=lambda told: None,
    )
    found = []
    for sample in CaptionedFolder(folder, max_bad_fraction=0).samples:
        wanted = decode_moves(reader.load_prompt(sample, CLIP, draw_centre).inputs["actions"])
        changes = measure_pixel_changes(load_media(sample.media, CLIP, draw_centre))
        found.append((np.rint(changes[:, -1].mean(axis=1)) == wanted).all())
    return np.mean(found)


def test_half_of_the_training_clips_have_wrong_trajectories_and_held_out_clips_do_not(world, tmp_path):
    assert 0.3 < share_followed(world / "clips") < 0.7
    assert share_followed(world / "held_out") == 1
    with pytest.raises(DataError, match="not an empty folder"):
        brightness.write_brightness(world)


def test_the_same_bytes_on_every_run(world, tmp_path):
    brightness.write_brightness(tmp_path / "again")
    for file in sorted((tmp_path / "again").rglob("*.*")):
        assert file.read_bytes() == (world / file.relative_to(tmp_path / "again")).read_bytes()


@pytest.mark.slow
@pytest.mark.long
def test_reinforcement_learning_makes_the_model_follow_actions(tmp_path, root):
    folder = tmp_path / "quickstart"
    process = subprocess.run(
        [sys.executable, "-m", "wfm_ds", "quickstart", "--demo", "actions", "--output", str(folder)],
        cwd=root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    report = (folder / "report.md").read_text()
    before, after = map(float, re.search(r"chance .33\) \| ([\d.]+) \| ([\d.]+) \|", report).groups())
    assert 0.33 <= before <= 0.6
    assert after >= 0.8
