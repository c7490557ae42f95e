import math
from statistics import NormalDist

import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.algorithms.sft import (
    FULL_BAND,
    Sft,
    bucket_index,
    clamp_to_band,
    conditioning_frame_counts,
    density_bands,
    density_quantile,
    draw_experts,
    draw_training_sigmas,
    loss_weight,
    validation_sigmas,
)
from wfm_ds.algorithms.supervised import velocity_errors
from wfm_ds.recipe.algorithms import SftAlgorithm
from wfm_ds.sampling.plan import invert_shift

FP64 = torch.float64
DENSITIES = [
    {"timestep_density": "logit_normal"},
    {"timestep_density": "logit_normal", "logit_mean": 0.8, "logit_std": 0.6},
    {"timestep_density": "uniform"},
    {"timestep_density": "mode"},
    {"timestep_density": "mode", "mode_scale": -1.0},
    {"timestep_density": "mode", "mode_scale": 1.75},
]


def sft(**keys):
    return SftAlgorithm(name="sft", **keys)


def flow_loss(velocity, clean, noise, sigma, weighting="none", *, conditional_mask=None):
    errors = velocity_errors(velocity, clean, noise, conditional_mask)
    return Sft(sft(loss_weighting=weighting)).loss(errors[None], sigma, {})[0]


def sigmas(algorithm, positions, *, shift=3.0, run_seed=0, global_batch=16, band=FULL_BAND):
    return draw_training_sigmas(
        algorithm, shift, run_seed=run_seed, positions=positions, global_batch=global_batch, band=band
    )


def cdf(algorithm, q):
    """Return the fraction of the density below each q, by bisection of the quantile function."""
    low, high = torch.full_like(q, 1e-12), torch.full_like(q, 1 - 1e-12)
    for _ in range(60):
        middle = (low + high) / 2
        below = density_quantile(algorithm, middle) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low


@given(st.floats(1e-9, 1 - 1e-9), st.floats(-2, 2), st.floats(0.1, 3))
def test_logit_normal_quantile_is_that_of_the_normal_law(a, mean, std):
    q = density_quantile(sft(logit_mean=mean, logit_std=std), torch.tensor([a], dtype=FP64)).item()
    assert q == pytest.approx(1 / (1 + math.exp(-NormalDist(mean, std).inv_cdf(a))), rel=1e-9)


@given(st.floats(0, 1), st.floats(-1, 1.75))
def test_mode_quantile_is_the_published_formula_at_one_minus_a(a, scale):
    u = 1 - a
    published = 1 - u - scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)
    got = density_quantile(sft(timestep_density="mode", mode_scale=scale), torch.tensor([a], dtype=FP64)).item()
    assert got == pytest.approx(published, abs=1e-12)


@check_each("keys", DENSITIES)
def test_drawn_levels_follow_the_density(keys):
    algorithm, count = sft(**keys), 3000
    q = invert_shift(sigmas(algorithm, range(count)).double(), 3.0)
    a = cdf(algorithm, q).sort().values
    distance = (a - (torch.arange(count) + 0.5) / count).abs().max() + 0.5 / count
    assert distance * math.sqrt(count) < 1.95  # Kolmogorov-Smirnov test, 99.9 % quantile


@pytest.mark.parametrize("stratified", [False, True])
def test_a_noise_level_depends_only_on_seed_and_position(stratified):
    algorithm = sft(stratified=stratified)
    whole = sigmas(algorithm, range(16, 32))
    assert whole.dtype == torch.float32
    assert torch.equal(torch.cat([sigmas(algorithm, range(16, 19)), sigmas(algorithm, range(19, 32))]), whole)
    assert torch.equal(sigmas(algorithm, [31, 16]), whole[[15, 0]])
    assert len(set(whole.tolist())) == 16
    assert not torch.equal(sigmas(algorithm, range(16, 32), run_seed=1), whole)
    assert not torch.equal(sigmas(algorithm, range(32, 48)), whole)


@check_each("keys", DENSITIES)
def test_stratified_levels_cover_the_density_evenly_in_every_global_batch(keys):
    algorithm, orders = sft(stratified=True, **keys), []
    for step in range(3):
        q = invert_shift(sigmas(algorithm, range(16 * step, 16 * step + 16)).double(), 3.0)
        orders.append((cdf(algorithm, q) * 16).long().tolist())
        assert sorted(orders[-1]) == list(range(16))
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("kind", ["sigma_sqrt", "cosmap"])
def test_weights_are_those_of_the_sd3_training_of_diffusers(kind):
    sigma = torch.linspace(0.11, 1, 50)
    torch.testing.assert_close(loss_weight(kind, sigma), compute_loss_weighting_for_sd3(kind, sigma))


