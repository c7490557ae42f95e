"""What fewer bits of a base do to predictions: the study covers every family, and its order is that of the bits."""

from benchmarks.precision import SIZES, row
from wfm_ds.models.tiny import FAMILIES


def test_every_tiny_family_has_a_size():
    assert set(SIZES) == set(FAMILIES)


def test_fewer_bits_move_a_prediction_further():
    found = row("digits")
    assert 0 < found["int8 from bfloat16, %"] < found["fp8 from bfloat16, %"] < 8
    assert 0 < found["bfloat16 from float32, %"] < 2
