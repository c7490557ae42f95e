"""Frames, actions and cameras of the clips of a long video."""

import itertools

import numpy as np
import pytest

from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.types import Prompt


@pytest.mark.parametrize(("num_frames", "overlap"), [(9, 1), (9, 5), (17, 1), (5, 4)])
def test_clips_cover_the_long_video_and_join_again(num_frames, overlap):
    layout, num_clips = ClipLayout(num_frames, overlap), 4
    total = layout.total_frames(num_clips)
    video = np.arange(2 * total, dtype=np.uint8).reshape(2, total, 1, 1, 1)
    starts = [layout.first_frame(k) for k in range(num_clips)]
    clips = [video[:, start : start + num_frames] for start in starts]
    assert all(clip.shape[1] == num_frames for clip in clips)
    np.testing.assert_array_equal(layout.join(clips), video)
    for before, after in itertools.pairwise(clips):
        np.testing.assert_array_equal(before[:, -overlap:], after[:, :overlap])


def test_the_inputs_of_a_clip_belong_to_its_frames():
    """Row i of the actions leads from frame i to frame i + 1."""
    layout = ClipLayout(9, 5)
    total = layout.total_frames(3)
    frame = np.arange(total, dtype=np.float32)
    inputs = {
        "actions": np.stack([frame[:-1], frame[1:]], 1),
        "c2w": np.broadcast_to(frame[:, None, None], (total, 4, 4)),
        "intrinsics": np.stack([frame] * 4, 1),
        "domain": np.float32(3),
    }
    for clip in range(3):
        cut = layout.slice_prompt(Prompt(id="a", text="b", inputs=inputs), clip).inputs
        frames = np.arange(4 * clip, 4 * clip + 9)
        np.testing.assert_array_equal(cut["actions"], np.stack([frames[:-1], frames[1:]], 1))
        np.testing.assert_array_equal(cut["c2w"][:, 0, 0], frames)
        np.testing.assert_array_equal(cut["intrinsics"][:, 2], frames)
        assert cut["domain"] == 3
    lens = {"intrinsics": np.ones(4, np.float32)}
    np.testing.assert_array_equal(layout.slice_inputs(lens, 2)["intrinsics"], lens["intrinsics"])


def test_a_single_clip_is_unchanged():
    layout, video = ClipLayout(9), np.zeros((1, 9, 2, 2, 3), np.uint8)
    assert layout.total_frames(1) == 9
    assert layout.join([video]) is video