def test_edm_and_min_snr_weights_are_x0_weights_times_sigma_squared():
    sigma = torch.linspace(0.01, 0.99, 99, dtype=FP64)
    edm_sigma = sigma / (1 - sigma)
    x0_weight = (1 + edm_sigma**2) / edm_sigma**2  # sigma_data = 1
    torch.testing.assert_close(loss_weight("edm", sigma), x0_weight * sigma**2)
    snr = ((1 - sigma) / sigma) ** 2
    torch.testing.assert_close(loss_weight("min_snr", sigma), snr.clamp_max(5) * sigma**2)


@check_each("kind", ["none", "sigma_sqrt", "cosmap", "edm", "min_snr"])
def test_weights_are_finite_over_the_whole_range(kind):
    weight = loss_weight(kind, torch.tensor([0.0, 1e-6, 0.5, 1.0]))
    assert weight.isfinite().all()
    assert (weight >= 0).all()
    assert weight.max() <= 100


@check_each("shape", [(1, 1, 1, 1), (3, 4, 7, 5), (2, 3, 3, 5, 2)])
@check_each("weighting", ["none", "cosmap"])
def test_loss_and_gradient_equal_float64(shape, weighting):
    generator = torch.Generator().manual_seed(0)
    velocity, clean, noise = (torch.randn(shape, generator=generator) for _ in range(3))
    velocity.requires_grad_()
    sigma = torch.tensor([0.2, 0.6, 0.95])[: shape[0]]
    loss_B = flow_loss(velocity, clean, noise, sigma, weighting)
    upstream = torch.arange(1.0, 1 + shape[0])
    gradient = torch.autograd.grad((loss_B * upstream).sum(), velocity)[0]

    s = sigma.double()
    weight = torch.ones_like(s) if weighting == "none" else 2 / (math.pi * (1 - 2 * s + 2 * s**2))
    error = velocity.detach().double() - (noise.double() - clean.double())
    want = weight * (error**2).flatten(1).mean(1)
    want_gradient = (upstream * weight).view(-1, *[1] * (len(shape) - 1)) * 2 * error / error[0].numel()
    assert loss_B.shape == shape[:1]
    torch.testing.assert_close(loss_B.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-5, atol=1e-7)


@check_each(
    ("velocity", "sigma", "message"),
    [
        (torch.zeros(2, 1, 3, 3), torch.zeros(2, 1), r"sigma must be \[2\]"),
        (torch.zeros(2, 1, 3, 3), torch.ones(2, dtype=torch.int64), "sigma must be torch.float32"),
        (torch.zeros(1, 1, 3, 3), torch.zeros(2), "the same shape"),
        (torch.zeros(2, 1, 3, 3).half(), torch.zeros(2), "float32"),
        (torch.zeros(2, 1, 3, 3).int(), torch.zeros(2), "float32"),
    ],
)
def test_wrong_shapes_and_types_are_refused(velocity, sigma, message):
    with pytest.raises(ValueError, match=message):
        flow_loss(velocity, torch.zeros(2, 1, 3, 3), torch.zeros(2, 1, 3, 3), sigma)


@check_each("num_conditional_frames", [0, 1, 2])
def test_conditioning_frames_are_excluded_from_the_mean(num_conditional_frames):
    velocity, clean, noise = (torch.randn(2, 3, 4, 2, 2, dtype=FP64) for _ in range(3))
    sigma, counts = torch.tensor([0.3, 0.8], dtype=FP64), (0, num_conditional_frames)
    mask = torch.stack([(torch.arange(4) < count).double() for count in counts]).view(2, 1, 4, 1, 1)
    velocity.requires_grad_()
    loss = flow_loss(velocity, clean, noise, sigma, "edm", conditional_mask=mask)
    gradient = torch.autograd.grad(loss.sum(), velocity)[0]
    for row, count in enumerate(counts):
        cut = [tensor[row : row + 1, :, count:].detach() for tensor in (velocity, clean, noise)]
        want = flow_loss(*cut, sigma[row : row + 1], "edm")[0]
        assert loss[row].item() == pytest.approx(want.item(), rel=1e-12)
        assert not gradient[row, :, :count].any()
        assert gradient[row, :, count:].all()


def test_a_mask_of_another_shape_is_refused():
    latents = torch.randn(2, 3, 4, 2, 2)
    for shape in ((2, 1, 4, 2, 2), (2, 1, 3, 1, 1), (2, 4)):
        with pytest.raises(ValueError, match="conditioning_mask must be"):
            flow_loss(latents, latents, latents, torch.ones(2), conditional_mask=torch.zeros(shape))


def test_every_number_of_conditioning_frames_is_equally_likely():
    counts = conditioning_frame_counts((0, 2), [(i + 0.5) / 300 for i in range(300)])
    assert counts.bincount().tolist() == [100, 100, 100]
    assert conditioning_frame_counts((0, 0), [0.5]) is None
    assert conditioning_frame_counts((2, 2), [0.0, 1 - 2**-53]).tolist() == [2, 2]
    with pytest.raises(ValueError, match="min_num_conditional_frames 1 is above max_num_conditional_frames 0"):
        sft(min_num_conditional_frames=1)


