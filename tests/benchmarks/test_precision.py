"""The study of base precisions covers every family, and fewer bits change a prediction more."""

from benchmarks.precision import SIZES, family_row
from wfm_ds.models.tiny import FAMILIES


def test_every_tiny_family_has_a_size():
    assert set(SIZES) == set(FAMILIES)


def test_fewer_bits_change_a_prediction_more():
    found = family_row("digits")
    assert 0 < found["int8 from bfloat16, %"] < found["fp8 from bfloat16, %"] < 8
    assert 0 < found["bfloat16 from float32, %"] < 2
