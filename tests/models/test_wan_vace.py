"""Wan VACE against the stock pipeline: the encoded control videos, guided samples and two experts; rejected inputs.

test_families.py runs the checks that all families share.
"""

import numpy as np
import pytest
import torch
from diffusers import WanVACEPipeline, WanVACETransformer3DModel

from families import CASES, EXACT, PROMPTS, change_json, denoise_latents, random_controls, to_images
from wfm_ds.contract.case import load_reference_pipeline, run_reference_pipeline
from wfm_ds.engine.adapter_layers import match_linear_layers
from wfm_ds.errors import ModelError
from wfm_ds.models import registry, wan_vace
from wfm_ds.models.lora_layer_names import LoraNameTable
from wfm_ds.models.tiny import write_tiny_model
from wfm_ds.models.tiny.sizes import WAN_VACE
from wfm_ds.sampling.latents import draw_cpu_normal

pytestmark = pytest.mark.slow

SIZE = (32, 48, 9)
NEGATIVE = "blurry"


def draw_rows(*, masked):
    """Return the inputs of two samples. The levels of the masks include values just below and above the threshold."""
    rows = random_controls("control", "control_mask")(*SIZE)
    for row in rows:
        row["control_mask"] = np.array([0, 127, 128, 255], np.uint8)[row["control_mask"][..., :1] % 4].repeat(3, -1)
    return rows if masked else [{"control": row["control"]} for row in rows]


def stock_arguments(row):
    names = {"control": "video", "control_mask": "mask"}
    return {names[name]: to_images(video) for name, video in row.items()}


@pytest.mark.parametrize("masked", [False, True])
def test_the_control_latents_equal_the_stock_pipelines(load, tiny_pipelines, masked):
    model, pipeline = load("wan_vace"), load_reference_pipeline(tiny_pipelines("wan_vace"), CASES["wan_vace"])
    rows = draw_rows(masked=masked)
    got = model.encode_inputs(rows, SIZE[2], SIZE[:2])
    for i, row in enumerate(rows):
        video, mask, references = pipeline.preprocess_conditions(**stock_arguments(row), height=32, width=48)
        latents = pipeline.prepare_video_latents(video, mask, references)
        want = torch.cat([latents, pipeline.prepare_masks(mask, references)], dim=1)
        torch.testing.assert_close(got["control"][i : i + 1], want, **EXACT)
    assert {name: tuple(rows.shape[1:]) for name, rows in got.items()} == model.input_shapes(model.latent_shape(*SIZE))
    if masked:
        assert set(got["control"][:, 8:].mul(255).round().unique().tolist()) == {0, 127, 128, 255}


@pytest.fixture(scope="module")
def two_experts(tmp_path_factory):
    """Return the folder of a pipeline with two experts, like Wan 2.2 VACE."""
    folder = tmp_path_factory.mktemp("experts") / "wan_vace"
    write_tiny_model("wan_vace", folder)
    torch.manual_seed(3)
    WanVACETransformer3DModel(**WAN_VACE).save_pretrained(folder / "transformer_2")
    component = ["diffusers", "WanVACETransformer3DModel"]
    change_json(folder / "model_index.json", boundary_ratio=0.875, transformer_2=component)
    return folder


@pytest.mark.parametrize(("masked", "experts"), [(False, 1), (True, 1), (True, 2)])
def test_a_guided_batch_equals_single_stock_samples(load, tiny_pipelines, two_experts, masked, experts):
    folder = tiny_pipelines("wan_vace") if experts == 1 else two_experts
    model = load("wan_vace") if experts == 1 else registry.load_model(folder, dtype=torch.float32, device="cpu")
    case, rows, shape = CASES["wan_vace"], draw_rows(masked=masked), model.latent_shape(*SIZE)
    grid, noise, scales = model.sigmas(4, shape), draw_cpu_normal([1, 2], shape), {0: 4.0, 1: 2.5}
    assert {model.select_expert(sigma) for sigma in grid[:-1].tolist()} == set(range(experts))
    call = {**model.pipeline_call_kwargs(4.0, *SIZE), "negative_prompt": NEGATIVE}
    call |= {"guidance_scale_2": 2.5} if experts == 2 else {}
    videos = [stock_arguments(row) for row in rows]
    call |= {"latents": list(noise.split(1))} | {name: [one[name] for one in videos] for name in videos[0]}
    want = run_reference_pipeline(load_reference_pipeline(folder, case, WanVACEPipeline), case, grid, **call)
    inputs = model.encode_inputs(rows, SIZE[2], SIZE[:2])
    positive, negative = (model.encode_text(texts) | inputs for texts in (PROMPTS, [NEGATIVE] * 2))
    got = denoise_latents(model, noise, positive, grid, solver="ode", guidance_scale=scales, uncond=negative)
    torch.testing.assert_close(got, want, **EXACT)
    other = model.encode_inputs(rows[::-1], SIZE[2], SIZE[:2])
    swapped = denoise_latents(model, noise, positive | other, grid, solver="ode")
    assert (swapped - got).abs().max() > 0.01


def test_equal_videos_are_encoded_once_and_grey_videos_once_per_size(tiny_pipelines, monkeypatch):
    model = registry.load_model(tiny_pipelines("wan_vace"), dtype=torch.float32, device="cpu")
    encoded, encode = [], wan_vace.encode_normalized
    monkeypatch.setattr(wan_vace, "encode_normalized", lambda *args: encoded.append(args) or encode(*args))
    rows, masked = draw_rows(masked=False), draw_rows(masked=True)
    for inputs, total in ((rows, 3), (rows, 3), (masked, 7), ([{"control": rows[0]["control"][:5]}], 9)):
        model.encode_inputs(inputs, len(inputs[0]["control"]), SIZE[:2])
        assert len(encoded) == total


def test_nothing_is_denoised_without_a_control_video(load):
    model = load("wan_vace")
    latents = draw_cpu_normal([1], model.latent_shape(*SIZE))
    with pytest.raises(ValueError, match=r"conditioning lacks \['control'\], which"):
        model.denoise(latents, torch.ones(1), model.encode_text(PROMPTS[:1]))


def test_a_network_with_other_control_channels_is_refused(tmp_path):
    write_tiny_model("wan_vace", tmp_path / "model")
    WanVACETransformer3DModel(**WAN_VACE | {"vace_in_channels": 12}).save_pretrained(tmp_path / "model" / "transformer")
    with pytest.raises(ModelError, match="12 control channels is not supported, only 72"):
        registry.load_model(tmp_path / "model", dtype=torch.float32, device="cpu")


def test_lora_reaches_control_blocks_and_knows_their_original_names(load):
    model = load("wan_vace")
    adapted = match_linear_layers(model.denoiser, model.default_lora_targets)
    assert {"blocks.1.attn2.to_v", "vace_blocks.0.attn1.to_q", "vace_blocks.1.attn2.to_out.0"} <= set(adapted)
    table = LoraNameTable(model.lora_layer_names)
    layers = [name for name, part in model.denoiser.named_modules() if isinstance(part, torch.nn.Linear)]
    originals = {name: table.find_original(name) for name in layers if "blocks." in name}
    assert None not in originals.values()
    assert originals["vace_blocks.0.proj_in"][0] == "vace_blocks.0.before_proj"
    assert originals["vace_blocks.1.attn1.to_q"][0] == "vace_blocks.1.self_attn.q"
