"""Settings of the contract checks for each model family. A new family adds a line to CASES."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import SanaImageToVideoPipeline, WanImageToVideoPipeline
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import CosmosActionCondition
from diffusers.pipelines.sana_wm.cam_utils import action_string_to_c2w
from PIL import Image

from wfm_ds.contract.case import PROMPTS as PROMPTS
from wfm_ds.contract.case import Case, ReferenceInputs, load_reference_pipeline
from wfm_ds.contract.case import denoise_latents as denoise_latents
from wfm_ds.contract.case import run_reference_pipeline as run_reference_pipeline
from wfm_ds.contract.family_under_test import SEEDS
from wfm_ds.models import registry
from wfm_ds.models.assets.guardrail import NoGuardrail
from wfm_ds.models.qwen_image import unpack_latents
from wfm_ds.recipe.shared_defaults import DEFAULT_FPS

EXACT = {"rtol": 0, "atol": 1e-5}
JOINT, WAN = ("transformer_blocks",), ("blocks",)


def cosmos25_given(folder, pixels, count):
    """Condition on video for every `count`, because only the pipeline's image path needs torchvision.

    Image-to-world equals video-to-world with one latent frame.
    """
    frames = pixels[:, :, : 1 + 4 * (count - 1)]
    return load_reference_pipeline(folder, CASES["cosmos25"]), {
        "video": 2 * frames - 1,
        "num_latent_conditional_frames": count,
    }


def cosmos3_given(folder, pixels, count):
    """Condition on video, because the pipeline's image path rounds to 8 bits.

    The pipeline uses given latents unchanged, so it must draw them itself.
    """
    given = {"video": pixels.movedim(1, 2), "condition_frame_indexes_vision": tuple(range(count))}
    noise = {"latents": None, "generator": torch.Generator().manual_seed(SEEDS[0])}
    return load_reference_pipeline(folder, CASES["cosmos3"]), given | noise


def cosmos3_inputs(height, width, frames):
    """Return actions of two samples with different domains. They have fewer channels than the network supports."""
    draws = np.random.default_rng(6)
    return [{"actions": draws.normal(size=(frames - 1, 9)).astype("f4"), "domain": np.float32(i)} for i in range(2)]


def world_inputs(height, width, frames):
    return [{"actions": np.eye(3, dtype="f4")[(np.arange(frames - 1) + i) % 3]} for i in range(2)]


def forward_dynamics(folder, pixels):
    row, _ = cosmos3_inputs(*pixels.shape[3:], pixels.shape[2])
    told = CosmosActionCondition(
        mode="forward_dynamics",
        chunk_size=len(row["actions"]),
        domain_name="camera_pose",
        resolution_tier=256,
        raw_actions=torch.from_numpy(row["actions"]),
        image=pixels[0, :, 0],
    )
    call = {"action": told, "fps": DEFAULT_FPS, "guidance_scale": 1.0}
    return load_reference_pipeline(folder, CASES["cosmos3"]), row | {"domain": np.float32(2)}, call


def ti2v_given(folder, pixels, count):
    assert count == 1
    parts = load_reference_pipeline(folder, CASES["wan22_ti2v"]).components
    pipeline = WanImageToVideoPipeline(**parts, expand_timesteps=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, {"image": pixels[:, :, 0]}


def sana_video_given(folder, pixels, count):
    return load_reference_pipeline(folder, CASES["sana_video"], SanaImageToVideoPipeline), {"image": pixels[:, :, 0]}


def klein_latents(model, patches):
    """Patchify and normalise the pipeline's output, which is in the format of VAE inputs."""
    mean, std = model._patch_statistics()
    return (torch.pixel_unshuffle(patches, 2) - mean) / std


def dev_latents(model, tokens):
    """Unflatten the pipeline's output tokens to latents of the width of this case."""
    width = CASES["flux2_dev"].size[1] // (2 * model.pipeline.vae_scale_factor)
    return tokens.transpose(1, 2).unflatten(2, (-1, width))


