import pytest
import torch

from each_case import check_each
from kernel_cases import BACKENDS, BF16, FP16, FP32, GRADIENT, SHAPES, VALUE, close, in_double, nft_case, vector
from wfm_kernels import nft_loss, reference

UPSTREAM, UPSTREAM_KL = (1.3, -0.4, 2.0, 0.7, -1.1), (-0.6, 0.9, 0.2, 1.4, 0.5)


def check(case, beta, backend):
    """Compare every result and the gradient with float64, with separate upstream gradients for policy and kl."""
    result = nft_loss(**case, beta=beta, backend=backend)
    count = len(case["velocity"])
    upstreams = [vector(UPSTREAM, count), vector(UPSTREAM_KL, count)]
    exact = in_double(case)
    want = reference.nft_loss(**exact, beta=beta)
    parts = [(result.policy, want["policy"])]
    if "ref_velocity" in case:
        parts.append((result.kl, want["kl"]))
    else:
        assert result.kl is None
    for got, exactly in parts:
        assert got.dtype == FP32
        close(got, exactly, VALUE[FP32])
    assert result.stats.keys() == want.keys() - {"policy", "kl"}
    for name, got in result.stats.items():
        assert got.dtype == FP32
        assert not got.requires_grad
        close(got, want[name], VALUE[FP32])
    gradient = torch.autograd.grad([p for p, _ in parts], case["velocity"], upstreams[: len(parts)])[0]
    exact_upstreams = [u.double().cpu() for u in upstreams[: len(parts)]]
    exact_gradient = torch.autograd.grad([p for _, p in parts], exact["velocity"], exact_upstreams)[0]
    assert gradient.dtype == case["velocity"].dtype
    close(gradient, exact_gradient, GRADIENT[gradient.dtype])


@check_each("backend", BACKENDS)
@check_each("ref", [False, True])
@check_each("shape", SHAPES)
def test_everything_equals_the_published_form_in_float64(shape, ref, backend):
    check(nft_case(shape, ref=ref), 0.7, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP16, FP32), (BF16, BF16), (FP16, FP16)])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_everything_in_half_precision(beta, dtypes, backend):
    check(nft_case((4, 3, 7, 11), *dtypes, ref=beta == 1.0), beta, backend)


