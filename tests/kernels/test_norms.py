"""Fused norms and gates compared with float64, and with the eager operators that they replace."""

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional

from each_case import check_each
from kernel_cases import BACKENDS, BF16, DEVICE, FP16, FP32, FP64, close, normal
from wfm_kernels import (
    MAX_NORM_ROW,
    adaptive_layer_norm,
    adaptive_rms_norm,
    gate_residual,
    norm_torch,
    norm_triton,
    norms,
    rms_norm,
)

EPS = 1e-6
# Relative errors of one rounding of a result, and of several roundings of intermediate results.
ROUNDED, CHAIN = {FP32: 3e-6, BF16: 4e-3, FP16: 1e-3}, {FP32: 3e-6, BF16: 8e-3, FP16: 2e-3}
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
# Shape, and order of the dimensions in memory: one row, several rows per program, gaps, prime sizes, long rows.
ROWS = [
    ((1, 5), None),
    ((3, 7, 100), None),
    ((2, 5, 3, 64), None),
    ((2, 5, 3, 64), (0, 2, 1, 3)),
    ((2, 3, 2, 2, 48), (0, 3, 1, 2, 4)),
    ((3, 4, 40), (2, 0, 1)),
    ((5, 2100), None),
]
TOKENS = [((1, 1, 5), (1, 1, 5)), ((2, 37, 64), (2, 1, 64)), ((2, 5, 40), (2, 5, 40)), ((3, 4, 2100), (1, 1, 2100))]
TOKENS += [((2, 3, 48), (1, 3, 48))]


def leaf(shape, seed, dtype, order=None):
    """Return random values that require a gradient. order: the dimensions of the tensor in memory, outermost first."""
    x = normal(shape if order is None else [shape[dim] for dim in order], seed, dtype)
    if order is not None:
        x = x.permute([order.index(dim) for dim in range(len(order))])
    return x.detach().requires_grad_()


def compare(run, exact, inputs, upstream, tolerance):
    """Compare results and gradients of `run(*inputs)` with `exact` in float64."""
    got = run(*inputs)
    gradients = torch.autograd.grad(got, inputs, upstream)
    doubles = [x.detach().double().cpu().requires_grad_() for x in inputs]
    want = exact(*doubles)
    close(got, want, tolerance)
    for gradient, expected in zip(gradients, torch.autograd.grad(want, doubles, upstream.double().cpu()), strict=True):
        close(gradient, expected, tolerance)
    assert [gradient.dtype for gradient in gradients] == [x.dtype for x in inputs]
    assert [gradient.shape for gradient in gradients] == [x.shape for x in inputs]
    return got


def exact_rms_norm(x, weight=None):
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y if weight is None else y * weight


@check_each("backend", BACKENDS)
@check_each(("shape", "order"), ROWS)
def test_rms_norm_equals_float64(shape, order, backend):
    for dtype in (FP32, BF16, FP16):
        x, weight, upstream = leaf(shape, 0, dtype, order), leaf(shape[-1:], 1, dtype), normal(shape, 2, dtype)
        for round_first in (True, False):

            def run(*inputs, round_first=round_first):
                weight = inputs[1] if len(inputs) == 2 else None
                return rms_norm(inputs[0], weight, eps=EPS, round_first=round_first, backend=backend)

            got = compare(run, exact_rms_norm, (x, weight), upstream, CHAIN[dtype])
            assert got.stride() == torch.empty_like(x).stride()
            compare(run, exact_rms_norm, (x,), upstream, ROUNDED[dtype])


@check_each("backend", BACKENDS)
@check_each(("shape", "modulation"), TOKENS)
def test_modulated_norms_and_gates_equal_float64(shape, modulation, backend):
    for dtype, other in [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16)]:
        x, y = leaf(shape, 0, dtype), leaf(shape, 1, dtype)
        scale, shift = leaf(modulation, 2, other), leaf(modulation, 3, other)
        upstream, tolerance = normal(shape, 4, dtype), (CHAIN if other == dtype else ROUNDED)[dtype]
        for plus_one in (True, False) if dtype == FP32 else (True,):

            def exact(x, scale, shift, plus_one=plus_one):
                return functional.layer_norm(x, x.shape[-1:], eps=EPS) * (scale + plus_one) + shift

            def run(*inputs, plus_one=plus_one):
                return adaptive_layer_norm(*inputs, eps=EPS, plus_one=plus_one, backend=backend)

            if shape[-1] > 5:  # else the mean of few values cancels
                compare(run, exact, (x, scale, shift), upstream, tolerance)
        if other == dtype:
            compare(
                lambda *a: adaptive_rms_norm(*a, eps=EPS, backend=backend),
                lambda x, scale, shift: exact_rms_norm(x) * (1 + scale) + shift,
                (x, scale, shift),
                upstream,
                tolerance,
            )
        compare(
            lambda *a: gate_residual(*a, backend=backend), lambda x, y, g: x + g * y, (x, y, scale), upstream, tolerance
        )


