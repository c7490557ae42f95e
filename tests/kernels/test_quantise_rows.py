"""Row quantization to float8 e4m3, compared with float64 and the table of all 256 float8 values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from each_case import check_each
from kernel_cases import BACKENDS, BF16, DEVICE, FP16, FP32, FP64, normal
from wfm_kernels import quantise_rows

E4M3 = torch.float8_e4m3fn
TABLE = torch.arange(256, dtype=torch.uint8).view(E4M3).to(FP64)
VALUES = TABLE[:0x7F]  # the values from 0 to 448 in byte order


def nearest(y):
    """Return the byte of the value nearest to |y| <= 448 (float64), ties to even, by a search in the table."""
    high = torch.searchsorted(VALUES, y).clamp(1, len(VALUES) - 1)
    low = high - 1
    below, above = y - VALUES[low], VALUES[high] - y
    even = torch.where(low % 2 == 0, low, high)
    return torch.where(below < above, low, torch.where(above < below, high, even))


def quantise_by_definition(x):
    """Return bytes and scales by the definition: only the division is rounded to float32."""
    rows = x.cpu().to(FP32)
    greatest = rows.abs().amax(-1, keepdim=True)
    scale = torch.where(greatest == 0, torch.ones_like(greatest), (greatest / 448).clamp_min(2.0**-126))
    y = (rows.to(FP64) / scale.to(FP64)).to(FP32).to(FP64)
    sign = torch.signbit(rows).to(torch.int64) * 128
    return (nearest(y.abs().clamp_max(448)) + sign).to(torch.uint8), scale


def check(x, backend):
    q, scale = quantise_rows(x, backend=backend)
    want, want_scale = quantise_by_definition(x)
    assert q.dtype == E4M3
    assert q.shape == x.shape
    assert torch.equal(scale.cpu(), want_scale)
    assert torch.equal(q.cpu().view(torch.uint8), want)


@pytest.mark.unit
@check_each("backend", BACKENDS)
@check_each("shape", [(1,), (7,), (3, 64), (2, 5, 513), (2, 1536), (1, 20_480)])
def test_values_are_the_nearest_and_scales_reach_the_greatest(shape, backend):
    for dtype in (FP32, BF16, FP16):
        x = normal(shape, 3, dtype)
        check(x, backend)
        q, scale = quantise_rows(x, backend=backend)
        assert (q.float().abs().amax(-1) == 448).all()
        error = (q.double() * scale.double() - x.double()).norm() / x.double().norm()
        assert error < 0.04 or x.shape[-1] < 64


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_value_and_every_half_between_two(backend):
    halves = (VALUES[1:] + VALUES[:-1]) / 2
    x = torch.cat(
        [VALUES, halves, halves.float().nextafter(torch.tensor(9e9)), halves.float().nextafter(-halves.float())]
    )
    x = torch.cat([x, -x]).to(FP32).to(DEVICE).unsqueeze(0)
    check(x, backend)  # the maximum is 448, so the scale is 1
    assert torch.equal(quantise_rows(x, backend=backend)[1].cpu(), torch.ones(1, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_zeros_of_the_smallest_and_of_the_largest_numbers(backend):
    rows = torch.zeros(5, 32, device=DEVICE)
    rows[1, 3] = 1e-45  # subnormal
    rows[2] = 2.0**-120
    rows[3, ::2] = torch.finfo(FP32).max
    rows[4, 0] = -0.0
    check(rows, backend)
    assert quantise_rows(rows, backend=backend)[1][0] == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_remain_in_their_row(bad, backend):
    x = normal((3, 40), 0)
    q, scale = quantise_rows(x, backend=backend)
    spoilt = x.clone()
    spoilt[1, 7] = bad
    bad_q, bad_scale = quantise_rows(spoilt, backend=backend)
    assert not (bad_q[1].float() * bad_scale[1]).isfinite().any()
    for row in (0, 2):
        assert torch.equal(bad_q[row].view(torch.uint8), q[row].view(torch.uint8))
        assert torch.equal(bad_scale[row], scale[row])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_batch_or_memory_layout(backend):
    x = normal((4, 6, 96), 1, BF16)
    whole = quantise_rows(x, backend=backend)
    alone = quantise_rows(x[2, 3], backend=backend)
    strided = quantise_rows(x.transpose(0, 1).contiguous().transpose(0, 1), backend=backend)
    assert torch.equal(alone[0].view(torch.uint8), whole[0][2, 3].view(torch.uint8))
    assert torch.equal(alone[1], whole[1][2, 3])
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(strided, whole, strict=True))


@settings(max_examples=200)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=33))
def test_any_numbers(row):
    for backend in BACKENDS[:1]:
        check(torch.tensor([row], dtype=FP32, device=DEVICE), backend)


@pytest.mark.unit
@check_each(
    "x",
    [
        torch.zeros(2, 3).long(),
        torch.zeros(2, 3).double(),
        torch.zeros(0, 3),
        torch.tensor(1.0),
        torch.zeros(1, 32_769),
    ],
)
def test_invalid_inputs_are_refused(x):
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., K\] float32, bfloat16 or float16, not empty"):
        quantise_rows(x)
