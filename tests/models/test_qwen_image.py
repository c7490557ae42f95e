"""Tests specific to Qwen-Image; test_families.py has the tests that all families share."""

import math
import shutil

import pytest
import torch
from torch.overrides import TorchFunctionMode

from families import CASES, EXACT, PROMPTS, load_reference_pipeline
from wfm_ds.export.target import ExportTarget
from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.qwen_image import EMBEDS, MASK, pack_latents, unpack_latents
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.types import Prompt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(load):
    return load("qwen_image")


LONG = "a red circle on white and the digit 7 in a blue square"


@pytest.fixture
def pipeline(tiny_pipelines):
    return load_reference_pipeline(tiny_pipelines("qwen_image"), CASES["qwen_image"])


def test_texts_of_unequal_lengths_share_a_batch(model):
    """Padding has no effect: cached texts equal jointly encoded ones, and padded texts give the same velocity."""
    together = model.encode_text([PROMPTS[0], LONG])
    cached = TextCache(model).encode([PROMPTS[0], LONG])
    torch.testing.assert_close(cached[EMBEDS], together[EMBEDS], **EXACT)
    assert torch.equal(cached[MASK], together[MASK])
    lengths = cached[MASK].sum(1).tolist()
    assert lengths[0] < lengths[1] == cached[MASK].shape[1]
    noise = torch.randn(1, *model.latent_shape(32, 48), generator=torch.Generator().manual_seed(0))
    first = {name: tensor[:1] for name, tensor in cached.items()}
    with torch.no_grad():
        padded, alone = (model.denoise(noise, torch.tensor([0.7]), c) for c in (first, model.encode_text(PROMPTS[:1])))
    torch.testing.assert_close(padded, alone, **EXACT)


def test_halves_of_guidance_of_unequal_lengths_share_a_forward(model):
    settings = SamplingRecipe(height=32, width=32, eval_steps=2, guidance_scale=4.0, guidance_batch="joint")
    forward = CountingForward(model.denoise)
    sampler = Sampler(
        model=model, text_cache=TextCache(model), settings=settings, forward=forward, max_joint_rows={"one": 2}
    )
    drawn = [
        sampler.generate(name, [Prompt(id="long", text=LONG)], [1], sampler.evaluation_plan()).clean_latents
        for name in ("one", "two")
    ]
    torch.testing.assert_close(*drawn, **EXACT)
    assert forward.counts == {"one": 2, "two": 4}


def test_the_grid_ends_at_its_terminal_and_the_shift_depends_on_the_size(model):
    shape = model.latent_shape(64, 96)
    assert float(model.sigmas(4, shape)[-2]) == pytest.approx(0.02, abs=1e-6)
    shift = math.exp(model.schedule_arguments(shape, 40)["mu"])
    assert model.flow_shift(SamplingRecipe(height=64, width=96)) == pytest.approx(shift)


def test_guidance_keeps_the_norm_of_each_token(model):
    cond, uncond = torch.randn(2, 2, 4, 4, 6, generator=torch.Generator().manual_seed(0))
    guided = model.combine_guidance(cond, uncond, 5.0)
    torch.testing.assert_close(pack_latents(guided).norm(dim=-1), pack_latents(cond).norm(dim=-1))
    torch.testing.assert_close(model.combine_guidance(cond, uncond, 1.0), cond)
    assert torch.equal(unpack_latents(pack_latents(cond), 4, 6), cond)


def test_tokens_are_those_that_the_pipeline_packs(model, pipeline):
    latents = torch.randn(2, 4, 4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack_latents(latents), pipeline._pack_latents(latents, 2, 4, 4, 6))


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
