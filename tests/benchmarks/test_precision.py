"""The study of base precisions: it covers every family, and fewer bits move a prediction further."""

from benchmarks.precision import SIZES, row
from wfm_ds.models.tiny import FAMILIES


def test_every_tiny_family_has_a_size():
    assert set(SIZES) == set(FAMILIES)


def test_fewer_bits_move_a_prediction_further():
    found = row("digits")
    assert 0 < found["int8 from bfloat16, %"] < found["fp8 from bfloat16, %"] < 8
    assert 0 < found["bfloat16 from float32, %"] < 2
