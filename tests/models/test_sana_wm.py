"""Tests specific to SANA-WM; test_families.py has the tests that all families share."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, SanaWMPipeline
from diffusers.models.transformers import transformer_sana_wm as network
from diffusers.pipelines.sana_wm.cam_utils import action_string_to_c2w, prepare_camera
from peft import get_peft_model_state_dict

from families import CAMERAS, CASES, EXACT, PROMPTS, first_images, make_sampler, sample_latents
from wfm_ds.contract.case import load_reference_pipeline
from wfm_ds.contract.denoiser_checks import add_random_adapter
from wfm_ds.contract.export_checks import export_model
from wfm_ds.contract.family_under_test import SEEDS, FamilyUnderTest
from wfm_ds.data.folder import load_folder
from wfm_ds.data.inputs import InputReader, transform_intrinsics
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.data.samples import LocalFile
from wfm_ds.demos import room_data as room
from wfm_ds.export.loading_code import loading_lines
from wfm_ds.models.sana_wm import SanaWM
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.types import ConditioningFrames, Prompt

pytestmark = pytest.mark.slow

SIZE = (32, 48, 5)
STEPS, W = 4, 4.0


@pytest.fixture(scope="module")
def subject(tiny_pipelines):
    found = FamilyUnderTest(tiny_pipelines("sana_wm"), CASES["sana_wm"])
    assert isinstance(found.model, SanaWM)
    return found


@pytest.fixture(scope="module")
def model(subject):
    """Return the model shared by tests that do not modify it."""
    return subject.model


@pytest.fixture(scope="module")
def sampler(model):
    return make_sampler(model, SIZE, max_joint_rows={"validation": 4}, eval_steps=STEPS, guidance_scale=W)


def prompts_of(cameras):
    return [Prompt(id=text, text=text, inputs=camera) for text, camera in zip(PROMPTS, cameras, strict=True)]


def frames_of(model, pixels):
    return ConditioningFrames(model.encode_pixels(pixels), torch.ones(len(pixels), dtype=torch.int64))


# Against the stock pipeline


@pytest.mark.parametrize("purpose", ["sample", "validation"])
def test_a_guided_batch_is_the_stock_pipelines_samples_where_attention_does_not_round(
    purpose, subject, model, sampler, monkeypatch
):
    """Each sample has its own camera, lens, first frame and text; guidance takes two forwards or one joint forward."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    given = frames_of(model, subject.random_pixels())
    want = subject.reference_latents(
        subject.load_reference_pipeline(), model.sigmas(STEPS, subject.latent_shape), **subject.pipeline_call_kwargs(W)
    )
    got = sample_latents(sampler, prompts_of(CAMERAS), SEEDS, purpose, conditional_frames=given)
    torch.testing.assert_close(got, want, **EXACT)
    assert torch.equal(got[:, :, :1], given.latents[:, :, :1])


def test_images_and_intrinsics_are_cropped_as_in_the_stock_pipeline(model, tmp_path):
    image = first_images(torch.rand(1, 3, 1, 50, 90))[0]
    image.save(tmp_path / "image.png")
    lens = np.array([60, 62, 44, 26], np.float32)
    processor = load_reference_pipeline(model.path, CASES["sana_wm"]).image_processor
    _, want = processor.preprocess_with_intrinsics(image, lens[None], 32, 48)
    framing = Framing(height=32, width=48, max_upscale=100.0)
    got = transform_intrinsics(lens, LocalFile(str(tmp_path / "image.png")), framing, draw_centre)
    np.testing.assert_allclose(got, want[0], atol=0.5)  # the stock pipeline crops whole pixels of the resized image


def test_the_cameras_geometry_is_the_stock_pipelines_in_float32(model):
    made = model.encode_inputs(CAMERAS, SIZE[2], SIZE[:2])
    for i, camera in enumerate(CAMERAS):
        lens = np.broadcast_to(camera["intrinsics"], (5, 4)).copy()
        want = prepare_camera(camera["c2w"], lens, target_size=SIZE[:2], vae_stride=(2, 8, 8))
        assert torch.equal(made["raymap"][i], want["raymap"])
        assert torch.equal(made["chunk_plucker"][i], want["chunk_plucker"])
    assert {tensor.dtype for tensor in made.values()} == {torch.float32}
    each = [{**camera, "intrinsics": np.tile(camera["intrinsics"], (5, 1))} for camera in CAMERAS]
    assert all(torch.equal(made[name], tensor) for name, tensor in model.encode_inputs(each, 5, SIZE[:2]).items())


# The camera


