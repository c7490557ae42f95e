"""Means over clips and drifts of scores, for known values."""

import numpy as np
import pytest

from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.data.pixels import Framing
from wfm_ds.data.samples import LocalFile, Sample
from wfm_ds.evaluation.clip_curves import average_clips, clip_curve, scores_by_clip
from wfm_ds.evaluation.recordings import Recordings
from wfm_ds.training.validation_metrics import clip_metrics, reward_metrics
from wfm_ds.types import Prompt, Score


def score(value, name="f", **parts):
    failure = None if value is not None else "broken"
    return {name: Score(sample_id="s", reward=name, value=value, failure=failure, parts=parts)}


def test_a_sample_has_the_mean_of_its_clips_and_fails_with_one_of_them():
    clips = [score(1.0, x=2.0), score(3.0, x=4.0, y=5.0), score(5.0, y=7.0)]
    (mean,) = average_clips(clips).values()
    assert (mean.value, mean.parts) == (3.0, {"x": 3.0, "y": 6.0})
    assert average_clips(clips[:1]) == clips[0]
    (failed,) = average_clips([score(1.0), score(None), score(2.0)]).values()
    assert (failed.value, failed.failure) == (None, "clip 2: broken")


def test_drift_compares_the_clips_of_the_same_sample():
    """The second sample has no score in the last clip, so its first clip does not count for the drift."""
    clips = [
        [score(1.0), score(100.0), score(3.0), score(5.0)],
        [score(2.0), score(None), score(3.0), score(7.0, y=1.0)],
    ]
    curve = clip_curve(scores_by_clip(clips, 2)["f"])
    assert [one.value for one in curve.means] == [pytest.approx((50.5 + 4) / 2), pytest.approx((2 + 5) / 2)]
    assert curve.drifts[0].value == pytest.approx((1 + 1) / 2)
    values = {"clip_01": 27.25, "clip_02": 3.5, "drift": 1.0, "y/clip_02": 1.0}
    metrics = clip_metrics(clips, 2, held_out_rewards=["f"])
    assert metrics == pytest.approx({f"val/held_out/f/{name}": value for name, value in values.items()})


def test_similarity_has_its_own_prefix():
    samples = [score(20.0, "recording/psnr"), score(None, "recording/psnr")]
    assert reward_metrics(samples, 1) == {"val/recording/psnr/mean": 20.0, "val/recording/psnr/failed": 1.0}


def test_images_have_no_recordings_and_unreadable_videos_fail(tmp_path):
    image, broken = (
        Sample(id=name, prompt=Prompt(id=name, text="a"), media=LocalFile(str(tmp_path / name)))
        for name in ("a.png", "b.mp4")
    )
    (tmp_path / "b.mp4").write_bytes(b"nothing")
    framing, layout = Framing(height=8, width=8, num_frames=1), ClipLayout(9, 1)
    assert Recordings.from_samples([image], framing, layout, 2) is None
    recordings = Recordings.from_samples([image, broken], framing, layout, 2)
    for name, message in (("a.png", "the sample is an image"), ("b.mp4", "cannot be decoded")):
        scores = recordings.score_clip("s", np.zeros((9, 8, 8, 3), np.uint8), 0, recordings.load(name))
        assert {one.value for one in scores.values()} == {None}
        assert message in scores["recording/psnr"].failure
