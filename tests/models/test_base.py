import copy
import re

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from pydantic import ValidationError

from each_case import check_each
from families import load_tiny
from wfm_ds.contract.denoiser_checks import INVALID_ARGUMENTS
from wfm_ds.errors import ModelError
from wfm_ds.models.base import DiffusionModel, temporary_seed
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.sampling.plan import apply_shift, invert_shift


@pytest.fixture
def model(tiny_pipelines):
    return load_tiny(tiny_pipelines("sd3"), "sd3")


@check_each(
    ("number", "says"),
    enumerate(
        (
            *["sigma must be float32"] * 3,
            *("above 0", "at most 1", "at most 1", "latents must be float32", "latents [B,C,"),
            *("train_frames", "conditioning must hold", "has 1 rows, the latents have 2"),
        )
    ),
)
def test_invalid_arguments_of_denoise_are_named(model, number, says):
    valid = (torch.randn(2, 4, 8, 8), torch.tensor([0.9, 0.3]), model.encode_text(["a cat", "the digit 7"]))
    with pytest.raises(ValueError, match=re.escape(says)):
        model.denoise(*INVALID_ARGUMENTS[number][1](*valid))


def test_only_the_denoiser_learns(model):
    assert all(p.requires_grad for p in model.denoiser.parameters())
    frozen = [p for part in model.auxiliary_modules() for p in part.parameters()]
    assert len(model.auxiliary_modules()) == 4
    assert not any(p.requires_grad for p in frozen)
    assert not any(m.training for part in model.auxiliary_modules() for m in part.modules())


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_moving_a_model_moves_only_a_bare_denoiser(model, is_wrapped):
    if is_wrapped:
        model.denoiser = torch.nn.Sequential(model.denoiser)
    model.move_to_device("meta")
    assert {p.device.type for p in model.denoiser.parameters()} == {"cpu" if is_wrapped else "meta"}
    assert {p.device.type for part in model.auxiliary_modules() for p in part.parameters()} == {"meta"}
    assert model.device == torch.device("meta")


def test_guidance_one_is_the_conditional_velocity():
    cond, uncond = torch.randn(2, 4), torch.randn(2, 4)
    combine = DiffusionModel.combine_guidance
    torch.testing.assert_close(combine(None, cond, uncond, 1.0), cond)
    torch.testing.assert_close(combine(None, cond, uncond, 3.0), 3 * cond - 2 * uncond)


def test_pixels_have_channels_last_and_all_8_bit_levels_and_do_not_wrap_around():
    levels = torch.arange(256, dtype=torch.float32).view(1, 1, 16, 16).repeat(2, 3, 1, 1)
    image = DiffusionModel.to_uint8(levels / 255)
    assert (image.shape, image.dtype, image.flags.c_contiguous) == ((2, 16, 16, 3), np.uint8, True)
    assert np.array_equal(image[1, ..., 2], np.arange(256).reshape(16, 16))
    video = torch.full((1, 3, 5, 4, 6), -0.1)
    video[0, 1, 3, 2, 1] = 1.1
    frames = DiffusionModel.to_uint8(video)
    assert frames.shape == (1, 5, 4, 6, 3)
    assert frames[0, 3, 2, 1].tolist() == [0, 255, 0]


def test_the_grid_equals_the_schedulers_and_does_not_change_it(model):
    before = model.pipeline.scheduler.sigmas.clone()
    grid = model.sigmas(10, (4, 16, 16))
    expected = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]
    assert grid.dtype == torch.float64
    torch.testing.assert_close(grid, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)
    assert torch.equal(model.pipeline.scheduler.sigmas, before)
    assert model.sigmas(1, (4, 16, 16)).tolist() == [1.0, 0.0]