def test_clips_with_a_camera_that_cannot_be_used_are_bad_by_name(model, tmp_path):
    """Wrong number of poses, a scaled rotation, three intrinsics, a focal length of 0, no intrinsics."""
    room.write_room(tmp_path / "room")
    clips = tmp_path / "room" / "clips"
    np.save(clips / "0001.c2w.npy", np.eye(4)[None].repeat(8, 0))
    np.save(clips / "0002.c2w.npy", 2 * np.eye(4)[None].repeat(9, 0))
    lenses = {3: {"intrinsics": [24, 24, 16]}, 4: {"intrinsics": [0, 24, 16, 16]}, 5: {}}
    for number, lens in lenses.items():
        camera = {"c2w": f"{number:04}.c2w.npy", **lens}
        (clips / f"{number:04}.json").write_text(json.dumps({"prompt": "a room", "camera": camera}))
    data = {"kind": "folder", "path": str(clips), "inputs": ["c2w", "intrinsics"]}
    recipe = SimpleNamespace(
        data=DataRecipe(**data),
        sampling=SamplingRecipe(height=32, width=32, num_frames=5, fps=8, steps=2),
        algorithm=SimpleNamespace(conditioning_frame_range=(1, 1)),
    )
    reader = InputReader.from_recipe(recipe, model, None)
    framing = Framing(height=32, width=32, num_frames=5, fps=8)
    samples = load_folder(recipe.data, clips).samples
    said = []
    for sample in samples[:5]:
        with pytest.raises(BadMedia) as refused:
            reader.load_prompt(sample, framing, draw_centre)
        assert refused.value.reason == "bad_input"
        said.append(str(refused.value))
    wanted = ("[8, 4, 4]", "rotation is not orthonormal", "[3]", "focal length", "missing in the caption file")
    assert all(words in sentence for words, sentence in zip(wanted, said, strict=True)), said
    assert reader.load_prompt(samples[5], framing, draw_centre).inputs["intrinsics"].shape == (5, 4)


def test_camera_keys_move_as_in_the_stock_pipeline_and_the_room_demo():
    """The room demo's poses use the model's axes: `l` turns right, `w` moves forward."""
    keys = action_string_to_c2w("lw-8", translation_speed=0.05, rotation_speed_deg=3.0)
    np.testing.assert_allclose(room.camera_path(3.0, 0.05, 0.0), keys, atol=1e-6)


# The network


def test_a_saved_pipeline_has_the_stock_network(model, tmp_path):
    model.pipeline.save_pretrained(tmp_path)
    assert type(DiffusionPipeline.from_pretrained(tmp_path, local_files_only=True).transformer) is (
        network.SanaWMTransformer3DModel
    )


def test_the_lines_of_an_export_load_its_lora_into_plain_diffusers(subject, tmp_path):
    model = subject.load_model()
    add_random_adapter(model, b_std=0.3)
    out = export_model(tmp_path / "out", model, lora=True)
    lines, there = loading_lines(model.path, out, lora=True), {}
    exec(lines, there)
    want, got = (
        get_peft_model_state_dict(one, adapter_name="default") for one in (model.denoiser, there["pipe"].transformer)
    )
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


# Behavior of diffusers: if one of these fails, diffusers has changed; then remove its row from docs/models/sana.md.


@torch.no_grad()
def test_the_network_rounds_its_time_down(subject, model):
    noise, _, conditioning = subject.denoise_arguments(model)
    whole, more, next_one = (model.denoise(noise, torch.full((2,), s), conditioning) for s in (0.5, 0.5009, 0.501))
    assert torch.equal(more[:, :, 1:], whole[:, :, 1:])
    assert not torch.equal(next_one[:, :, 1:], whole[:, :, 1:])


def test_the_stock_call_takes_one_prompt(subject):
    call = {
        **subject.model.pipeline_call_kwargs(1.0, *SIZE),
        **CAMERAS[0],
        "image": first_images(subject.random_pixels())[0],
    }
    with pytest.raises(TypeError, match="can only concatenate str"):
        subject.load_reference_pipeline()(prompt=PROMPTS, num_inference_steps=2, **call)


def test_the_stock_network_takes_no_adapters_and_its_pipeline_loads_none():
    assert not hasattr(network.SanaWMTransformer3DModel, "load_lora_adapter")
    assert not hasattr(SanaWMPipeline, "load_lora_weights")


def test_the_stock_network_makes_no_grid_in_bfloat16_on_a_cpu():
    with pytest.raises(ValueError, match="bfloat16 is not supported by cpu"):
        network.create_grid(2, 2, dtype=torch.bfloat16)


def test_camera_rays_are_computed_before_rounding_to_bfloat16(monkeypatch):
    """Rays that the stock network computes from bfloat16 poses, as on a GPU, have a larger error than rays that are
    rounded afterwards. Camera path and size come from the stock example."""
    c2w, lens = action_string_to_c2w("w-80,jw-40,w-40"), np.tile(np.float32([800, 800, 640, 352]), (161, 1))
    raymap = prepare_camera(c2w, lens, target_size=(704, 1280), vae_stride=(8, 32, 32))["raymap"][None]
    make, grid, tokens = network._process_camera_conditions_ucpe, network.create_grid, (21, 22, 40)
    rays, _ = make(raymap, 1, tokens, (1, 1, 1))
    monkeypatch.setattr(network, "create_grid", lambda dtype, **rest: grid(dtype=torch.float32, **rest).to(dtype))
    theirs, _ = make(raymap.bfloat16(), 1, tokens, (1, 1, 1))
    wrong, rounded = (float((found.float() - rays).norm()) for found in (theirs, rays.bfloat16()))
    assert wrong > 2 * rounded
