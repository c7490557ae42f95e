"""Control videos are cut, resized and cropped like their targets; unsuitable ones are rejected by name."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from clips import write_clip
from folders import write_tar
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.data.sample_sets import build_sample_set
from wfm_ds.errors import DataError
from wfm_ds.recipe.actions import ActionsRecipe
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.rollout.rewards import drop_media, resize_images
from wfm_ds.seeds import draw_uniform

FRAMES = 5
BOTH = ["control", "control_mask"]


def write_noise(path, count=40, fps=24, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 8, 12, 3), np.uint8).repeat(4, 1).repeat(4, 2)
    return write_clip(path, fps=fps, size=(32, 48), pictures=pixels)


def write_pair(folder, control="control/a.mp4", **clip):
    """Write a target and, unless `clip` has other options, a control video with the same frames."""
    write_noise(folder / "a.mp4")
    write_noise(folder / control, **clip)
    (folder / "a.json").write_text(json.dumps({"prompt": "noise", "control": control, "place": "here"}))
    return folder


def scan(path, kind="folder", inputs=("control",), **keys):
    return build_sample_set(DataRecipe(kind=kind, path=str(path), inputs=list(inputs), **keys), [str(path)]).samples


def reader(videos=("control",), **keys):
    return InputReader(input_ndims={}, num_frames=FRAMES, actions=ActionsRecipe(), validate=len, videos=videos, **keys)


def framing(**changes):
    return Framing(**{"height": 16, "width": 16, "num_frames": FRAMES} | changes)


def test_a_control_video_has_the_frames_and_the_crop_of_the_clip(tmp_path):
    (sample,) = scan(write_pair(tmp_path))
    for k, changes in enumerate([{}, {"fps": 8.0}, {"crop": "random"}, {"clip": "centre", "height": 32}] * 2):

        def draw(purpose, k=k):
            return draw_uniform(k, purpose)

        whole = framing(**changes)
        clip = load_media(sample.media, whole, draw)
        for part in (whole, framing(**changes, num_frames=1, span=FRAMES)):  # RL decodes fewer frames than it generates
            prompt = reader().load_prompt(sample, part, draw)
            assert np.array_equal(prompt.inputs["control"], clip)
    assert prompt.metadata == {"place": "here"}


def test_control_videos_are_found_in_all_layouts(tmp_path):
    folder, other = tmp_path / "set", tmp_path / "controls"
    write_noise(folder / "a.mp4", seed=1)
    (folder / "a.txt").write_text("noise")
    members = [("b.mp4", (folder / "a.mp4").read_bytes()), ("b.txt", b"noise")]
    for seed, name in enumerate(BOTH):
        made = write_noise(other / name / "a.mp4", seed=seed + 2)
        shutil.copy(made, folder / f"a.{name}.mp4")
        members.append((f"b.{name}.mp4", made.read_bytes()))
    table = write_noise(tmp_path / "table" / "a.mp4", seed=1).with_name("metadata.jsonl")
    row = {"file_name": "a.mp4", "text": "noise", "control": "../controls/control/a.mp4"}
    table.write_text(json.dumps(row | {"control_mask": "../controls/control_mask/a.mp4"}) + "\n")
    found = [
        scan(folder, "paired", BOTH),
        scan(folder, "paired", BOTH, input_folders={name: other / name for name in BOTH}, max_bad_fraction=1),
        scan(write_tar(tmp_path / "tar" / "a.tar", members), "webdataset", BOTH),
        scan(table.parent, "folder", BOTH),
    ]
    wanted = [load_media(sample, framing(), draw_centre) for sample in found[0][0].images.values()]
    for samples in found:
        prompt = reader(BOTH).load_prompt(samples[0], framing(), draw_centre)
        assert [np.array_equal(prompt.inputs[name], video) for name, video in zip(BOTH, wanted, strict=True)] == [1, 1]
    assert not np.array_equal(*wanted)


def test_without_targets_the_videos_of_the_data_are_the_controls(tmp_path):
    write_noise(tmp_path / "a.mp4")
    (tmp_path / "a.txt").write_text("noise")
    (sample,) = scan(tmp_path, target=False)
    prompt = reader(has_target=False).load_prompt(sample, framing(), draw_centre)
    assert np.array_equal(prompt.inputs["control"], load_media(sample.media, framing(), draw_centre))


def test_the_control_of_an_image_is_an_image(tmp_path):
    for name in ("a.png", "a.control.png"):
        Image.new("RGB", (16, 16), "red").save(tmp_path / name)
    (tmp_path / "a.txt").write_text("red")
    (sample,) = scan(tmp_path)
    one = framing(num_frames=1)
    assert reader().load_prompt(sample, one, draw_centre).inputs["control"].shape == (1, 16, 16, 3)
    with pytest.raises(BadMedia, match=r"control: .*a.control.png: an image, but clips have 5 frames \(bad_input\)"):
        reader().load_prompt(sample, framing(), draw_centre)


def test_control_videos_do_not_travel_in_headers():
    inputs = {name: np.zeros((1, 1, 1, 3), np.uint8) for name in BOTH} | {"actions": np.zeros((1, 2), np.float32)}
    assert drop_media(inputs).keys() == {"actions"}
    assert resize_images(inputs, (1, 1)) == {}


def test_control_videos_that_do_not_fit_their_target_are_rejected(tmp_path):
    cases = [
        ({"count": 39}, "control: has 39 frames, the target has 40"),
        ({"fps": 23}, r"control: its frame times differ from the target's by up to 0\.07 s: use the same frame rate"),
    ]
    for i, (clip, message) in enumerate(cases):
        (sample,) = scan(write_pair(tmp_path / str(i), **clip))
        with pytest.raises(BadMedia, match=rf"a\.mp4: {message} \(bad_input\)"):
            reader().load_prompt(sample, framing(), draw_centre)
    damaged = write_pair(tmp_path / "damaged")
    (damaged / "control" / "a.mp4").write_bytes(b"no video")
    (sample,) = scan(damaged)
    with pytest.raises(BadMedia, match=r"control: .*control/a.mp4: cannot be decoded.*\(bad_input\)"):
        reader().load_prompt(sample, framing(), draw_centre)
    short = write_pair(tmp_path / "short")
    with pytest.raises(BadMedia, match="too_short"):  # of the target
        reader().load_prompt(scan(short)[0], framing(num_frames=41), draw_centre)


def test_a_missing_control_and_a_target_that_is_its_own_control_are_refused(tmp_path):
    missing = write_pair(tmp_path / "missing")
    (missing / "control" / "a.mp4").unlink()
    with pytest.raises(DataError, match="1 of 1 samples are invalid"):
        scan(missing)
    own = write_pair(tmp_path / "own")
    (own / "a.json").write_text(json.dumps({"prompt": "noise", "control": "./a.mp4"}))
    with pytest.raises(DataError, match="an input image or video is the target itself, so the model would learn"):
        scan(own)
