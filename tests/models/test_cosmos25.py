"""Tests specific to Cosmos-Predict2.5; test_families.py has the tests that all families share."""

import importlib.util
import logging

import numpy as np
import pytest
import torch
from diffusers import CosmosTransformer3DModel
from diffusers.models.transformers import transformer_cosmos

from families import CASES, EXACT, PROMPTS, load_reference_pipeline, load_tiny, record_calls
from wfm_ds.errors import ModelError
from wfm_ds.models.assets.guardrail import load_safety_checker
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.models.cosmos25 import provide_torchvision_resize
from wfm_ds.models.tiny.sizes import COSMOS25

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(load):
    return load("cosmos25")


def fresh(tiny_pipelines, **options):
    return load_tiny(tiny_pipelines("cosmos25"), "cosmos25", **options)


def network_inputs(model, arguments):
    with record_calls(model.denoiser) as calls, torch.no_grad():
        model.denoise(*arguments)
    return calls[0]


NO_TORCHVISION = pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is there")


def one_call(model, counts=None):
    """Return arguments of `denoise` for two 9-frame videos; `counts`: conditioning latent frames of each video."""
    generator = torch.Generator().manual_seed(3)
    noise, latents = (torch.randn((2, *model.latent_shape(32, 32, 9)), generator=generator) for _ in range(2))
    conditioning = model.encode_text(PROMPTS)
    if counts is not None:
        conditioning = add_clean_frames(conditioning, latents, torch.tensor(counts))
    return noise, torch.tensor([0.9, 0.12345]), conditioning


# Timesteps, masks, sizes


def test_the_network_gets_sigma_for_each_frame_and_less_for_conditioning_frames(model):
    inputs = network_inputs(model, one_call(model, [0, 2]))
    assert inputs["timestep"].dtype == torch.float32
    assert inputs["timestep"].shape == (2, 1, 3, 1, 1)
    want = torch.tensor([[0.9, 0.9, 0.9], [1e-4, 1e-4, 0.12345]])
    torch.testing.assert_close(inputs["timestep"].flatten(1), want, rtol=0, atol=0)
    assert inputs["condition_mask"].shape == (2, 1, 3, 4, 4)
    assert inputs["condition_mask"].mean((1, 3, 4)).tolist() == [[0, 0, 0], [1, 1, 0]]
    assert "fps" not in inputs  # the stock pipeline does not pass fps, and fps would change the temporal positions


def test_zero_conditioning_frames_equal_no_conditioning(model):
    noise, sigma, plain = one_call(model)
    with torch.no_grad():
        want = model.denoise(noise, sigma, plain)
        got = model.denoise(*one_call(model, [0, 0]))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# Text


def test_negative_prompt_and_guidance_scale_match_the_pipeline(model):
    assert model.resolve_negative_prompt().startswith("The video captures a series of frames showing ugly scenes")
    assert (model.resolve_negative_prompt(""), model.resolve_negative_prompt("blurry")) == ("", "blurry")
    assert model.pipeline_call_kwargs(1.0, 32, 32, 5)["guidance_scale"] == 0.0
    assert model.pipeline_call_kwargs(8.0, 32, 32, 5)["guidance_scale"] == 7.0
    with pytest.raises(ValueError, match=r"disables guidance for w = 1\.5"):
        model.pipeline_call_kwargs(1.5, 32, 32, 5)


def test_while_the_text_projection_is_frozen_it_is_part_of_encoding(tiny_pipelines):
    model = fresh(tiny_pipelines)
    noise, sigma, wide = one_call(model)
    with torch.no_grad():
        want = model.denoise(noise, sigma, wide)
        model.prepare_for_lora(model.default_lora_targets)
        narrow = model.encode_text(PROMPTS)
        got = model.denoise(noise, sigma, narrow)
    assert wide["prompt_embeds"].shape == (2, 64, 64)
    assert narrow["prompt_embeds"].shape == (2, 64, 32)
    torch.testing.assert_close(got, want, **EXACT)
    assert not any("crossattn_proj" in name for name, _ in model.denoiser.named_parameters())
    model.move_to_device("meta")
    assert {p.device.type for p in model.text_projection.parameters()} == {"meta"}


@pytest.mark.parametrize("target", ["crossattn_proj.0", "0"])
def test_a_text_projection_that_gets_an_adapter_stays_in_the_denoiser(tiny_pipelines, target):
    model = fresh(tiny_pipelines)
    model.prepare_for_lora(["to_q", target])
    assert model.encode_text(PROMPTS)["prompt_embeds"].shape == (2, 64, 64)
    assert model.text_projection is None


# Guardrail


