import itertools
import math

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from each_case import check_each
from velocities import shift_three, wavy
from wfm_ds.sampling.edm import EDM_SOLVERS, Churn, make_edm_plan
from wfm_ds.sampling.plan import deterministic_plan, stochastic_plan

STOCHASTIC = ("flow_sde", "dance", "cps")


def denoised(velocity, noise, sigmas, solver):
    """Return clean latents; the seeds have no effect on deterministic solvers."""
    return deterministic_plan(solver, sigmas).denoise(velocity, noise, [0] * len(noise)).clean_latents


@check_each("shape", [(2, 4, 5, 3), (1, 2, 3, 5, 2)])
@check_each("num_steps", [1, 10, 25])
def test_ode_has_the_bits_of_diffusers_euler(shape, num_steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(num_steps)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = noise
    for t, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        theirs = scheduler.step(wavy(theirs, sigma), t, theirs).prev_sample
    ours = denoised(wavy, noise, scheduler.sigmas.double(), "ode")
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs)


@check_each("start", ["below one", "one"])
@check_each("num_steps", [4, 10, 20])
def test_dpm2_equals_diffusers_multistep_solver(num_steps, start):
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(num_steps)
    if start == "one":
        scheduler.sigmas[0] = 1.0
    noise = torch.randn((2, 4, 5, 3), generator=torch.Generator().manual_seed(0))
    theirs = noise
    for t, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        theirs = scheduler.step(wavy(theirs, sigma), t, theirs).prev_sample
    ours = denoised(wavy, noise, scheduler.sigmas.double(), "dpm2")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    euler = denoised(wavy, noise, scheduler.sigmas.double(), "ode")
    assert (ours - euler).abs().max() > 1e-3


def mixture(num_channels, num_images, std, seed):
    """Return the exact velocity for one-pixel images around some means, with standard deviation `std`."""
    draw = torch.Generator().manual_seed(seed)
    means = torch.randn(num_images, num_channels, generator=draw, dtype=torch.float64)

    def velocity(latents, sigma):
        x = latents.flatten(1).double()
        distance = x[:, None] - (1 - sigma) * means
        spread = (1 - sigma) ** 2 * std**2 + sigma**2
        share = torch.softmax(-distance.square().sum(2) / (2 * spread), dim=1)
        clean = (share[..., None] * (means + (1 - sigma) * std**2 / spread * distance)).sum(1)
        return ((x - clean) / sigma).float().view_as(latents)

    return velocity


def stock_sd3(shift):
    def sigmas(num_steps):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(num_steps)
        return scheduler.sigmas.double()

    return sigmas


def even_three(num_steps):
    return torch.cat([shift_three(num_steps)[:-1], torch.zeros(1, dtype=torch.float64)])


def rmse(one, other):
    return (one - other).square().mean().sqrt().item()


@check_each(("grid", "gain"), [(stock_sd3(3.0), 0.85), (stock_sd3(1.0), 0.75), (even_three, 0.85)])
def test_dpm2_is_nearer_to_the_exact_end_than_euler_on_stock_grids_too(grid, gain):
    """In log-SNR, the last step of SD3's ten-step grid (.278, .0089, 0) is many times as long as the previous one."""
    errors = {"ode": [], "dpm2": []}
    for seed, (channels, images, std) in enumerate([(8, 6, 0.3), (2, 4, 0.3), (4, 3, 0.5)]):
        velocity = mixture(channels, images, std, seed)
        noise = torch.randn((100, channels, 1, 1), generator=torch.Generator().manual_seed(seed))
        exact = denoised(velocity, noise, shift_three(200), "dpm2")
        for num_steps in (6, 10, 20):
            for solver, found in errors.items():
                found.append(rmse(denoised(velocity, noise, grid(num_steps), solver), exact))
    assert all(second <= euler for euler, second in zip(*errors.values(), strict=True))
    assert sum(errors["dpm2"]) < gain * sum(errors["ode"])


@check_each("noise", [torch.zeros(2, 3, 3), torch.zeros(1, 1, 2, 2).bfloat16(), torch.zeros(1, 1, 2, 2).long()])
def test_noise_that_is_not_float32_latents_is_refused(noise):
    with pytest.raises(ValueError, match="noise must be"):
        denoised(wavy, noise, shift_three(2), "ode")


CHURN = Churn.from_settings(5, s_churn=1.0, s_t_min=0.0, s_t_max=math.inf, s_noise=1.0)
PLANS = {
    **{solver: deterministic_plan(solver, shift_three(5)) for solver in ("ode", "dpm2")},
    **{solver: stochastic_plan(solver, shift_three(5), noise_level=0.3, stored_steps=[2]) for solver in STOCHASTIC},
    **{solver: make_edm_plan(solver, 5, CHURN, stored_steps=[2]) for solver in EDM_SOLVERS},
}


@check_each("solver", PLANS)
def test_the_model_is_called_once_per_step_without_reading_values_and_without_a_graph(solver):
    """Meta tensors have no values: reading one raises an error. EDM plans end with a call at their lowest level."""
    plan, asked, weight = PLANS[solver], [], torch.ones((), device="meta", requires_grad=True)
    noise = torch.empty((2, 1, 3, 3), device="meta")

    def predict(latents, sigma):
        asked.append(sigma)
        assert latents.dtype == torch.float32
        return weight * wavy(latents, sigma)

    trajectory = plan.denoise(predict, noise, [1, 2])
    assert asked == [*(step.sigma for step in plan.steps), *([0.01 / 1.01] if solver in EDM_SOLVERS else [])]
    assert all(high > low for high, low in itertools.pairwise(asked))
    tensors = [trajectory.clean_latents, *(step.log_prob for step in trajectory.stored_steps)]
    assert all(tensor.device.type == "meta" and not tensor.requires_grad for tensor in tensors)
    assert trajectory.clean_latents.shape == noise.shape