def eager_results(x, y, weight, scale, shift):
    """Return the results of the operators of diffusers: RMSNorm, a gated residual, and norms with modulation."""
    normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    modulated = functional.layer_norm(x.to(scale.dtype), x.shape[-1:], eps=EPS) * (1 + scale) + shift
    results = [normed.to(x.dtype) * weight, (x + scale * y).to(x.dtype), modulated.to(x.dtype)]
    return [*results, normed.to(x.dtype) * (1 + scale) + shift] if scale.dtype == x.dtype else results


@check_each("backend", BACKENDS)
def test_intermediate_results_are_rounded_like_those_of_eager_operators(backend):
    for dtype, other in [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32)]:
        x, y, weight = normal((3, 50, 320), 0, dtype), normal((3, 50, 320), 1, dtype), normal((320,), 2, dtype)
        scale, shift = normal((3, 1, 320), 3, other), normal((3, 1, 320), 4, other)
        got = [
            rms_norm(x, weight, eps=EPS, backend=backend),
            gate_residual(x, y, scale, backend=backend),
            adaptive_layer_norm(x, scale, shift, eps=EPS, backend=backend),
        ]
        if other == dtype:
            got.append(adaptive_rms_norm(x, scale, shift, eps=EPS, backend=backend))
        for a, b in zip(got, eager_results(x, y, weight, scale, shift), strict=True):
            if backend == "torch":
                assert torch.equal(a, b)
            elif dtype != FP32:  # another order of a sum changes a rounding in half precision rarely
                assert (a != b).float().mean() < 0.002
                close(a, b, 1e-4)
        assert torch.equal(got[1], eager_results(x, y, weight, scale, shift)[1]), "a gate has no sum"


@check_each("backend", BACKENDS)
def test_gradients_that_are_not_needed_are_not_computed(backend, monkeypatch):
    calls = []
    module = {"torch": norm_torch, "triton": norm_triton}[backend]
    for name in ("rms_norm_backward", "adaptive_norm_backward", "gate_residual_backward"):
        original = getattr(module, name)

        def record(*arguments, original=original):
            calls.append([argument for argument in arguments if isinstance(argument, bool)])
            return original(*arguments)

        monkeypatch.setattr(module, name, record)
    x, y, weight = leaf((2, 9, 64), 0, FP32), leaf((2, 9, 64), 1, FP32), leaf((64,), 2, FP32)
    scale, shift = leaf((2, 1, 64), 3, FP32), leaf((2, 1, 64), 4, FP32)
    frozen, upstream = [t.detach() for t in (weight, scale, shift)], normal((2, 9, 64), 5)
    rms_norm(x, frozen[0], eps=EPS, backend=backend).backward(upstream)
    rms_norm(x.detach(), weight, eps=EPS, backend=backend).backward(upstream)
    adaptive_layer_norm(x, *frozen[1:], eps=EPS, backend=backend).backward(upstream)
    adaptive_layer_norm(x.detach(), frozen[1], shift, eps=EPS, backend=backend).backward(upstream)
    gate_residual(x, y.detach(), frozen[1], backend=backend).backward(upstream)  # the gradient of x is the upstream one
    gate_residual(x, y, frozen[1], backend=backend).backward(upstream)
    assert calls == [
        [True, True, False],  # round_first, for_x, for_weight
        [True, False, True],
        [True, True, True, False, False],  # center, plus_one, for_x, for_scale, for_shift
        [True, True, False, False, True],
        [True, False],  # for_y, for_gate
    ]


