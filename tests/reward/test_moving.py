"""The reward of the video quickstart, the variant that can be fooled, and the held-out judge."""

import numpy as np
import pytest

from reward_samples import media_batch
from wfm_ds.errors import RewardError
from wfm_reward.moving_demo import (
    DIRECTIONS,
    NUM_VARIANTS,
    SHAPES,
    MovingClip,
    draw_clip,
    find_nearest_clip,
    list_clips,
    measure_cells,
    render_frames,
)
from wfm_reward.registry import create_reward
from wfm_reward.rewards.moving import MovingReward, NearestClip

WHAT = ("shape", "light")


def scores(reward, cells, asked):
    """Score clips `cells` [N, 5, 8, 8]; `asked` holds the requested MovingClip of each."""
    metadata = [{"shape": clip.shape, "direction": clip.direction} for clip in asked]
    batch = media_batch(np.stack([render_frames(one) for one in cells]), None, metadata)
    return reward.score(batch)


def test_real_clips_have_the_full_reward_and_held_out_score():
    world = list_clips()
    assert len(world) == len(SHAPES) * len(DIRECTIONS) * NUM_VARIANTS
    media = [draw_clip(clip) for clip in world]
    found = scores(MovingReward(), media, world)
    assert [score.value for score in found] == pytest.approx([1.0] * len(world), abs=1e-5)
    for score in scores(NearestClip(), media, world):
        assert score.value == 60
        assert all(score.parts[part] == 1 for part in ("shape", "direction", "both", "real"))
    for clip in world:
        assert find_nearest_clip(measure_cells(render_frames(draw_clip(clip)))) == (clip, 0)


def test_a_wrong_direction_and_a_still_have_no_reward():
    asked = MovingClip("square", "left", 0)
    wrong = [draw_clip(MovingClip("square", direction, 0)) for direction in ("right", "up", "down")]
    still = np.repeat(draw_clip(asked)[:1], 5, axis=0)
    values = [score.value for score in scores(MovingReward(), [*wrong, still], [asked] * 4)]
    assert values == pytest.approx([0] * 4, abs=1e-5)
    judged = scores(NearestClip(), wrong, [asked] * 3)
    assert [(s.parts["shape"], s.parts["direction"], s.parts["both"]) for s in judged] == [(1, 0, 0)] * 3


def test_a_larger_shape_hacks_only_the_naive_reward():
    asked = MovingClip("triangle", "down", 1)
    cells = np.stack([draw_clip(MovingClip("square", "down", 1)), draw_clip(asked)])
    guarded, naive = ([score.value for score in scores(MovingReward(what=what), cells, [asked] * 2)] for what in WHAT)
    assert naive[0] > naive[1] + 0.2
    assert guarded[0] < guarded[1] - 0.4
    judged, _ = scores(NearestClip(), cells, [asked] * 2)
    assert (judged.parts["shape"], judged.parts["direction"]) == (0, 1)


def test_blur_lowers_the_reward_and_the_held_out_score():
    asked = MovingClip("square", "up", 2)
    grey = 0.5 * draw_clip(asked)
    (score,), (judged,) = (scores(reward, [grey], [asked]) for reward in (MovingReward(), NearestClip()))
    assert score.value == pytest.approx(0.75, abs=0.01)  # 1 - .5 ** 2
    assert judged.parts["real"] == 0


def test_media_that_cannot_be_scored_are_named_failures():
    batch = media_batch(np.zeros((1, 4, 32, 32, 3), np.uint8), None, [{"shape": "square", "direction": "up"}])
    for reward in (MovingReward(), NearestClip()):
        assert "[4, 32, 32, 3], not [5, 32, 32, 3]" in reward.score(batch)[0].failure
    (score,) = scores(MovingReward(), [draw_clip(list_clips()[0])], [MovingClip("hexagon", "up", 0)])
    assert "unknown shape 'hexagon' or direction 'up'" in score.failure
    with pytest.raises(RewardError, match="what is 'size'; it must be shape or light"):
        create_reward("moving", "cpu", {"what": "size"})
