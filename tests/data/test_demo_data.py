"""Data of the demos: exact files, disjoint splits, poses, and captions and trajectories that are wrong on purpose."""

import json
import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from folders import contents
from wfm_ds.cli.main import main
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.media import load_clip, load_media
from wfm_ds.data.pixels import Framing, draw_centre, load_image
from wfm_ds.data.preference_pairs import PairTable
from wfm_ds.data.prompts import load_prompts
from wfm_ds.data.samples import LocalFile
from wfm_ds.demos import actions_data, room_data
from wfm_ds.demos.digits_data import all_digits, reward_split, sft_split, write_digits
from wfm_ds.demos.shapes_data import COPIES, HELD_OUT_PAIRS, NUM_WRONG, PAIRS, write_moving
from wfm_ds.errors import DataError
from wfm_ds.recipe.actions import ActionsRecipe
from wfm_reward.brightness_demo import HEIGHT, NUM_FRAMES, WIDTH, decode_moves, measure_pixel_changes
from wfm_reward.moving_demo import draw_clip, list_clips, render_frames


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """Write the data of four demos. Return the folder."""
    folder = tmp_path_factory.mktemp("demos")
    assert write_digits(folder / "digits") == 899
    write_moving(folder / "moving")
    assert room_data.write_room(folder / "room") == room_data.NUM_CLIPS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actions_data, "NUM_CLIPS", 40)
        patch.setattr(actions_data, "NUM_HELD_OUT", 10)
        assert actions_data.write_brightness(folder / "actions") == 40
    return folder


