import pytest
import torch

from each_case import check_each
from kernel_cases import (
    BACKENDS,
    BF16,
    BLOCK,
    DEVICE,
    FP16,
    FP32,
    KINDS,
    SHAPES,
    VALUE,
    close,
    coefficients,
    exact_mean,
    normal,
    transition,
)
from wfm_kernels import flow_noise, reference, sde_log_prob, sde_step


def seeds(count):
    return torch.arange(count, device=DEVICE) * 2**33 - 5


def both(case, rows, backend, **source):
    """Return a step, and the separately computed log-prob of its stored latents."""
    step = sde_step(**case, coefficients=rows, **source, backend=backend)
    again = sde_log_prob(**case, next_latents=step.next_latents, coefficients=rows, backend=backend)
    return step, again


def check_against_float64(kind, case, backend):
    z = normal(case["latents"].shape, 99)
    step, again = both(case, coefficients(kind, len(z)), backend, noise=z)
    mean, std, *_ = exact_mean(kind, case)
    dtype = case["latents"].dtype
    assert step.next_latents.dtype == dtype
    assert step.log_prob.dtype == FP32
    assert step.mean is None
    close(step.next_latents, mean + std * z.double().cpu(), VALUE[dtype])
    close(step.log_prob, reference.sde_log_prob(kind, step.next_latents.double().cpu(), mean, std), 2e-6)
    assert torch.equal(step.log_prob, again)


@pytest.mark.unit
@check_each("backend", BACKENDS)
@check_each("shape", SHAPES)
def test_step_equals_the_published_formula_in_float64(shape, backend):
    check_against_float64("flow_sde", transition(shape), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP16, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16)])
