import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.algorithms.base import draw_steps
from wfm_ds.algorithms.diffusion_nft import nft_loss, old_decay, reward_weights
from wfm_ds.recipe.algorithms import DecaySchedule

FP64 = torch.float64
SHAPES = [(1, 1, 1, 1), (3, 4, 8, 8), (3, 4, 7, 5), (2, 3, 3, 5, 2)]
SETTINGS = [
    {"beta": 1.0, "adv_clip_max": 5.0, "kl_beta": 1e-4},
    {"beta": 0.1, "adv_clip_max": 2.0, "kl_beta": 0.0},
    {"beta": 0.7, "adv_clip_max": 5.0, "kl_beta": 0.3},
]


def case(shape, *, kl=True, seed=0, dtype=torch.float32):
    """Return inputs of nft_loss with interior values of r and r = 1."""
    generator = torch.Generator().manual_seed(seed)
    names = ["velocity", "old_velocity", "clean_latents", "noise", *(["ref_velocity"] if kl else [])]
    inputs = {name: torch.randn(shape, generator=generator, dtype=FP64).to(dtype) for name in names}
    inputs["old_velocity"] = inputs["velocity"] + 0.2 * inputs["old_velocity"]
    inputs["velocity"].requires_grad_()
    inputs["sigma"] = torch.tensor([0.2, 0.6, 0.95], dtype=dtype)[: shape[0]]
    inputs["reward_weight"] = torch.tensor([0.57, 0.37, 1.0], dtype=dtype)[: shape[0]]
    return inputs


def in_double(inputs):
    return {name: tensor.detach().double() for name, tensor in inputs.items()}


def mean(x):
    return x.flatten(1).mean(1)


def reference(
    velocity, old_velocity, clean_latents, noise, sigma, reward_weight, *, beta, adv_clip_max, kl_beta, **ref
):
    """Return loss and gradient with the formulas of the paper, in float64, through x_s and x0 predictions."""
    x0, n, v_ref = clean_latents, clean_latents[0].numel(), ref.get("ref_velocity", velocity)
    s, r = (t.view(-1, *[1] * (x0.ndim - 1)) for t in (sigma, reward_weight))
    x_s = (1 - s) * x0 + s * noise
    v_plus = beta * velocity + (1 - beta) * old_velocity
    v_minus = (1 + beta) * old_velocity - beta * velocity
    e_plus, e_minus = x_s - s * v_plus - x0, x_s - s * v_minus - x0
    w_plus = mean(e_plus.abs()).clamp_min(1e-5)
    w_minus = mean(e_minus.abs()).clamp_min(1e-5)
    l_plus, l_minus = mean(e_plus**2) / w_plus, mean(e_minus**2) / w_minus
    kl = mean((velocity - v_ref) ** 2)
    loss = adv_clip_max * (reward_weight * l_plus + (1 - reward_weight) * l_minus) / beta + kl_beta * kl

    u = noise - x0
    over_plus, over_minus = (w.view_as(s) for w in (w_plus, w_minus))
    pull = -r * (u - v_plus) / over_plus + (1 - r) * (u - v_minus) / over_minus
    gradient = 2 * adv_clip_max * s**2 / n * pull + 2 * kl_beta / n * (velocity - v_ref)
    return loss, gradient, (l_plus, l_minus, kl)


def gradient_of(inputs, **setting):
    loss_B, _ = nft_loss(**inputs, **setting)
    return torch.autograd.grad(loss_B.sum(), inputs["velocity"])[0]


def assert_close(got, want, relative):
    assert (got.double() - want).abs().max() <= relative * want.abs().max()


@check_each("setting", SETTINGS)
@check_each("shape", SHAPES)
def test_value_and_gradient_equal_the_published_form_in_float64(shape, setting):
    inputs = case(shape, kl=setting["kl_beta"] > 0)
    loss_B, stats = nft_loss(**inputs, **setting)
    want, want_gradient, (l_plus, l_minus, kl) = reference(**in_double(inputs), **setting)
    assert loss_B.shape == shape[:1]
    assert loss_B.dtype == torch.float32
    assert_close(loss_B, want, 1e-5)
    assert_close(gradient_of(inputs, **setting), want_gradient, 1e-5)
    assert_close(stats["nft/loss_positive"], l_plus, 1e-5)
    assert_close(stats["nft/loss_negative"], l_minus, 1e-5)
    if setting["kl_beta"] > 0:
        assert_close(stats["kl/ref"], kl, 1e-5)


def test_the_policy_loss_in_the_log_excludes_the_distance_to_the_reference():
    inputs = case((3, 4, 7, 5))
    loss_B, stats = nft_loss(**inputs, **SETTINGS[2])
    inputs.pop("ref_velocity")
    policy_B, without = nft_loss(**inputs, **SETTINGS[2] | {"kl_beta": 0.0})
    assert torch.equal(stats["loss/policy"], policy_B.detach())
    assert torch.equal(loss_B.detach(), stats["loss/policy"] + 0.3 * stats["loss/kl"])
    assert "kl/ref" in stats
    assert not {"kl/ref", "loss/kl", "nft/old_ref_deviation"} & set(without)


