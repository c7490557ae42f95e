"""The video quickstart's data: every clip of the world, read back without loss, a third of it captioned wrong."""

from collections import Counter

import numpy as np
import pytest

from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.prompts import load_prompts
from wfm_ds.data.video import load_clip
from wfm_ds.demos.shapes_data import COPIES, NUM_WRONG, main
from wfm_reward.moving_demo import draw_clip, list_clips, render_frames


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moving") / "out"
    assert main([str(folder)]) == 0
    return folder


def test_videos_are_read_as_they_were_drawn_and_most_captions_are_true(out):
    samples = CaptionedFolder(out / "videos", max_bad_fraction=0.0).samples
    assert len(samples) == len(list_clips()) * COPIES
    true = Counter()
    for number, sample in enumerate(samples):
        clip = list_clips()[number // COPIES]
        assert sample.prompt.metadata["shape"] == clip.shape
        true[clip] += sample.prompt.text == clip.prompt
        if number % COPIES in (0, COPIES - 1):
            read = load_clip(sample.media, Framing(height=32, width=32, num_frames=5), draw_centre)
            np.testing.assert_array_equal(read, render_frames(draw_clip(clip)))
    assert set(true.values()) == {COPIES - NUM_WRONG}


def test_the_prompts_are_the_world_s_twelve(out):
    prompts = load_prompts(out / "prompts", "moving", "train")
    assert {prompt.text for prompt in prompts} == {clip.prompt for clip in list_clips()}
    assert len(prompts) == 12


def test_a_used_folder_is_left_alone(out, capsys):
    assert main([str(out)]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