def test_every_sampler_in_every_precision(dtypes, kind, backend):
    check_against_float64(kind, transition((3, 4, 7, 5), *dtypes), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", ["seeds", "noise"])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (FP16, FP32), (BF16, BF16), (FP32, FP16)])
def test_training_reads_the_log_prob_of_the_rollout_bit_for_bit(dtypes, source, backend):
    for shape in [(3, 37, 41), (2, 3, 7, 11, 5), (1, 3 * BLOCK + 7)]:
        case = transition(shape, *dtypes)
        chosen = {"seeds": seeds(shape[0])} if source == "seeds" else {"noise": normal(shape, 5)}
        step, again = both(case, coefficients("flow_sde", shape[0]), backend, **chosen)
        assert step.log_prob.isfinite().all()
        assert torch.equal(step.log_prob, again)


@pytest.mark.parametrize("latents", [FP32, BF16])
def test_a_sample_has_the_same_bits_in_any_batch_and_at_any_place(latents):
    """Only the Triton backend guarantees this."""
    shape = (4, 3, 997)
    case, rows = transition(shape, BF16, latents), coefficients("dance", 4)
    whole = sde_step(**case, coefficients=rows, seeds=seeds(4), backend="triton")
    for chosen in ([2], [3, 0], [1, 1, 2, 0]):
        part = {k: t[chosen] for k, t in case.items()}
        step = sde_step(**part, coefficients=rows[chosen], seeds=seeds(4)[chosen], backend="triton")
        assert torch.equal(step.next_latents, whole.next_latents[chosen])
        assert torch.equal(step.log_prob, whole.log_prob[chosen])


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_add_the_noise_that_flow_noise_draws(backend):
    case, rows = transition((2, 333)), coefficients("cps", 2)
    _, drawn = flow_noise(case["latents"], torch.ones(2, device=DEVICE), seeds=seeds(2), backend=backend)
    by_seeds = sde_step(**case, coefficients=rows, seeds=seeds(2), backend=backend)
    by_noise = sde_step(**case, coefficients=rows, noise=drawn, backend=backend)
    assert torch.equal(by_seeds.next_latents, by_noise.next_latents)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_noise_are_deterministic_and_have_no_log_prob(backend):
    case = transition((2, 3, 50), BF16)
    rows = coefficients("flow_sde", 2, eta=torch.tensor([0.0, 0.7], dtype=torch.float64))
    one, two = (sde_step(**case, coefficients=rows, seeds=s, backend=backend) for s in (seeds(2), seeds(2) + 9))
    assert torch.equal(one.next_latents[0], two.next_latents[0])
    assert not torch.equal(one.next_latents[1], two.next_latents[1])
    assert one.log_prob[0] == 0
    assert one.log_prob[1] != 0
    mean, *_ = exact_mean("ode", case)
    close(one.next_latents[:1], mean[:1], 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("latents", [FP32, BF16])
def test_the_mean_is_float32_if_requested(latents, backend):
    case = transition((3, 700), BF16, latents)
    step = sde_step(**case, coefficients=coefficients("dance", 3), seeds=seeds(3), return_mean=True, backend=backend)
    mean, *_ = exact_mean("dance", case)
    assert step.mean.dtype == FP32
    close(step.mean, mean, 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_table_row_applies_to_the_whole_batch(backend):
    case, table = transition((3, 60)), coefficients("cps", 5)
    expanded = sde_step(**case, coefficients=table[2].expand(3, 5), seeds=seeds(3), backend=backend)
    copied = sde_step(**case, coefficients=table[2].repeat(3, 1), seeds=seeds(3), backend=backend)
    assert torch.equal(expanded.next_latents, copied.next_latents)
    assert torch.equal(expanded.log_prob, copied.log_prob)


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_layout_does_not_change_the_result(backend):
    case, rows = transition((2, 6, 10, 30)), coefficients("flow_sde", 2)
    want = sde_step(**case, coefficients=rows, seeds=seeds(2), backend=backend)
    channels_last = {k: t.to(memory_format=torch.channels_last) for k, t in case.items()}
    unaligned = {k: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for k, t in case.items()}
    assert unaligned["latents"].data_ptr() % 16
    for other in (channels_last, unaligned):
        got = sde_step(**other, coefficients=rows.T.contiguous().T, seeds=seeds(2), backend=backend)
        assert got.next_latents.is_contiguous()
        assert torch.equal(got.next_latents, want.next_latents)
        assert torch.equal(got.log_prob, want.log_prob)


def test_half_precision_is_rounded_to_nearest_even_by_the_kernel():
    x = normal((4, 4096), 3)
    velocity_alone = torch.tensor([[0, 1, 0, 0, 0]], dtype=torch.float64, device=DEVICE).expand(4, 5)
    for dtype in (BF16, FP16):
        zero = torch.zeros_like(x).to(dtype)
        got = sde_step(x, zero, velocity_alone, noise=zero, backend="triton").next_latents
        assert torch.equal(got, x.to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_has_no_gradient(backend):
    case = transition((2, 9))
    case["velocity"].requires_grad_()
    step = sde_step(**case, coefficients=coefficients("cps", 2), seeds=seeds(2), return_mean=True, backend=backend)
    assert not any(t.requires_grad for t in (step.next_latents, step.log_prob, step.mean))


@pytest.mark.unit
@check_each(
    ("changes", "message"),
    [
        ({"velocity": torch.zeros(2, 8)}, "one shape"),
        ({"velocity": torch.zeros(2, 9).long()}, "velocity must be float32, bfloat16 or float16"),
        ({"latents": torch.zeros(2, 9).double()}, "float64 is for verifying"),
        ({"noise": torch.zeros(2, 9)}, "either seeds or noise, got both"),
        ({"seeds": None}, "either seeds or noise, got neither"),
        ({"seeds": None, "noise": torch.zeros(2, 1)}, "one shape"),
        ({"seeds": torch.zeros(2, 1).long()}, r"seeds must be \[2\] int64"),
        ({"seeds": torch.zeros(2)}, r"seeds must be \[2\] int64"),
        ({"coefficients": torch.zeros(1, 5).double()}, r"coefficients must be \[2, 5\] float64"),
        ({"coefficients": torch.zeros(2, 4).double()}, r"coefficients must be \[2, 5\] float64"),
        ({"coefficients": torch.zeros(2, 5)}, r"coefficients must be \[2, 5\] float64"),
        ({"velocity": torch.zeros(2), "latents": torch.zeros(2)}, r"\[B, ...\]"),
        ({"velocity": torch.zeros(0, 9), "latents": torch.zeros(0, 9)}, "not empty"),
    ],
)
def test_mismatched_arguments_are_refused(changes, message):
    inputs = {"velocity": torch.zeros(2, 9), "latents": torch.zeros(2, 9), "seeds": torch.arange(2)}
    inputs |= {"coefficients": torch.zeros(2, 5).double()}
    with pytest.raises(ValueError, match=message):
        sde_step(**inputs | changes)
