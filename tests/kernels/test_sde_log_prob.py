import pytest
import torch

from each_case import check_each
from kernel_cases import (
    BACKENDS,
    BF16,
    FP16,
    FP32,
    GRADIENT,
    SHAPES,
    close,
    coefficients,
    exact_mean,
    normal,
    transition,
    vector,
)
from wfm_kernels import reference, sde_log_prob, sde_step

UPSTREAM = (1.3, -0.4, 2.0, 0.7, -1.1)  # different values, because ones would hide mixed-up samples


def stochastic_step(case, rows):
    z = normal(case["latents"].shape, 99)
    return sde_step(**case, coefficients=rows, noise=z, backend="torch").next_latents


def check(kind, case, backend):
    """Compare value and gradient with float64, with a separate upstream gradient for each sample."""
    rows = coefficients(kind, len(case["latents"]))
    after = stochastic_step(case, rows)
    case["velocity"].requires_grad_()
    log_prob = sde_log_prob(**case, next_latents=after, coefficients=rows, backend=backend)
    upstream = vector(UPSTREAM, len(after))
    (gradient,) = torch.autograd.grad(log_prob, case["velocity"], upstream)

    mean, std, v = exact_mean(kind, case)
    want = reference.sde_log_prob(kind, after.double().cpu(), mean, std)
    (exact,) = torch.autograd.grad(want, v, upstream.double().cpu())
    assert log_prob.dtype == FP32
    close(log_prob, want, 2e-6)
    assert gradient.dtype == case["velocity"].dtype
    close(gradient, exact, GRADIENT[gradient.dtype])


@pytest.mark.unit
@check_each("backend", BACKENDS)
@check_each("shape", SHAPES)
def test_value_and_gradient_equal_float64(shape, backend):
    check("flow_sde", transition(shape), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["flow_sde", "dance", "cps"])
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP16, FP32), (BF16, BF16), (FP16, FP16)])
def test_value_and_gradient_in_half_precision(dtypes, kind, backend):
    check(kind, transition((3, 4, 7, 5), *dtypes), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_noise_have_log_prob_zero_and_gradient_zero(backend):
    case, rows = transition((3, 20)), coefficients("flow_sde", 3, eta=0.0)
    case["velocity"].requires_grad_()
    log_prob = sde_log_prob(**case, next_latents=normal((3, 20), 4), coefficients=rows, backend=backend)
    log_prob.sum().backward()
    assert log_prob.tolist() == [0, 0, 0]
    assert not case["velocity"].grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_velocity_gets_a_gradient_once(backend):
    case, rows = transition((2, 9)), coefficients("cps", 2)
    after = stochastic_step(case, rows).requires_grad_()
    case["latents"].requires_grad_()
    assert not sde_log_prob(**case, next_latents=after, coefficients=rows, backend=backend).requires_grad
    case["velocity"].requires_grad_()
    log_prob = sde_log_prob(**case, next_latents=after, coefficients=rows, backend=backend)
    gradient = torch.autograd.grad(log_prob.sum(), case["velocity"], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="sde_log_prob_backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("latents", [FP32, BF16])
def test_a_sample_has_the_same_gradient_in_any_batch(latents):
    """Only the Triton backend guarantees this."""
    case, rows = transition((4, 1009), BF16, latents), coefficients("flow_sde", 4)
    after, upstream = stochastic_step(case, rows), vector(UPSTREAM, 4)

    def gradient(chosen):
        velocity = case["velocity"][chosen].clone().requires_grad_()
        log_prob = sde_log_prob(velocity, case["latents"][chosen], after[chosen], rows[chosen], backend="triton")
        log_prob.backward(upstream[chosen])
        return log_prob, velocity.grad

    whole, whole_gradient = gradient([0, 1, 2, 3])
    part, part_gradient = gradient([3, 1])
    assert torch.equal(part, whole[[3, 1]])
    assert torch.equal(part_gradient, whole_gradient[[3, 1]])


@pytest.mark.unit
@check_each(
    ("changes", "message"),
    [
        ({"next_latents": torch.zeros(2, 1)}, "one shape"),
        ({"next_latents": torch.zeros(2, 9).int()}, "next_latents must be float32"),
        ({"coefficients": torch.zeros(5).double()}, r"coefficients must be \[2, 5\]"),
    ],
)
def test_mismatched_arguments_are_refused(changes, message):
    inputs = {name: torch.zeros(2, 9) for name in ("velocity", "latents", "next_latents")}
    with pytest.raises(ValueError, match=message):
        sde_log_prob(**inputs | {"coefficients": torch.zeros(2, 5).double()} | changes)
