"""Image rewards on videos: the frames they score, the batches, and the score of the video."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.errors import RewardError
from wfm_ds.types import MediaBatch
from wfm_reward import registry
from wfm_reward.base import Range, Reward
from wfm_reward.frames import FrameRule, score_frames
from wfm_reward.worker import RewardScorer


class Level(Reward):
    """Scores the first pixel, fails on 255, and records the shapes of its batches."""

    name, media_types, primary_output = "level", frozenset({"image"}), "level"
    outputs = {"level": Range(0.0, 254.0)}  # noqa: RUF012

    def __init__(self, device="cpu", **options):
        super().__init__(device, **options)
        self.shapes = []

    def score(self, batch):
        self.shapes.append(batch.media.shape)
        return [self.level(item) for item in batch]

    def level(self, item):
        value = int(item.frames[0, 0, 0, 0])
        parts = {"odd": float(value % 2)} | ({"large": 1.0} if value >= 20 else {})
        return item.fail("too bright") if value == 255 else item.score(value, **parts)


def rows_of(count):
    return [{"id": f"s{i}", "prompt": "", "metadata": {}, "fps": 8.0} for i in range(count)]


def scored(videos, max_batch=16, **options):
    """Score videos given as lists of frame levels. Return the scores and the batch shapes that the reward received."""
    reward = Level("cpu", **options)
    media = [np.broadcast_to(np.array(v, np.uint8)[:, None, None, None], (len(v), 4, 6, 3)) for v in videos]
    return list(RewardScorer(reward, "mine", max_batch).score_items(rows_of(len(videos)), media)), reward.shapes


@check_each(
    ("frames", "values"),
    [
        ({}, [10, 5]),
        ({"frames": "first"}, [10, 5]),
        ({"frames": "last"}, [50, 9]),
        *(({"frames": rule}, [30, 7]) for rule in ("middle", "uniform:1", "uniform:2", "uniform:5", "uniform:99")),
    ],
)
def test_the_score_of_a_video_is_the_mean_of_the_selected_frames(frames, values):
    scores, _ = scored([[10, 20, 30, 40, 50], [5, 6, 7, 8, 9]], **frames)
    assert [s.value for s in scores] == values
    assert [(s.sample_id, s.reward) for s in scores] == [("s0", "mine"), ("s1", "mine")]


def test_a_failed_frame_fails_only_its_video_and_parts_of_all_frames_are_averaged():
    (bad, good), shapes = scored([[10, 255, 20], [10, 21, 32]], max_batch=4, frames="uniform:3")
    assert (bad.value, bad.failure, bad.parts) == (None, "frame 1: too bright", {})
    assert (good.value, good.parts) == (21.0, {"odd": pytest.approx(1 / 3)})
    assert shapes == [(4, 4, 6, 3), (2, 4, 6, 3)], "batches of at most four frames"


def test_images_are_scored_unchanged_with_any_rule():
    reward = Level("cpu", frames="last")
    images = [np.full((4, 6, 3), level, np.uint8) for level in (3, 4)]
    scores = RewardScorer(reward, "mine", 4).score_items(rows_of(2), images)
    assert [score.value for score in scores] == [3.0, 4.0]


@given(st.integers(1, 200), st.integers(1, 300))
def test_uniform_frames_are_the_middles_of_equal_parts(num_frames, parts):
    indices = FrameRule(f"uniform:{parts}").frame_indices(num_frames)
    count = min(parts, num_frames)
    assert len(set(indices)) == count
    # Frame i covers [i, i + 1) and contains the middle of part p.
    assert indices == [int((p + 0.5) * num_frames / count + 1e-9) for p in range(count)]
    assert [num_frames - 1 - i for i in reversed(indices)] == pytest.approx(indices, abs=1)


def test_frames_of_all_videos_share_batches_in_order():
    videos = MediaBatch(
        media=np.arange(24, dtype=np.uint8).reshape(4, 6, 1, 1, 1).repeat(3, axis=-1),
        sample_ids=list("abcd"),
        prompts=list("wxyz"),
        metadata=[{"i": i} for i in range(4)],
        fps=8.0,
        reward="mine",
    )
    seen = []

    def score_images(batch):
        assert (batch.media.ndim, batch.fps) == (4, None)
        seen.append([(i.sample_id, i.prompt, i.metadata["i"], int(i.frames[0, 0, 0, 0])) for i in batch])
        return [item.score(float(item.frames[0, 0, 0, 0])) for item in batch]

    scores = score_frames(score_images, videos, FrameRule("uniform:2"), max_batch=5)
    assert [s.value for s in scores] == [2.5, 8.5, 14.5, 20.5]
    assert [len(batch) for batch in seen] == [5, 3]
    assert seen[0][:3] == [("a", "w", 0, 1), ("a", "w", 0, 4), ("b", "x", 1, 7)]


@check_each(
    ("name", "options", "says"),
    [
        *(
            ("color", {"frames": rule}, r"reward color: frames is .*; it must be first, middle, last or uniform:N")
            for rule in ("all", "uniform", "uniform:0", "uniform:-1", "uniform:3.5", "", 3, None)
        ),
        ("color", {"frame": "first"}, "reward color has no option frame; its options are frames"),
        ("motion", {"frames": "first"}, "reward motion has no option frames; it has no options"),
    ],
)
def test_invalid_rules_and_options_are_refused_with_the_name_of_the_reward(name, options, says):
    with pytest.raises(RewardError, match=says):
        registry.create_reward(name, "cpu", options)