def test_without_its_package_the_guardrail_must_be_switched_off_explicitly(tiny_pipelines):
    if importlib.util.find_spec("cosmos_guardrail") is not None:
        pytest.skip("cosmos_guardrail is there")
    with pytest.raises(ModelError, match=r"cosmos_guardrail .*is not installed; .*model\.guardrail: off"):
        fresh(tiny_pipelines, guardrail="stock")


def test_without_guardrail_there_is_one_warning(tiny_pipelines, caplog):
    caplog.set_level(logging.WARNING)
    fresh(tiny_pipelines)
    assert [record.getMessage().count("guardrail is off") for record in caplog.records] == [1]


def test_a_tiny_model_of_the_cache_needs_no_guardrail_and_no_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WFM_CACHE", str(tmp_path))
    for folder, is_warned in ((tmp_path / "tiny" / "key" / "cosmos25", False), (tmp_path / "cosmos25", True)):
        caplog.clear()
        load_safety_checker("off", folder)
        assert ("the guardrail is off" in caplog.text) == is_warned


class Censor:
    """Stub of the cosmos_guardrail checker; its weights are not available here."""

    def __init__(self):
        self.seen = []

    def check_text_safety(self, prompt):
        return "digit" not in prompt

    def check_video_safety(self, frames):
        self.seen.append(frames)
        return None if len(self.seen) == 2 else 255 - frames


def test_the_guardrail_checks_prompts_and_samples(tiny_pipelines, caplog):
    model = fresh(tiny_pipelines)
    latents = torch.randn(2, *model.latent_shape(32, 32, 5))
    plain = model.decode_latents(latents)
    model.check_prompts(PROMPTS)
    model.pipeline.safety_checker = Censor()
    with pytest.raises(ModelError, match=r"rejects 1 prompts, e\.g\. 'the digit 7'"):
        model.check_prompts([*PROMPTS, "the digit 7"])
    videos = model.decode_latents(latents)
    assert model.pipeline.safety_checker.seen[0].shape == (5, 32, 32, 3)
    assert model.pipeline.safety_checker.seen[0].dtype == np.uint8
    torch.testing.assert_close(videos[0], 1 - plain[0], rtol=0, atol=1.01 / 255)
    assert not videos[1].any()
    assert "rejected 1 videos" in caplog.text


# Behavior of diffusers 0.42 that our code works around. A failing test means that diffusers has fixed it.


@NO_TORCHVISION
def test_upstream_the_transformer_needs_torchvision_without_saying_so(model, monkeypatch):
    monkeypatch.delattr(transformer_cosmos, "transforms")
    with pytest.raises(NameError, match="transforms"):
        model.denoise(*one_call(model))
    provide_torchvision_resize()
    with torch.no_grad():
        model.denoise(*one_call(model))


def test_upstream_a_float32_mask_breaks_a_bfloat16_network(tiny_pipelines):
    model = fresh(tiny_pipelines, dtype=torch.bfloat16)
    inputs = network_inputs(model, one_call(model, [0, 2]))
    assert {inputs[name].dtype for name in ("condition_mask", "padding_mask", "hidden_states")} == {torch.bfloat16}
    with pytest.raises(RuntimeError, match="dtype"):
        model.denoiser(**inputs | {"condition_mask": inputs["condition_mask"].float()})


def test_upstream_several_videos_of_several_prompts_break(tiny_pipelines):
    pipeline = load_reference_pipeline(tiny_pipelines("cosmos25"), CASES["cosmos25"])
    call = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 1, "max_sequence_length": 64}
    with pytest.raises(RuntimeError):
        pipeline(prompt=PROMPTS, num_videos_per_prompt=2, guidance_scale=0.0, output_type="latent", **call)


def test_upstream_guidance_up_to_two_is_dropped(tiny_pipelines):
    pipeline, drawn = load_reference_pipeline(tiny_pipelines("cosmos25"), CASES["cosmos25"]), []
    call = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 1, "max_sequence_length": 64}
    for g in (0.0, 1.0):
        call |= {"guidance_scale": g, "generator": torch.Generator().manual_seed(0)}
        drawn.append(pipeline(prompt=PROMPTS, output_type="latent", **call).frames)
    assert torch.equal(*drawn)


def test_upstream_learnt_positions_stay_in_float32_and_the_network_takes_that(tmp_path):
    """Released configs may set extra_pos_embed_type: learnable. A cast after loading would round these embeddings."""
    CosmosTransformer3DModel(**COSMOS25 | {"extra_pos_embed_type": "learnable"}).save_pretrained(tmp_path)
    network = CosmosTransformer3DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name for name, p in network.named_parameters() if p.dtype == torch.float32}
    assert kept == {f"learnable_pos_embed.pos_emb_{axis}" for axis in "thw"}
