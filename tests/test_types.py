import numpy as np
import pytest

from each_case import check_each
from wfm_ds.types import MediaBatch, MediaItem, Score


def batch(media, count=2):
    return MediaBatch(media=media, sample_ids=["a", "b"][:count], prompts=["p"] * count, metadata=[{}] * count)


def test_batch_of_images_iterates_single_frames():
    media = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    items = list(batch(media))
    assert [i.sample_id for i in items] == ["a", "b"]
    assert items[1].frames.shape == (1, 4, 5, 3)
    np.testing.assert_array_equal(items[1].frames[0], media[1])


def test_batch_of_videos_iterates_clips():
    assert next(iter(batch(np.zeros((2, 7, 4, 5, 3), np.uint8)))).frames.shape == (7, 4, 5, 3)


@check_each(
    "media", [np.zeros((2, 4, 4, 3), np.float32), np.zeros((2, 4, 4), np.uint8), np.zeros((2, 3, 4, 4), np.uint8)]
)
def test_media_of_another_form_are_refused(media):
    with pytest.raises(ValueError, match="uint8"):
        batch(media)


def test_batch_whose_parts_differ_in_length_is_refused():
    with pytest.raises(ValueError, match="3 media, 2 sample ids"):
        batch(np.zeros((3, 4, 4, 3), np.uint8))


def test_a_score_has_either_a_number_or_a_reason():
    Score(sample_id="a", reward="r", value=0.0)
    Score(sample_id="a", reward="r", failure="why")
    for kwargs in ({}, {"value": 1.0, "failure": "why"}, {"value": float("nan")}, {"value": float("inf")}):
        with pytest.raises(ValueError, match="a"):
            Score(sample_id="a", reward="r", **kwargs)


def test_a_non_finite_value_becomes_a_named_failure():
    item = MediaItem(
        sample_id="a", frames=np.zeros((1, 1, 1, 3), np.uint8), fps=None, prompt="", metadata={}, reward="r"
    )
    assert item.score(0.5, part=1.0).parts == {"part": 1.0}
    assert "nan" in item.score(float("nan")).failure
