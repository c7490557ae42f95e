"""Rewards for conditioned videos: action following, camera following and consistency."""

import io
import time
from contextlib import closing

import numpy as np
import pytest

from reward_http import Server
from reward_samples import loaded, media_batch
from wfm_ds.errors import RewardError
from wfm_reward import registry
from wfm_reward.brightness_demo import decode_moves, encode_actions, frame_brightness, render_frames
from wfm_reward.rewards.action_following import following_scores as of_actions
from wfm_reward.rewards.camera_following import camera_scores as of_camera


def scored(reward, frames, **inputs):
    inputs = {name: np.asarray(array, np.float32) for name, array in inputs.items()}
    batch = media_batch(np.asarray(frames)[None], fps=8.0, inputs=[inputs])
    [score] = reward.score(batch)
    assert score.failure is not None or score.value in reward.outputs[reward.primary_output]
    assert all(value in reward.outputs[part] for part, value in score.parts.items())
    return score


MOVES = np.array([1, 0])


def test_the_recorded_continuation_of_the_action_world_has_the_best_reward():
    frames, actions = render_frames(frame_brightness(0.1, MOVES)), encode_actions(MOVES)
    assert decode_moves(actions).tolist() == MOVES.tolist()
    score = scored(loaded("brightness"), frames, actions=actions)
    assert score.value == pytest.approx(1, abs=0.04)
    assert (score.parts["following"], score.parts["still"]) == (1, 1)
    assert scored(loaded("seen_action"), frames, actions=actions).value == 1


def test_another_trajectory_and_a_short_step_lower_the_score():
    reward, judge = loaded("brightness"), loaded("seen_action")
    other = np.array([1, -1])  # one of two moves differs
    for one in (reward, judge):
        score = scored(one, render_frames(frame_brightness(0.1, other)), actions=encode_actions(MOVES))
        assert score.parts.get("following", score.value) == 0.5
    short = scored(reward, render_frames(frame_brightness(0.1, MOVES * 0.7)), actions=encode_actions(MOVES))
    assert short.parts["following"] == 1
    assert short.value == pytest.approx(1 - 0.3 * 5 / 8 / 2, abs=0.03)  # the error grows linearly over one of two moves


def test_wrong_frames_of_correct_mean_brightness_or_of_wrong_size_get_no_reward():
    frames = render_frames(frame_brightness(0.0, MOVES)).astype(int)
    stripes = np.where(np.arange(16) % 2, 60, -60)[None, None, :, None] * np.ones((9, 1, 1, 1), int)
    fooled = (frames + stripes).astype(np.uint8)
    score = scored(loaded("brightness"), fooled, actions=encode_actions(MOVES))
    assert score.parts["following"] == 1
    assert score.value < 0  # the reward itself is not fooled: it compares pixels
    assert scored(loaded("seen_action"), fooled, actions=encode_actions(MOVES)).value == 0
    for name in ("brightness", "seen_action"):
        narrow = scored(loaded(name), fooled[:, :, :8], actions=encode_actions(MOVES))
        assert "the video has shape [9, 8, 8, 3], not [9, 8, 16, 3]" in narrow.failure


def test_following_of_actions_is_a_mean_over_transitions():
    wanted = np.float32([[0, 0], [3, 4]])
    assert of_actions(wanted, wanted, 2.0) == {"value": 1.0, "mse": 0.0, "following_moving": 1.0}
    made = of_actions(wanted + np.float32([[0, 0], [2, 2]]), wanted, 2.0)
    assert made["value"] == pytest.approx((1 + np.exp(-2)) / 2)
    assert made["following_moving"] == pytest.approx(np.exp(-2))


