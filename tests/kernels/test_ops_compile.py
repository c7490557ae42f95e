"""torch's requirements for custom operators, and the selection of the backend."""

import logging

import pytest
import torch
from torch.library import opcheck

from kernel_cases import BACKENDS, BF16, DEVICE, FP64, coefficients, nft_case, normal, transition, vector
from wfm_kernels import flow_noise, library, nft_loss, ops, sde_log_prob, sde_step, torch_backend

CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
TRITON = [False, True]


def seeds(count):
    return torch.arange(count, device=DEVICE)


@pytest.mark.parametrize("triton", TRITON)
def test_sde_operators_are_sound(triton):
    case, rows = transition((2, 3, 7), BF16), coefficients("cps", 2)
    inputs, noise = (case["velocity"], case["latents"], rows), normal((2, 3, 7), 9)
    opcheck(library.sde_step, (*inputs, None, noise, True, triton), test_utils=CHECKS)
    opcheck(library.sde_step, (*inputs, seeds(2), None, False, triton), test_utils=CHECKS)
    case["velocity"].requires_grad_()
    given = (case["velocity"], case["latents"], noise, rows)
    opcheck(library.sde_log_prob, (*given, triton), test_utils=CHECKS)
    back = (torch.ones(2, device=DEVICE), *[t.detach() for t in given], triton)
    opcheck(library.sde_log_prob_backward, back, test_utils=CHECKS)


@pytest.mark.parametrize("triton", TRITON)
@pytest.mark.parametrize("ref", [False, True])
def test_nft_operators_are_sound(ref, triton):
    case = nft_case((2, 3, 7), ref=ref)
    inputs = (*[t for name, t in case.items() if name != "ref_velocity"], case.get("ref_velocity"))
    opcheck(library.nft_loss, (*inputs, 0.5, triton), test_utils=CHECKS)
    plain = [None if t is None else t.detach() for t in inputs]
    stats = library.nft_loss(*plain, 0.5, triton)[2]
    ones = torch.ones(2, device=DEVICE)
    opcheck(library.nft_loss_backward, (ones, ones if ref else None, *plain, stats, 0.5, triton), test_utils=CHECKS)


@pytest.mark.parametrize("triton", TRITON)
def test_the_noise_operator_is_sound(triton):
    clean, sigma = normal((2, 3, 7), 0, BF16), vector((0.3, 0.9), 2)
    opcheck(library.flow_noise, (clean, sigma, seeds(2), None, triton), test_utils=CHECKS)
    opcheck(library.flow_noise, (clean, sigma, None, normal((2, 3, 7), 1), triton), test_utils=CHECKS)


def rollout_and_train(case, rows, nft, backend):
    """Call every operator once, forward and backward, as a compiled training step would."""
    step = sde_step(**case, coefficients=rows, seeds=seeds(2), backend=backend)
    log_prob = sde_log_prob(**case, next_latents=step.next_latents, coefficients=rows, backend=backend)
    noisy, _ = flow_noise(step.next_latents, nft["sigma"], seeds=seeds(2), backend=backend)
    result = nft_loss(**nft, beta=0.5, backend=backend)
    return log_prob.sum() + result.policy.sum() + noisy.sum(), step.log_prob


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiling_breaks_no_graph_and_changes_no_bit(backend):
    outcomes = []
    for run in (rollout_and_train, torch.compile(rollout_and_train, fullgraph=True, backend="aot_eager")):
        case, rows, nft = transition((2, 3, 7)), coefficients("flow_sde", 2), nft_case((2, 3, 7))
        case["velocity"].requires_grad_()
        total, log_prob = run(case, rows, nft, backend)
        total.backward()
        outcomes.append([total, log_prob, case["velocity"].grad, nft["velocity"].grad])
    for plain, compiled in zip(*outcomes, strict=True):
        assert torch.equal(plain, compiled)