def test_stats_are_per_sample_and_detached():
    inputs = case((3, 4, 7, 5))
    _, stats = nft_loss(**inputs, **SETTINGS[0])
    exact = in_double(inputs)
    deviation = (exact["velocity"] - exact["old_velocity"]) ** 2
    assert all(value.shape == (3,) and not value.requires_grad for value in stats.values())
    assert_close(stats["nft/old_deviation"], mean(deviation), 1e-5)
    assert_close(stats["nft/old_deviation_max"], deviation.flatten(1).amax(1), 1e-5)
    assert_close(stats["nft/old_ref_deviation"], mean((exact["old_velocity"] - exact["ref_velocity"]) ** 2), 1e-5)
    assert_close(stats["nft/x0_norm"], mean(exact["clean_latents"] ** 2), 1e-5)
    assert torch.equal(stats["nft/r_mean"], inputs["reward_weight"])


def test_the_trained_velocity_replaces_an_equal_old_one():
    inputs = case((3, 4, 7, 5), kl=False)
    inputs["old_velocity"] = inputs["velocity"].detach()
    with_copy = gradient_of(inputs, **SETTINGS[1])
    inputs["old_velocity"] = inputs["velocity"]
    assert torch.equal(gradient_of(inputs, **SETTINGS[1]), with_copy)


@check_each(
    ("changes", "message"),
    [
        ({"reward_weight": torch.zeros(3, 1)}, r"reward_weight must be \[3\]"),
        ({"sigma": torch.zeros(3, 1)}, r"sigma must be \[3\]"),
        ({"reward_weight": torch.zeros(1)}, r"reward_weight must be \[3\]"),
        ({"reward_weight": torch.tensor(0.5)}, r"reward_weight must be \[3\]"),
        ({"reward_weight": torch.ones(3, dtype=torch.int64)}, "reward_weight must be torch.float32"),
        ({"sigma": torch.full((3,), 500)}, "sigma must be torch.float32"),
        ({"old_velocity": torch.zeros(3, 4, 1, 5)}, "the same shape"),
        ({"noise": torch.zeros(3, 4, 7, 5).bfloat16()}, "float32"),
        ({"velocity": torch.zeros(3, 4, 7, 5).long()}, "float32"),
        ({"ref_velocity": torch.zeros(1, 4, 7, 5)}, "the same shape"),
    ],
)
def test_wrong_shapes_and_types_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        nft_loss(**case((3, 4, 7, 5)) | SETTINGS[0] | changes)


def test_reward_weights_of_known_advantages():
    assert reward_weights([0.7, -1.3, 9.0], 5.0).tolist() == pytest.approx([0.57, 0.37, 1.0])
    assert reward_weights([-9.0, 0.0], 2.0).tolist() == [0.0, 0.5]
    assert reward_weights([0.1], 5.0).dtype == torch.float32


@check_each("advantages", [[float("nan")], [float("inf")], [[0.1], [0.2]]])
def test_reward_weights_need_one_finite_advantage_per_sample(advantages):
    with pytest.raises(ValueError, match="finite, one per sample"):
        reward_weights(advantages, 5.0)


@check_each(
    ("setting", "decays"),
    [
        ("copy", {0: 0.0, 1: 0.0, 1000: 0.0}),
        ("standard", {0: 0.0, 1: 0.001, 499: 0.499, 500: 0.5, 9999: 0.5}),
        ("slow", {1: 0.0, 74: 0.0, 75: 0.0, 76: 0.0075, 100: 0.1875, 208: 0.9975, 300: 0.999}),
        (DecaySchedule(flat_steps=3, initial=0.2, slope=0.1, max=0.45), {2: 0.2, 3: 0.2, 4: 0.3, 5: 0.4, 6: 0.45}),
    ],
)
def test_decay_of_the_old_policy(setting, decays):
    assert {j: old_decay(setting, j) for j in decays} == pytest.approx(decays)


@given(st.integers(1, 60), st.data(), st.integers(0, 2**63 - 1))
def test_trained_steps_come_each_at_most_once_and_shuffled(num_steps, data, seed):
    count = data.draw(st.integers(1, num_steps))
    steps = draw_steps(num_steps, count, seed)
    assert len(steps) == len(set(steps)) == count
    assert set(steps) <= set(range(num_steps))
    assert steps == draw_steps(num_steps, count, seed)
    assert draw_steps(10, 10, 0) != draw_steps(10, 10, 1) != list(range(10))


def test_samples_of_one_batch_are_trained_on_independent_and_equally_likely_steps():
    num_draws, counts = 5000, torch.zeros(5, 5)
    for seed in range(num_draws):
        first, second = (draw_steps(5, 1, s)[0] for s in (2 * seed, 2 * seed + 1))
        counts[first, second] += 1
    # chi-square test, 99.9 % quantile, 24 degrees of freedom
    assert ((counts - num_draws / 25) ** 2 / (num_draws / 25)).sum() < 51.2