@pytest.mark.slow
def test_a_frozen_cosmos3_reads_actions_from_frames(tiny_pipelines):
    """Random weights predict arbitrary but deterministic actions; other frames give other actions."""
    reward = loaded("action_following", model=str(tiny_pipelines("cosmos3")), domain="pusht", steps=2, dtype="float32")
    frames = np.random.default_rng(0).integers(0, 255, (5, 32, 32, 3), np.uint8)
    told = np.zeros((4, 2))
    one, again = (scored(reward, frames, actions=told) for _ in range(2))
    assert 0 < one.value < 1
    assert one.value == again.value
    assert scored(reward, 255 - frames, actions=told).parts["mse"] != one.parts["mse"]
    wide = scored(reward, frames, actions=np.zeros((4, 3)))
    assert "actions of pusht have 2 numbers, but the sample's have 3" in wide.failure
    assert "4 actions for 3 frames; need one less than frames" in scored(reward, frames[:3], actions=told).failure
    with pytest.raises(RewardError, match="temperature 0 and steps 2 must be above 0"):
        registry.create_reward("action_following", "cpu", {"temperature": 0, "steps": 2})


def turned(degrees, way=(0, 0, 0)):
    a = np.radians(degrees)
    pose = np.eye(4)
    pose[:2, :2] = [[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]]
    pose[:3, 3] = way
    return pose


def test_camera_following_depends_on_rotation_and_direction_but_not_scale():
    told = np.stack([turned(0), turned(10, (1, 0, 0)), turned(20, (2, 0, 0))])
    seen = told.copy()
    seen[:, :3, 3] *= 7
    assert of_camera(turned(50, (1, 2, 3)) @ seen, told, 10.0)["value"] == pytest.approx(1)
    off = np.stack([turned(0), turned(15, (0, 1, 0)), turned(25, (0, 2, 0))])
    made = of_camera(off, told, 10.0)
    assert made["degrees"] == pytest.approx(5)
    assert (made["rotation"], made["direction"]) == pytest.approx((np.exp(-0.5), 0.5))
    still = np.stack([turned(0), turned(0)])
    assert of_camera(still, still, 10.0) == {"value": 1.0, "rotation": 1.0, "degrees": 0.0}


def test_poses_are_estimated_by_a_service():
    told = np.stack([turned(10 * i, (i, 0, 0)) for i in range(3)])
    video, flat = np.ones((3, 4, 4, 3), np.uint8), told.copy()
    flat[0] = 0
    with closing(Server()) as server:
        reward = loaded("camera_following", url=server.url)
        reward.check_reachable()
        for poses, says in ((told, ""), (told[:2], "returned [2, 4, 4]"), (flat, "invalid rotation matrix")):
            server.answers = [(200, {"c2w": poses.tolist()})]
            score = scored(reward, video, c2w=told)
            assert says in score.failure if says else score.value == pytest.approx(1, abs=1e-3)
        np.testing.assert_array_equal(np.load(io.BytesIO(server.requests[0][2])), video)
        for answer in ((200, {"sorry": 1}), (200, b"{"), (503, {})):
            server.answers = [answer]
            assert "did not return poses" in scored(reward, video, c2w=told).failure
    assert "did not return poses" in scored(reward, video, c2w=told).failure
    reward.deadline_s = time.monotonic()
    assert "no time is left" in scored(reward, video, c2w=told).failure
    with pytest.raises(RewardError, match=r"reward camera_following: cannot connect to .*Connection refused"):
        reward.check_reachable()
    with pytest.raises(RewardError, match="must be an HTTP address"):
        registry.create_reward("camera_following", "cpu", {"url": "nowhere"})


def test_consistency_falls_with_flicker_blur_and_a_seam():
    reward, draw = loaded("consistency"), np.random.default_rng(0)
    wall = draw.integers(60, 180, (16, 16, 3)).astype(np.uint8)
    steady = np.stack([wall + np.uint8(2 * i) for i in range(6)])
    assert scored(reward, steady).value > 0.98
    flicker = np.stack([wall + np.uint8(2 * (i % 2)) for i in range(6)])
    assert scored(reward, flicker).parts["steadiness"] < 0.1
    blurred = np.stack([*steady[:4], *(np.full_like(wall, wall.mean()) for _ in range(2))])
    assert scored(reward, blurred).parts["sharpness"] < 0.05
    seam = np.stack([255 - wall, *steady[1:]])
    assert scored(reward, seam).parts["start_db"] < 15 < scored(reward, steady).parts["start_db"]
    assert "at least three are needed" in scored(reward, steady[:2]).failure