def test_files_are_the_same_on_every_run_and_a_used_folder_is_refused(demos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(actions_data, "NUM_CLIPS", 40)
    monkeypatch.setattr(actions_data, "NUM_HELD_OUT", 10)
    writers = {"room": room_data.write_room, "actions": actions_data.write_brightness, "moving": write_moving}
    for name, write in writers.items():
        (tmp_path / name).mkdir()  # an empty folder may exist
        write(tmp_path / name)
        assert contents(tmp_path / name) == contents(demos / name)
        with pytest.raises(DataError, match="exists and is not an empty folder"):
            write(tmp_path / name)
    for name in ("digits", "moving"):
        assert main(["data", name, str(demos / name)]) == 2
        assert f"error: {demos / name} exists and is not an empty folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["data", "digits", str(tmp_path / "file" / "below")]) == 2


@pytest.mark.slow
def test_the_command_writes_the_same_digits_for_another_hash_seed(demos, tmp_path):
    command = [sys.executable, "-m", "wfm_ds", "data", "digits", str(tmp_path / "again")]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (made.returncode, made.stderr) == (0, "")
    assert "899 captioned images" in made.stdout
    assert contents(tmp_path / "again") == contents(demos / "digits")
    assert len(contents(tmp_path / "again")) == 2 * 899 + 2


def test_data_modules_import_nothing_heavy():
    heavy = ("torch", "diffusers", "deepspeed", "transformers", "sklearn")
    code = (
        "import sys, wfm_ds.data.captioned_folder, wfm_ds.data.order, wfm_ds.data.prompts, wfm_ds.demos.digits_data\n"
        f"loaded = [m for m in {heavy} if m in sys.modules]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_digits_are_the_even_ones_exactly_and_the_prompts_all_ten(demos):
    images, labels = sft_split()
    samples = CaptionedFolder(demos / "digits" / "images", max_bad_fraction=0.0).samples
    assert [s.id for s in samples] == [f"{i:04}" for i in range(1, 900)]
    for sample, image, label in zip(samples, images, labels, strict=True):
        assert (sample.prompt.text, sample.prompt.metadata) == (f"the digit {label}", {"label": label})
        pixels = load_image(sample.media, Framing(height=8, width=8), draw_centre)
        np.testing.assert_array_equal(pixels, np.repeat(image[..., None], 3, axis=2))
    prompts = load_prompts(demos / "digits" / "prompts", "digits", "train")
    assert [(p.text, p.metadata) for p in prompts] == [(f"the digit {d}", {"label": d}) for d in range(10)]


def test_the_chosen_digit_of_a_pair_shows_what_the_prompt_says(demos):
    samples, (_, labels) = PairTable(demos / "digits" / "pairs.jsonl", max_bad_fraction=0).samples, sft_split()
    assert len(samples) == 899
    for sample in samples:
        chosen, rejected = (int(labels[int(media.path.stem) - 1]) for media in sample.all_media)
        assert sample.prompt.text == f"the digit {chosen}"
        assert chosen != rejected


def test_the_splits_of_the_digits_share_no_image_and_miss_none():
    images, labels = all_digits()
    assert (images.min(), images.max(), images.dtype, len(images)) == (0, 255, np.uint8, 1797)
    for split, first in ((sft_split(), 0), (reward_split(), 1)):
        np.testing.assert_array_equal(split[0], images[first::2])
        np.testing.assert_array_equal(split[1], labels[first::2])
    assert not {image.tobytes() for image in images[::2]} & {image.tobytes() for image in images[1::2]}


def test_moving_shapes_are_read_as_they_were_drawn_and_most_captions_are_true(demos):
    clips = [clip for clip in list_clips() if (clip.shape, clip.direction) not in HELD_OUT_PAIRS]
    samples = CaptionedFolder(demos / "moving" / "videos", max_bad_fraction=0.0).samples
    assert len(samples) == len(clips) * COPIES
    true = Counter()
    for number, sample in enumerate(samples):
        clip = clips[number // COPIES]
        assert sample.prompt.metadata["shape"] == clip.shape
        true[clip] += sample.prompt.text == clip.prompt
        if number % COPIES in (0, COPIES - 1):
            read = load_clip(sample.media, Framing(height=32, width=32, num_frames=5), draw_centre)
            np.testing.assert_array_equal(read, render_frames(draw_clip(clip)))
    assert set(true.values()) == {COPIES - NUM_WRONG}


def test_only_the_validation_prompts_of_moving_shapes_name_held_out_pairs(demos):
    def pairs(prompts):
        return [(prompt.metadata["shape"], prompt.metadata["direction"]) for prompt in prompts]

    captions = [one.prompt for one in CaptionedFolder(demos / "moving" / "videos", max_bad_fraction=0.0).samples]
    train, validation = (load_prompts(demos / "moving" / "prompts", "moving", s) for s in ("train", "validation"))
    assert set(pairs(captions)) == {*PAIRS} - {*HELD_OUT_PAIRS}
    assert {prompt.text for prompt in captions} == {prompt.text for prompt in train}
    for values in zip(*PAIRS, strict=True):  # shapes, directions
        assert {*values} <= {value for pair in pairs(captions) for value in pair}
    assert [prompt.text for prompt in validation[: len(train)]] == [prompt.text for prompt in train]
    assert pairs(validation[len(train) :]) == HELD_OUT_PAIRS
    assert {prompt.text for prompt in validation} == {clip.prompt for clip in list_clips()}
    assert len(validation) == len(PAIRS)


def project_points(points, pose, lens):
    """Return the pixels [n,2] (x, y, measured from the edge of pixel 0) of points [n,3] seen by a camera."""
    seen = (points - pose[:3, 3]) @ pose[:3, :3]
    fx, fy, cx, cy = lens
    return np.stack([fx * seen[:, 0] / seen[:, 2] + cx, fy * seen[:, 1] / seen[:, 2] + cy], axis=1)


def test_pixels_of_the_room_agree_with_pose_and_intrinsics(demos):
    clips, framing = demos / "room" / "clips", Framing(height=32, width=32, num_frames=9, fps=8)
    middles = np.arange(-1.75, 2, 0.5)
    # on the wall in front of the camera
    tiles = np.array([[x, y, 2.0] for x in middles for y in (-0.75, -0.25, 0.25, 0.75)])
    dark = (np.floor(tiles[:, :2] / room_data.TILE).sum(1) % 2).astype(bool)
    checked = 0
    for number in (1, 7, 24):
        lens = json.loads((clips / f"{number:04}.json").read_text())["camera"]["intrinsics"]
        frames = load_media(LocalFile(str(clips / f"{number:04}.mkv")), framing, draw_centre)
        for pose, frame in zip(np.load(clips / f"{number:04}.c2w.npy"), frames, strict=True):
            x, y = project_points(tiles, pose, lens).T
            inside = (x > 1) & (x < 31) & (y > 1) & (y < 31)
            colours = frame[np.floor(y[inside]).astype(int), np.floor(x[inside]).astype(int)].astype(int)
            wanted = np.where(dark[inside, None], 0.6, 1.0) * room_data.WALLS[2, 1]
            assert np.abs(colours - wanted).max() <= 1
            checked += inside.sum()
    assert checked > 200


def test_half_of_the_training_clips_have_wrong_trajectories_and_held_out_clips_do_not(demos):
    clip = Framing(height=HEIGHT, width=WIDTH, num_frames=NUM_FRAMES, clip="centre")
    actions = {"input_ndims": {"actions": 2}, "actions": ActionsRecipe(), "width": 3}
    reader = InputReader(num_frames=NUM_FRAMES, validate=len, **actions)
    shares = []
    for name in ("clips", "held_out"):
        followed = []
        for sample in CaptionedFolder(demos / "actions" / name, max_bad_fraction=0).samples:
            wanted = decode_moves(reader.load_prompt(sample, clip, draw_centre).inputs["actions"])
            changes = measure_pixel_changes(load_media(sample.media, clip, draw_centre))
            followed.append((np.rint(changes[:, -1].mean(axis=1)) == wanted).all())
        shares.append(np.mean(followed))
    assert 0.3 < shares[0] < 0.7
    assert shares[1] == 1


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
