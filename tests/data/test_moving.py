"""Data of the video demo: clips are read back without loss, and a third of the captions are wrong on purpose."""

from collections import Counter

import numpy as np
import pytest

from wfm_ds.cli.main import main as wfm
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.media import load_clip
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.prompts import load_prompts
from wfm_ds.demos.shapes_data import COPIES, HELD_OUT_PAIRS, NUM_WRONG, PAIRS
from wfm_reward.moving_demo import draw_clip, list_clips, render_frames

TRAINED_CLIPS = [clip for clip in list_clips() if (clip.shape, clip.direction) not in HELD_OUT_PAIRS]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moving") / "out"
    assert wfm(["data", "moving", str(folder)]) == 0
    return folder


def test_videos_are_read_as_they_were_drawn_and_most_captions_are_true(out):
    samples = CaptionedFolder(out / "videos", max_bad_fraction=0.0).samples
    assert len(samples) == len(TRAINED_CLIPS) * COPIES
    true = Counter()
    for number, sample in enumerate(samples):
        clip = TRAINED_CLIPS[number // COPIES]
        assert sample.prompt.metadata["shape"] == clip.shape
        true[clip] += sample.prompt.text == clip.prompt
        if number % COPIES in (0, COPIES - 1):
            read = load_clip(sample.media, Framing(height=32, width=32, num_frames=5), draw_centre)
            np.testing.assert_array_equal(read, render_frames(draw_clip(clip)))
    assert set(true.values()) == {COPIES - NUM_WRONG}


def test_no_caption_and_no_training_prompt_names_a_held_out_pair(out):
    captions = [sample.prompt for sample in CaptionedFolder(out / "videos", max_bad_fraction=0.0).samples]
    trained = {(prompt.metadata["shape"], prompt.metadata["direction"]) for prompt in captions}
    assert trained == {*PAIRS} - {*HELD_OUT_PAIRS}
    assert {prompt.text for prompt in captions} == {p.text for p in load_prompts(out / "prompts", "moving", "train")}
    for values in zip(*PAIRS, strict=True):  # shapes, directions
        assert {*values} <= {value for pair in trained for value in pair}


def test_validation_adds_the_held_out_pairs_after_the_training_prompts(out):
    train, validation = (load_prompts(out / "prompts", "moving", split) for split in ("train", "validation"))
    assert [prompt.text for prompt in validation[: len(train)]] == [prompt.text for prompt in train]
    held_out = [(prompt.metadata["shape"], prompt.metadata["direction"]) for prompt in validation[len(train) :]]
    assert held_out == HELD_OUT_PAIRS
    assert {prompt.text for prompt in validation} == {clip.prompt for clip in list_clips()}
    assert len(validation) == len(PAIRS)


def test_a_used_folder_is_not_changed(out, capsys):
    assert wfm(["data", "moving", str(out)]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