def test_a_grid_outside_flow_matching_is_refused(model):
    model.pipeline.scheduler = EulerDiscreteScheduler()  # sigmas up to 14: not a flow-matching scheduler
    with pytest.raises(ModelError, match="EulerDiscreteScheduler do not decrease"):
        model.sigmas(4, (4, 16, 16))
    with pytest.raises(ValueError, match="num_steps"):
        model.sigmas(0, (4, 16, 16))


def test_a_scheduler_without_sigmas_is_refused(model):
    model.pipeline.scheduler = DDIMScheduler()
    with pytest.raises(ModelError, match="DDIMScheduler is not a flow-matching scheduler"):
        type(model)(model.pipeline, model.path, dtype=torch.float32, device="cpu", max_sequence_length=None)


@pytest.mark.parametrize("rule", ["exponential", "linear"])
def test_a_shift_that_depends_on_the_size_is_that_of_the_grid(model, rule):
    assert model.flow_shift(sampling()) == 3.0
    model.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=rule)
    even = torch.linspace(1, 0.25, 4).double()
    grid = copy.deepcopy(model.pipeline.scheduler)
    grid.set_timesteps(sigmas=even.numpy(), **model.schedule_arguments((4, 16, 16), 4))
    shift = model.flow_shift(sampling(eval_steps=4))
    torch.testing.assert_close(apply_shift(even, shift), grid.sigmas[:-1].double(), rtol=0, atol=1e-6)
    assert model.flow_shift(SamplingRecipe(height=64, width=64)) > shift


def sampling(**keys):
    return SamplingRecipe(height=32, width=32, **keys)


@pytest.mark.parametrize("num_steps", [1, 4, 10])
def test_an_even_grid_has_equal_steps_before_the_shift_and_leaves_the_last_one_something_to_do(model, num_steps):
    even = model.rollout_sigmas(sampling(steps=num_steps, grid="even"))
    assert (even.dtype, even.device.type, even[0], even[-1]) == (torch.float64, "cpu", 1, 0)
    torch.testing.assert_close(invert_shift(even, 3.0).diff(), torch.full((num_steps,), -1 / num_steps).double())
    stock = model.rollout_sigmas(sampling(steps=num_steps))
    assert torch.equal(stock, model.sigmas(num_steps, (4, 16, 16)))
    if num_steps == 10:  # the first 9 of the stock grid's 10 steps cover nearly the whole range
        assert stock[-2] < 0.01 < 0.2 < even[-2]


def test_an_even_grid_needs_a_shift(model):
    model.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    with pytest.raises(ModelError, match=r"no fixed shift: set sampling\.grid_shift, or sampling\.grid: stock"):
        model.rollout_sigmas(sampling(steps=4, grid="even"))
    with pytest.raises(ModelError, match=r"algorithm\.flow_shift"):
        model.flow_shift(sampling())
    with pytest.raises(ValidationError, match="edm_2ab does not read grid"):
        sampling(solver="edm_2ab", grid="even")


def test_seeded_draws_repeat_and_keep_the_global_state():
    torch.manual_seed(5)
    undisturbed = torch.rand(3), torch.rand(3)
    torch.manual_seed(5)
    first = torch.rand(3)
    with temporary_seed(7):
        one = torch.rand(3)
    with temporary_seed(7):
        two = torch.rand(3)
    assert torch.equal(one, two)
    assert torch.equal(first, undisturbed[0])
    assert torch.equal(torch.rand(3), undisturbed[1])


def test_encoding_inverts_decoding_for_pixels(load):
    model = load("digits")
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.decode_latents(model.encode_pixels(pixels)), pixels, rtol=0, atol=1e-4)


def test_wrong_pixels_are_refused(model):
    with pytest.raises(ValueError, match="width must be a multiple of 4"):
        model.encode_pixels(torch.rand(1, 3, 32, 30))
    with pytest.raises(ValueError, match="float32"):
        model.encode_pixels(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\[B,3,H,W\]"):
        model.encode_pixels(torch.rand(3, 32, 32))
    with pytest.raises(ValueError, match="num_frames"):
        model.latent_shape(32, 32, num_frames=5)