def test_validation_levels_are_the_shifted_centres_of_the_buckets():
    levels = validation_sigmas(3.0)
    assert levels.dtype == FP64
    assert levels.tolist() == pytest.approx([3 * q / (1 + 2 * q) for q in [(j + 0.5) / 8 for j in range(8)]], rel=1e-12)
    assert bucket_index(levels.float(), 3.0).tolist() == list(range(8))
    assert bucket_index(validation_sigmas(1.0, 5), 1.0, 5).tolist() == list(range(5))


@given(st.floats(1e-6, 1), st.floats(0.3, 9), st.integers(1, 12))
def test_buckets_are_equal_parts_of_q(q, shift, num_buckets):
    sigma = torch.tensor([shift * q / (1 + (shift - 1) * q)], dtype=FP64)
    bucket = bucket_index(sigma, shift, num_buckets).item()
    assert 0 <= bucket < num_buckets
    assert bucket / num_buckets - 1e-9 <= q <= (bucket + 1) / num_buckets + 1e-9


def test_the_ends_have_a_bucket():
    assert bucket_index(torch.tensor([0.0, 1.0]), 3.0).tolist() == [0, 7]


TWO_EXPERTS = [((0.875, 1.0), (0.0, 0.875)), ((0.9, 1.0), (0.0, 0.9))]  # .9 is not a float32 number


def bands_of(algorithm, ranges):
    return density_bands(algorithm, 3.0, ranges)


@check_each("keys", DENSITIES)
def test_one_expert_has_the_whole_density(keys):
    assert bands_of(sft(**keys), ((0.0, 1.0),)) == [FULL_BAND]


@check_each("keys", DENSITIES)
@check_each("ranges", TWO_EXPERTS)
def test_two_experts_share_the_density_at_their_boundary(keys, ranges):
    algorithm = sft(**keys)
    high, low = bands_of(algorithm, ranges)
    assert (low.density_below_low, high.density_below_high) == (0.0, 1.0)
    assert low.density_below_high == high.density_below_low
    boundary = density_quantile(algorithm, torch.tensor(low.density_below_high, dtype=FP64))
    assert invert_shift(torch.tensor(ranges[0][0], dtype=FP64), 3.0).item() == pytest.approx(boundary.item(), abs=1e-12)


@check_each("keys", DENSITIES)
@check_each("ranges", TWO_EXPERTS)
@check_each("stratified", [False, True])
def test_levels_of_an_expert_are_its_own_and_follow_its_part_of_the_density(keys, ranges, stratified):
    algorithm, count = sft(**keys, stratified=stratified), 1500
    for band in bands_of(algorithm, ranges):
        drawn = sigmas(algorithm, range(count), band=band).double()
        assert bool(((drawn >= band.low) & ((drawn < band.high) | (band.high == 1))).all())
        a = (cdf(algorithm, invert_shift(drawn, 3.0)) - band.density_below_low) / (
            band.density_below_high - band.density_below_low
        )
        distance = (a.sort().values - (torch.arange(count) + 0.5) / count).abs().max() + 0.5 / count
        assert distance * math.sqrt(count) < 1.95  # Kolmogorov-Smirnov test, 99.9 % quantile


@check_each(("low", "high"), [(0.0, 0.9), (0.9, 1.0), (0.0, 0.875), (0.875, 1.0)])
def test_rounding_moves_no_level_to_the_other_expert(low, high):
    (band,) = density_bands(sft(timestep_density="uniform"), 1.0, ((low, high),))
    edges = torch.tensor([low, high], dtype=FP64).float()
    kept = clamp_to_band(edges, band).double()
    assert low <= kept[0] < kept[1]
    assert kept[1] < high or high == 1
    torch.testing.assert_close(kept.float(), edges, rtol=0, atol=1e-7)


@check_each("num_micro_steps", [1, 3, 4])
def test_an_expert_is_drawn_as_often_as_its_levels(num_micro_steps):
    bands, steps = bands_of(sft(), TWO_EXPERTS[0]), 1000
    share = bands[1].density_below_high - bands[1].density_below_low
    experts = torch.tensor([draw_experts(bands, 0, step, num_micro_steps) for step in range(steps)]).double()
    assert abs(experts.mean() - share) < 4 * math.sqrt(share * (1 - share) / experts.numel())
    assert bool((experts.sum(1) - share * num_micro_steps).abs().max() < 1)
    for place in experts.T:  # no position in the step always trains the same expert
        assert abs(place.mean() - share) < 4 * math.sqrt(share * (1 - share) / steps)


def test_experts_depend_only_on_seed_and_step():
    bands = bands_of(sft(), TWO_EXPERTS[0])
    drawn = [[draw_experts(bands, seed, step, 4) for step in range(50)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert draw_experts([FULL_BAND], 0, 1, 5) == [0] * 5