def test_operators_never_read_a_value():
    """On meta tensors, which have no values: reading one, and so waiting for a device, raises an error."""
    case = {n: t.to("meta") for n, t in transition((2, 3, 7)).items()}
    rows = coefficients("flow_sde", 2).to("meta")
    nft = {n: t.detach().to("meta") for n, t in nft_case((2, 3, 7), ref=True).items()}
    ids = seeds(2).to("meta")
    step = sde_step(**case, coefficients=rows, seeds=ids)
    assert step.next_latents.shape == (2, 3, 7)
    log_prob = sde_log_prob(**case, next_latents=step.next_latents, coefficients=rows)
    noisy, noise = flow_noise(step.next_latents, nft["sigma"], seeds=ids)
    assert log_prob.shape == nft_loss(**nft, beta=1.0).policy.shape == (2,)
    assert noisy.shape == noise.shape == (2, 3, 7)


@pytest.fixture
def ran(monkeypatch):
    """Return the list of backends that computed flow_noise."""
    from wfm_kernels import triton_backend

    names = []
    for name, module in (("torch", torch_backend), ("triton", triton_backend)):
        original = module.flow_noise
        monkeypatch.setattr(
            module, "flow_noise", lambda *args, name=name, original=original: names.append(name) or original(*args)
        )
    return names


def draw(**keys):
    return flow_noise(torch.zeros(2, 3, device=DEVICE), torch.ones(2, device=DEVICE), seeds=seeds(2), **keys)


@pytest.mark.unit
@pytest.mark.skipif(DEVICE == "cuda", reason="about tensors on a CPU")
def test_a_cpu_uses_torch_by_default(ran):
    draw()
    draw(backend="torch")
    draw(backend="triton")
    assert ran == ["torch", "torch", "triton"]


@pytest.mark.unit
@pytest.mark.parametrize("name", BACKENDS)
def test_the_environment_overrides_the_argument(name, ran, monkeypatch):
    monkeypatch.setenv("WFM_KERNELS", name)
    for backend in ("auto", "torch", "triton"):
        draw(backend=backend)
    assert ran == [name] * 3


@pytest.mark.unit
@pytest.mark.skipif(DEVICE == "cuda", reason="about tensors on a CPU")
def test_kernels_on_a_cpu_are_for_tests_only(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="triton backend cannot run: the tensors are on cpu"):
        draw(backend="triton")
    draw()


@pytest.mark.unit
def test_an_unknown_backend_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="unknown kernel backend 'cuda'; choose one of auto, triton, torch"):
        draw(backend="cuda")
    monkeypatch.setenv("WFM_KERNELS", "eager")
    with pytest.raises(ValueError, match="unknown kernel backend 'eager'"):
        draw()


@pytest.mark.unit
def test_unsupported_kernels_are_refused_on_request_and_otherwise_logged_once(monkeypatch, caplog):
    class OnGpu:  # the attributes that the selection reads
        device, dtype, shape = torch.device("cuda", 0), torch.float32, (70_000, 2)

        def numel(self):
            return 140_000

        def __len__(self):
            return 70_000

    with pytest.raises(ValueError, match="70000 samples of 2 elements exceed the limit of 65535"):
        ops.should_use_triton("triton", OnGpu())
    ops._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [ops.should_use_triton("auto", OnGpu()) for _ in range(3)] == [False] * 3
    assert [r.message for r in caplog.records] == [
        "fused kernels are disabled, using eager torch: 70000 samples of 2 elements exceed the limit of 65535 samples "
        "of 2145386496"
    ]
    monkeypatch.setattr(OnGpu, "shape", (5, 2))
    monkeypatch.setattr(OnGpu, "__len__", lambda self: 5)
    assert ops.should_use_triton("auto", OnGpu())


@pytest.mark.unit
def test_tensors_of_several_devices_are_refused():
    with pytest.raises(ValueError, match="several devices: cpu, meta"):
        flow_noise(torch.zeros(2, 3), torch.zeros(2, device="meta"), seeds=torch.arange(2))


@pytest.mark.unit
def test_formulas_can_be_checked_in_float64():
    """The torch backend computes in float64 precision; the Triton backend rejects float64."""
    case = {name: t.detach().double() for name, t in nft_case((2, 3, 4), ref=True).items()}
    case["velocity"].requires_grad_()
    assert torch.autograd.gradcheck(lambda v: nft_loss(**case | {"velocity": v}, beta=0.5).kl, case["velocity"])
    assert nft_loss(**case, beta=0.5).policy.dtype == FP64
    with pytest.raises(ValueError, match="latents are float64"):
        nft_loss(**case, beta=0.5, backend="triton")