def qwen_latents(model, tokens):
    """Unpack the pipeline's output tokens to latents of the width of this case."""
    width = CASES["qwen_image"].size[1] // model.pipeline.vae_scale_factor
    return unpack_latents(tokens, 4 * tokens.shape[1] // width, width)


# One camera moves forward and turns, the other moves up. Their intrinsics differ.
CAMERAS = [
    {"c2w": action_string_to_c2w("w-2,jw-2"), "intrinsics": np.array([40, 41, 24, 16], np.float32)},
    {"c2w": action_string_to_c2w("il-4"), "intrinsics": np.array([30, 31, 20, 18], np.float32)},
]


def first_images(pixels):
    """Return the first frames of pixels [B,3,F,H,W] as PIL images."""
    frames = (255 * pixels[:, :, 0]).round().to(torch.uint8).movedim(1, -1)
    return [Image.fromarray(frame.numpy()) for frame in frames]


def camera_asked(pixels):
    return {"image": first_images(pixels)} | {name: [row[name] for row in CAMERAS] for name in CAMERAS[0]}


CASES = {
    "sd3": Case(size=(32, 48, 1), has_euler_scheduler=True, block_lists=JOINT),
    "digits": Case(size=(8, 8, 1), has_euler_scheduler=True, block_lists=JOINT),
    "cosmos25": Case(
        size=(32, 48, 9),
        load_options={"guardrail": "off"},
        extra_components={"safety_checker": NoGuardrail()},
        conditioning_frames_call=cosmos25_given,
        block_lists=JOINT,
    ),
    "cosmos3": Case(
        size=(32, 48, 9),
        load_options={"guardrail": "off"},
        extra_components={"safety_checker": NoGuardrail()},
        conditioning_frames_call=cosmos3_given,
        inputs=cosmos3_inputs,
        # The smallest size in the pipeline's resolution table.
        reference_inputs=ReferenceInputs(size=(256, 256, 5), call=forward_dynamics, num_conditioning_frames=1),
        one_sample_per_call=True,
        block_lists=("layers",),
    ),
    "world": Case(
        size=(8, 16, 9),
        inputs=world_inputs,
        load_options={"guardrail": "off"},
        extra_components={"safety_checker": NoGuardrail()},
        one_sample_per_call=True,
        block_lists=("layers",),
    ),
    "wan21": Case(size=(32, 48, 5), block_lists=WAN),
    "wan21_i2v": Case(size=(32, 48, 5), block_lists=WAN, one_sample_per_call=True),
    "wan22_i2v": Case(size=(32, 48, 5), block_lists=WAN, one_sample_per_call=True, sigmas=((0.97, 0.93), (0.8, 0.3))),
    "moving": Case(size=(32, 32, 5), block_lists=WAN),
    "wan22": Case(size=(32, 48, 5), block_lists=WAN, sigmas=((0.97, 0.9), (0.8, 0.3))),
    "wan22_ti2v": Case(size=(64, 32, 9), block_lists=WAN, conditioning_frames_call=ti2v_given),
    # A key bias shifts all scores of a query equally and has no gradient if keys are not normalised.
    "sana": Case(size=(32, 64, 1), block_lists=JOINT, zero_gradient_parameters=("attn2.to_k.bias",)),
    "flux2": Case(
        size=(32, 48, 1),
        has_euler_scheduler=True,
        takes_negative_prompt=False,
        unpack_latents=klein_latents,
        block_lists=("transformer_blocks", "single_transformer_blocks"),
    ),
    "flux2_dev": Case(
        size=(32, 48, 1),
        has_euler_scheduler=True,
        takes_negative_prompt=False,
        unpack_latents=dev_latents,
        block_lists=("transformer_blocks", "single_transformer_blocks"),
    ),
    "qwen_image": Case(
        size=(32, 48, 1),
        has_euler_scheduler=True,
        unpack_latents=qwen_latents,
        vae_has_frame_axis=True,
        block_lists=JOINT,
    ),
    "z_image": Case(
        size=(32, 48, 1), has_euler_scheduler=True, block_lists=("noise_refiner", "context_refiner", "layers")
    ),
    "sana_wm": Case(
        size=(32, 48, 5),
        has_euler_scheduler=True,
        one_sample_per_call=True,
        shared_arguments=("chi_prompt",),
        inputs=lambda *_: CAMERAS,
        required_call_kwargs=camera_asked,
        block_lists=("blocks",),
        tolerance=2e-4,  # some of its attention rounds to bfloat16, so equal computations differ by that much
    ),
    "sana_video": Case(size=(32, 64, 5), conditioning_frames_call=sana_video_given, block_lists=JOINT),
}
DEFAULT_FAMILIES = ("sd3", "wan21")  # one image model and one video model


def load_tiny(folder, family, dtype=torch.float32, **options):
    """Load a pipeline with the load options of its family. `options` adds to them or overrides them."""
    return registry.load_model(folder, dtype=dtype, device="cpu", **{**CASES[family].load_options, **options})


@contextlib.contextmanager
def record_calls(network):
    """Yield a list that collects the keyword arguments of each forward pass."""
    calls = []
    with network.register_forward_pre_hook(lambda _, __, kwargs: calls.append(kwargs), with_kwargs=True):
        yield calls


def change_json(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def copy_pipeline(folder, out, **changes):
    """Copy a pipeline folder and change its model_index.json. Returns the copy."""
    shutil.copytree(folder, out)
    change_json(out / "model_index.json", **changes)
    return out


def each_family(families=CASES):
    """Parametrize a test by `family`. Families outside DEFAULT_FAMILIES are marked slow."""
    cases = [name if name in DEFAULT_FAMILIES else pytest.param(name, marks=pytest.mark.slow) for name in families]
    return pytest.mark.parametrize("family", cases)
