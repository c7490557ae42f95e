"""Tests specific to Qwen-Image; test_families.py has the tests that all families share."""

import math
import shutil

import pytest
import torch
from torch.overrides import TorchFunctionMode

from families import CASES, EXACT, PROMPTS, create_prompts, load_reference_pipeline, make_sampler, sample_latents
from wfm_ds.export.target import ExportTarget
from wfm_ds.models import registry
from wfm_ds.recipe.sampling import SamplingRecipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(load):
    return load("qwen_image")


LONG = "a red circle on white and the digit 7 in a blue square"


@pytest.fixture
def pipeline(tiny_pipelines):
    return load_reference_pipeline(tiny_pipelines("qwen_image"), CASES["qwen_image"])


def test_halves_of_guidance_of_unequal_lengths_share_a_forward(model):
    settings = {"eval_steps": 2, "guidance_scale": 4.0, "guidance_batch": "joint"}
    sampler = make_sampler(model, max_joint_rows={"one": 2}, **settings)
    drawn = [sample_latents(sampler, create_prompts(LONG), [1], name) for name in ("one", "two")]
    torch.testing.assert_close(*drawn, **EXACT)
    assert sampler.forward.counts == {"one": 2, "two": 4}


def test_the_grid_ends_at_its_terminal_and_the_shift_depends_on_the_size(model):
    shape = model.latent_shape(64, 96)
    assert float(model.sigmas(4, shape)[-2]) == pytest.approx(0.02, abs=1e-6)
    shift = math.exp(model.schedule_arguments(shape, 40)["mu"])
    assert model.flow_shift(SamplingRecipe(height=64, width=96)) == pytest.approx(shift)


def test_an_export_names_the_negative_prompt_without_which_there_is_no_guidance(tiny_pipelines, tmp_path):
    shutil.copytree(tiny_pipelines("qwen_image"), tmp_path / "plain")
    (tmp_path / "plain" / "call.json").unlink()
    model = registry.load_model(tmp_path / "plain", dtype=torch.float32, device="cpu")
    assert ExportTarget.from_model(model).call_arguments == {"negative_prompt": " "}


# Behavior of diffusers: if one of these fails, diffusers has changed; remove its row from docs/models/qwen_image.md.


def test_without_a_negative_prompt_the_stock_call_has_no_guidance(pipeline):
    call = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 16, "output_type": "latent"}
    drawn = [
        pipeline(PROMPTS[:1], true_cfg_scale=w, generator=torch.Generator().manual_seed(0), **call).images
        for w in (1.0, 4.0)
    ]
    assert torch.equal(*drawn)


def test_one_step_of_the_stock_scheduler_is_not_a_number(model, pipeline):
    call = {"height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 16, "output_type": "latent"}
    assert pipeline(PROMPTS[:1], true_cfg_scale=1, **call).images.isnan().all()
    assert model.sigmas(1, (4, 4, 4)).tolist() == [1.0, 0.0]


class HostNumbers(TorchFunctionMode):
    """Count the tensors that are created from Python numbers."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.tensor, torch.as_tensor)
        return func(*args, **(kwargs or {}))


def test_the_network_creates_tensors_from_numbers_which_a_cuda_graph_cannot_record(load):
    for family in ("qwen_image", "sd3"):
        model = load(family)
        noise, text = torch.zeros(1, *model.latent_shape(32, 32)), model.encode_text(PROMPTS[:1])
        with torch.no_grad(), HostNumbers() as numbers:
            model.denoise(noise, torch.ones(1), text)
        assert (numbers.count == 0) == model.supports_cuda_graphs