def loss_gradient(case, beta, backend):
    return torch.autograd.grad(nft_loss(**case, beta=beta, backend=backend).policy.sum(), case["velocity"])[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_policy_the_gradient_is_proportional_to_two_r_minus_one_whatever_beta(backend):
    case = nft_case((3, 4, 7, 5))
    case["old_velocity"] = case["velocity"].detach()
    unit = loss_gradient(case | {"reward_weight": vector((1.0,), 3)}, 1.0, backend)
    for r in (0.0, 0.25, 0.5, 0.875):
        for beta in (0.1, 1.0):
            got = loss_gradient(case | {"reward_weight": vector((r,), 3)}, beta, backend)
            torch.testing.assert_close(got, (2 * r - 1) * unit, rtol=1e-6, atol=1e-9)
    assert not loss_gradient(case | {"reward_weight": vector((0.5,), 3)}, 0.3, backend).any()
    up, down = (loss_gradient(case | {"reward_weight": vector((r,), 3)}, 0.3, backend) for r in (0.875, 0.125))
    assert torch.equal(up, -down)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exact_fit_has_loss_and_gradient_zero(backend):
    case = nft_case((2, 300))
    fit = case["noise"] - case["clean_latents"]
    case |= {"velocity": fit.clone().requires_grad_(), "old_velocity": fit}
    result = nft_loss(**case, beta=1.0, backend=backend)
    result.policy.sum().backward()
    assert result.policy.tolist() == [0, 0]
    assert not case["velocity"].grad.any()
    assert result.stats["weight_positive"].tolist() == pytest.approx([1e-5, 1e-5])


@pytest.mark.parametrize("latents", [FP32, BF16])
def test_a_sample_has_the_same_bits_in_any_batch(latents):
    """Only the Triton backend guarantees this."""
    case = nft_case((4, 3001), BF16, latents, ref=True)

    def results(chosen):
        part = {name: t.detach()[chosen] for name, t in case.items()}
        part["velocity"].requires_grad_()
        result = nft_loss(**part, beta=0.3, backend="triton")
        gradient = torch.autograd.grad((result.policy + result.kl).sum(), part["velocity"])[0]
        return [result.policy, result.kl, *result.stats.values(), gradient]

    whole = results([0, 1, 2, 3])
    for chosen in ([2], [3, 0]):
        for got, want in zip(results(chosen), whole, strict=True):
            assert torch.equal(got, want[chosen])


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_layout_does_not_change_the_result(backend):
    case = nft_case((2, 6, 10, 30), ref=True)
    want, want_gradient = nft_loss(**case, beta=1.0, backend=backend), loss_gradient(case, 1.0, backend)
    other = dict(case)
    for name in ("velocity", "old_velocity", "ref_velocity"):
        other[name] = case[name].detach().to(memory_format=torch.channels_last)
    for name in ("clean_latents", "noise"):
        other[name] = torch.cat([case[name].new_zeros(1), case[name].flatten()])[1:].view(2, 6, 10, 30)
    other["velocity"].requires_grad_()
    got = nft_loss(**other, beta=1.0, backend=backend)
    assert torch.equal(got.policy, want.policy)
    assert torch.equal(got.kl, want.kl)
    assert torch.equal(loss_gradient(other, 1.0, backend), want_gradient)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_velocity_gets_a_gradient_once(backend):
    case = nft_case((2, 9), ref=True)
    for name in ("old_velocity", "ref_velocity", "clean_latents", "noise"):
        case[name].requires_grad_()
    result = nft_loss(**case, beta=1.0, backend=backend)
    gradient = torch.autograd.grad(result.kl.sum(), case["velocity"], create_graph=True)[0]
    close(gradient, 2 / 9 * (case["velocity"] - case["ref_velocity"]), 2e-6)  # policy has no upstream gradient
    with pytest.raises(RuntimeError, match="nft_loss_backward"):
        gradient.sum().backward()
    nft_loss(**case, beta=1.0, backend=backend).policy.sum().backward()
    assert case["velocity"].grad is not None
    assert all(case[name].grad is None for name in ("old_velocity", "ref_velocity", "clean_latents", "noise"))


@pytest.mark.unit
@check_each(
    ("changes", "message"),
    [
        ({"reward_weight": torch.zeros(3, 1)}, r"reward_weight must be \[3\]"),
        ({"reward_weight": torch.zeros(1)}, r"reward_weight must be \[3\]"),
        ({"reward_weight": torch.zeros(3).double()}, "reward_weight must be torch.float32"),
        ({"sigma": torch.zeros(2)}, r"sigma must be \[3\]"),
        ({"sigma": torch.zeros(3, 1)}, r"sigma must be \[3\]"),
        ({"sigma": torch.zeros(3).long()}, "sigma must be torch.float32"),
        ({"old_velocity": torch.zeros(3, 1)}, "one shape"),
        ({"ref_velocity": torch.zeros(1, 9)}, "one shape"),
        ({"noise": torch.zeros(3, 9).long()}, "noise must be float32"),
        ({"beta": 0.0}, "beta must be above 0"),
        ({"beta": float("nan")}, "beta must be above 0"),
    ],
)
def test_wrong_shapes_types_and_settings_are_refused(changes, message):
    inputs = {name: torch.zeros(3, 9) for name in ("velocity", "old_velocity", "clean_latents", "noise")}
    inputs |= {"sigma": torch.zeros(3), "reward_weight": torch.zeros(3), "beta": 1.0}
    with pytest.raises(ValueError, match=message):
        nft_loss(**inputs | changes)
