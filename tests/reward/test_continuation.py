"""The reward `continuation`: similarity to the recording, and how the recording reaches the reward."""

import numpy as np
import pytest

from each_case import check_each
from reward_http import started_client
from reward_samples import loaded, media_batch
from wfm_ds.errors import RewardError
from wfm_ds.rollout.rewards import submit_finite_samples
from wfm_ds.types import Prompt
from wfm_reward.rewards.continuation import Continuation
from wfm_reward.similarity import psnr, ssim

T, OVERLAP, H, W = 5, 2, 9, 11


def draw_videos(seed, count=3):
    """Return videos [B,T,H,W,3] and references of their last frames, with several distances."""
    draws = np.random.default_rng(seed)
    videos = draws.integers(0, 256, (count, T, H, W, 3)).astype(np.uint8)
    noise = draws.integers(-1, 2, (count, T - OVERLAP, H, W, 3)) * (9 * np.arange(count)).reshape(-1, 1, 1, 1, 1)
    return videos, np.clip(videos[:, OVERLAP:] + noise, 0, 255).astype(np.uint8)


def test_scores_equal_the_formulas_and_conditioning_frames_do_not_count():
    videos, references = draw_videos(0)
    changed = videos.copy()
    changed[:, :OVERLAP] = 0
    options = {"psnr": 2.0, "ssim": 0.5}
    for batch in (media_batch(videos, references=list(references)), media_batch(changed, references=list(references))):
        scores = loaded("continuation", **options).score(batch)
        for video, reference, score in zip(videos, references, scores, strict=True):
            decibels, similarity = (measure(video[OVERLAP:], reference) for measure in (psnr, ssim))
            assert score.parts == pytest.approx({"psnr_db": decibels, "ssim": similarity}, rel=1e-9)
            assert score.value == pytest.approx((2 * min(1, decibels / 40) + 0.5 * similarity) / 2.5, rel=1e-9)
    assert scores[0].value == 1.0  # equal to its reference
    assert scores[0].value > scores[1].value > scores[2].value
    (only, *_) = loaded("continuation", ssim=0.0).score(media_batch(videos, references=list(references)))
    assert only.parts == {"psnr_db": 60.0}


def test_lpips_is_the_mean_of_small_batches_of_frames(monkeypatch):
    """The network is replaced by a distance of single frames, because its weights are not available."""
    sizes = []

    def measure_distances(a, b):
        sizes.append(len(a))
        return (a - b).abs().mean((1, 2, 3), keepdim=True)

    reward = Continuation(psnr=0, ssim=0, lpips=1)
    monkeypatch.setattr(reward, "_lpips", measure_distances, raising=False)
    first, second = np.random.default_rng(2).integers(0, 256, (2, 21, H, W, 3)).astype(np.uint8)
    expected = np.abs(first.astype(np.float64) - second).mean() / 127.5
    assert reward.measure_lpips(first, second) == pytest.approx(expected, rel=1e-6)
    assert sizes == [8, 8, 5]


@check_each("options", [{"psnr": -1.0}, {"psnr": 0.0, "ssim": 0.0}])
def test_weights_without_a_sum_are_refused(options):
    with pytest.raises(RewardError, match="must be at least 0, and one above 0"):
        loaded("continuation", **options)


@pytest.mark.slow
def test_references_reach_the_service_and_only_rewards_that_need_them(tmp_path):
    """Next to the references, motion scores the videos alone."""
    videos, references = draw_videos(1)
    with started_client(tmp_path, {"name": "continuation"}, {"name": "motion"}) as client:
        assert client.reference_rewards == ["continuation"]
        client.submit(media_batch(videos, references=[*references[:2], None], fps=8.0))
        scores = client.wait()
        prompts = [Prompt(id="p", text="")] * 4
        parts = [*references[:2], "cannot be decoded", "not used"]
        ids, finite = ["s0", "s1", "s2", "s3"], [True, True, True, False]
        failed = submit_finite_samples(client, np.concatenate([videos, videos[:1]]), finite, ids, prompts, 8.0, parts)
        with_reasons = client.wait()
    expected = loaded("continuation").score(media_batch(videos, references=list(references)))
    moved = loaded("motion").score(media_batch(videos, fps=8.0))
    for i, sample_id in enumerate(("s0", "s1", "s2")):
        assert scores[sample_id]["motion"].value == pytest.approx(moved[i].value, rel=1e-12)
        if i < 2:
            assert scores[sample_id]["continuation"].value == pytest.approx(expected[i].value, rel=1e-12)
    assert scores["s2"]["continuation"].failure == "missing metadata or inputs: reference"
    assert with_reasons["s2"]["continuation"].failure == "cannot be decoded"
    assert with_reasons["s2"]["motion"].value == scores["s2"]["motion"].value
    assert all(with_reasons[i]["continuation"].value == scores[i]["continuation"].value for i in ("s0", "s1"))
    assert with_reasons.keys() == {"s0", "s1", "s2"}
    assert failed.keys() == {"s3"}