def test_a_row_does_not_depend_on_its_batch_or_memory_layout():
    """Only the Triton backend guarantees this."""
    x, y, scale = normal((4, 6, 96), 0, BF16), normal((4, 6, 96), 1, BF16), normal((4, 1, 96), 2, BF16)
    run = {
        "rms": lambda x, y, scale: rms_norm(x, scale[0, 0], eps=EPS, backend="triton"),
        "norm": lambda x, y, scale: adaptive_layer_norm(x, scale, scale, eps=EPS, backend="triton"),
        "rms with scale": lambda x, y, scale: adaptive_rms_norm(x, scale, scale, eps=EPS, backend="triton"),
        "gate": lambda x, y, scale: gate_residual(x, y, scale, backend="triton"),
    }
    for name, function in run.items():
        whole = function(x, y, scale)
        one = scale[:1] if name == "rms" else scale[2:3]
        assert torch.equal(function(x[2:3], y[2:3], one), whole[2:3])
        strided = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(function(strided, y, scale), whole)


@pytest.mark.parametrize("triton", [False, True])
def test_operators_are_sound(triton):
    x, y, weight = leaf((2, 3, 40), 0, BF16, (1, 0, 2)), leaf((2, 3, 40), 1, BF16), leaf((40,), 2, BF16)
    scale, shift = leaf((2, 1, 40), 3, FP32), leaf((2, 1, 40), 4, FP32)
    for inputs in ((x, weight), (x, None)):
        opcheck(norms.rms_norm_operator, (*inputs, EPS, True, triton), test_utils=CHECKS)
    for center in (True, False):
        opcheck(norms.adaptive_norm_operator, (y, scale, shift, EPS, center, True, triton), test_utils=CHECKS)
    opcheck(norms.gate_residual_operator, (y, y.detach(), scale, triton), test_utils=CHECKS)
    x, y, weight, scale = (t.detach() for t in (x, y, weight, scale))
    for wanted in ((True, True), (True, False), (False, True)):
        opcheck(norms.rms_norm_backward, (y, x, weight, EPS, True, *wanted, triton), test_utils=CHECKS[:2])
        arguments = (y, y, scale, EPS, True, True, *wanted, True, triton)
        opcheck(norms.adaptive_norm_backward, arguments, test_utils=CHECKS[:2])
        opcheck(norms.gate_residual_backward, (y, y, scale, *wanted, triton), test_utils=CHECKS[:2])


def test_formulas_in_float64_have_exact_gradients():
    x, y, weight = leaf((2, 3, 7), 0, FP64), leaf((2, 3, 7), 1, FP64), leaf((7,), 2, FP64)
    scale, shift = leaf((2, 1, 7), 3, FP64), leaf((2, 1, 7), 4, FP64)
    assert torch.autograd.gradcheck(lambda *a: rms_norm(*a, eps=EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda *a: adaptive_layer_norm(*a, eps=EPS), (x, scale, shift))
    assert torch.autograd.gradcheck(lambda *a: adaptive_rms_norm(*a, eps=EPS), (x, scale, shift))
    assert torch.autograd.gradcheck(gate_residual, (x, y, scale))


@pytest.mark.unit
def test_invalid_inputs_are_refused():
    x, row = torch.zeros(2, 3, 8), torch.zeros(2, 1, 8)
    for call, message in [
        (lambda: rms_norm(torch.zeros(2, MAX_NORM_ROW + 1), None, eps=EPS), "n at most 8192"),
        (lambda: rms_norm(torch.zeros(0, 8), None, eps=EPS), "not empty"),
        (lambda: rms_norm(x, torch.zeros(8).bfloat16(), eps=EPS), r"weight must be \[8\] torch\.float32"),
        (lambda: rms_norm(x, torch.zeros(1, 8), eps=EPS), r"weight must be \[8\]"),
        (lambda: adaptive_layer_norm(x[0], row, row, eps=EPS), r"x must be \[B, tokens, n\]"),
        (lambda: adaptive_layer_norm(x, row[..., :4], row, eps=EPS), r"scale must be \[2 or 1, 3 or 1, 8\]"),
        (lambda: adaptive_layer_norm(x, row, row[:1], eps=EPS), "must have the same shape and dtype"),
        (lambda: adaptive_layer_norm(x, row.half(), row.half(), eps=EPS), "scale must be torch.float32"),
        (lambda: adaptive_rms_norm(x.half(), row, row, eps=EPS), "must be torch.float16, got torch.float32"),
        (lambda: gate_residual(x, x[:1], row), "x and y must have the same shape and dtype"),
        (lambda: gate_residual(x, x, row.to(DEVICE).half()), "gate must be torch.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
