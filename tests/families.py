"""Settings of the contract checks for each model family. A new family adds a line to CASES."""

import contextlib
import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from diffusers import SanaImageToVideoPipeline, WanImageToVideoPipeline
from diffusers.pipelines import qwenimage
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
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.qwen_image import unpack_latents
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.models.tiny.encoders import qwen_edit_text
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.recipe.shared_defaults import DEFAULT_FPS
from wfm_ds.types import Prompt

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


def robot_inputs(height, width, frames):
    draws = np.random.default_rng(9)
    return [{"actions": draws.normal(size=(frames - 1, 3)).astype("f4")} for _ in range(2)]


def actions_asked(pixels):
    return {
        "actions": [torch.from_numpy(row["actions"])[None] for row in robot_inputs(*pixels.shape[3:], pixels.shape[2])]
    }


def actions_given(folder, pixels, count):
    _, call = cosmos25_given(folder, pixels, count)
    pipeline = load_reference_pipeline(folder, CASES["cosmos25_actions"])
    return pipeline, call | {name: rows[:1] for name, rows in actions_asked(pixels).items()}


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


def random_sources(*names):
    """Return a function for Case.inputs: random source images with these names, in the size of the samples."""

    def draw_rows(height, width, frames):
        draws = np.random.default_rng(7)
        return [{name: draws.integers(0, 256, (height, width, 3), np.uint8) for name in names} for _ in range(2)]

    return draw_rows


def klein_with_sources(folder, pixels):
    row = random_sources("source", "source_2")(*pixels.shape[2:], 1)[0]
    call = {"image": [Image.fromarray(image) for image in row.values()], "guidance_scale": 1.0}
    return load_reference_pipeline(folder, CASES["flux2"]), row, call | {"max_sequence_length": 24}


def kontext_with_source(folder, pixels):
    height, width = pixels.shape[2:]
    row = random_sources("source")(height, width, 1)[0]
    call = {"image": Image.fromarray(row["source"]), "height": height, "width": width, "max_area": height * width}
    call |= {"_auto_resize": False, "max_sequence_length": 16, "guidance_scale": 4.0}
    return load_reference_pipeline(folder, CASES["flux_kontext"]), row, call


def random_controls(*names):
    """Return a function for Case.inputs: random videos with these names, in the size of the samples."""

    def draw_rows(height, width, frames):
        draws = np.random.default_rng(8)
        return [{name: draws.integers(0, 256, (frames, height, width, 3), np.uint8) for name in names} for _ in "ab"]

    return draw_rows


def to_images(video):
    return [Image.fromarray(frame) for frame in video]


def vace_control(pixels):
    rows = random_controls("control", "control_mask")(*pixels.shape[3:], pixels.shape[2])
    return {"video": [to_images(row["control"]) for row in rows]}


def vace_with_mask(folder, pixels):
    height, width, frames = *pixels.shape[3:], pixels.shape[2]
    row = random_controls("control", "control_mask")(height, width, frames)[0]
    call = {"video": [to_images(row["control"])], "mask": [to_images(row["control_mask"])], "num_frames": frames}
    call |= {"height": height, "width": width, "guidance_scale": 1.0, "max_sequence_length": 16}
    return load_reference_pipeline(folder, CASES["wan_vace"]), row, call


def dev_latents(model, tokens):
    """Unflatten the pipeline's output tokens to latents of the width of this case."""
    width = CASES["flux2_dev"].size[1] // (2 * model.pipeline.vae_scale_factor)
    return tokens.transpose(1, 2).unflatten(2, (-1, width))


def packed_latents(model, tokens):
    """Unpack the pipeline's output tokens to latents of the width of the family's case."""
    width = CASES[model.family].size[1] // model.pipeline.vae_scale_factor
    return unpack_latents(tokens, 4 * tokens.shape[1] // width, width)


def joined_latents(output):
    """Join the video latents and audio latents of LTX-2's pipeline."""
    return torch.cat([output.frames.flatten(1), output.audio.flatten(1)], dim=1)


def ltx2_latents(model, latents):
    """Normalise the latents of both streams, which the pipeline returns in the format of VAE inputs."""
    vae, sound = model.pipeline.vae, model.pipeline.audio_vae
    parts = model.split(latents)
    video = model.pipeline._normalize_latents(
        parts["video"], vae.latents_mean, vae.latents_std, vae.config.scaling_factor
    )
    tokens = parts["audio"].transpose(1, 2).flatten(2)
    audio = ((tokens - sound.latents_mean) / sound.latents_std).unflatten(2, parts["audio"].shape[1::2]).transpose(1, 2)
    return model.join({"video": video, "audio": audio})


@contextlib.contextmanager
def small_sources():
    """Let the pipelines of Qwen-Image-Edit resize source images to 32 x 64 pixels instead of 1024 x 1024."""
    edit, plus = qwenimage.pipeline_qwenimage_edit, qwenimage.pipeline_qwenimage_edit_plus
    compute = edit.calculate_dimensions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edit, "calculate_dimensions", lambda _, ratio: compute(32 * 64, ratio))
        patch.setattr(plus, "VAE_IMAGE_SIZE", 32 * 64)
        yield


def asked_sources(*names):
    """Return a function for Case.required_call_kwargs: the first image of each sample of `random_sources`."""

    def create_images(pixels):
        rows = random_sources(*names)(*pixels.shape[-2:], 1)
        return {"image": [Image.fromarray(row["source"]) for row in rows]}

    return create_images


def edit_with_two_sources(folder, pixels):
    height, width = pixels.shape[2:]
    row = random_sources("source", "source_2")(height, width, 1)[0]
    call = {"image": [[Image.fromarray(image) for image in row.values()]], "height": height, "width": width}
    return load_reference_pipeline(folder, CASES["qwen_image_edit_plus"]), row, call | {"true_cfg_scale": 1.0}


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


cosmos = partial(
    Case,
    size=(32, 48, 9),
    load_options={"guardrail": "off"},
    extra_components={"safety_checker": NoGuardrail()},
    block_lists=JOINT,
)
flux = partial(
    Case,
    size=(32, 48, 1),
    has_euler_scheduler=True,
    takes_negative_prompt=False,
    unpack_latents=klein_latents,
    inputs=random_sources("source"),
    block_lists=("transformer_blocks", "single_transformer_blocks"),
)
wan = partial(Case, size=(32, 48, 5), block_lists=WAN)
qwen_edit = partial(
    Case,
    size=(32, 64, 1),
    extra_components={"processor": qwen_edit_text()["processor"]},
    has_euler_scheduler=True,
    one_sample_per_call=True,
    unpack_latents=packed_latents,
    vae_has_frame_axis=True,
    block_lists=JOINT,
)
CASES = {
    "sd3": Case(size=(32, 48, 1), has_euler_scheduler=True, block_lists=JOINT),
    "digits": Case(size=(8, 8, 1), has_euler_scheduler=True, block_lists=JOINT),
    "cosmos25": cosmos(conditioning_frames_call=cosmos25_given),
    "cosmos25_actions": cosmos(
        conditioning_frames_call=actions_given,
        inputs=robot_inputs,
        required_call_kwargs=actions_asked,
        one_sample_per_call=True,
    ),
    "cosmos3": cosmos(
        conditioning_frames_call=cosmos3_given,
        inputs=cosmos3_inputs,
        # The smallest size in the pipeline's resolution table.
        reference_inputs=ReferenceInputs(size=(256, 256, 5), call=forward_dynamics, num_conditioning_frames=1),
        one_sample_per_call=True,
        block_lists=("layers",),
    ),
    "world": cosmos(size=(8, 16, 9), inputs=world_inputs, one_sample_per_call=True, block_lists=("layers",)),
    "wan21": wan(),
    "wan21_i2v": wan(one_sample_per_call=True),
    "wan22_i2v": wan(one_sample_per_call=True, sigmas=((0.97, 0.93), (0.8, 0.3))),
    "wan_vace": wan(
        block_lists=("blocks", "vace_blocks"),
        one_sample_per_call=True,
        inputs=random_controls("control", "control_mask"),
        required_call_kwargs=vace_control,
        reference_inputs=ReferenceInputs(size=(32, 48, 5), call=vace_with_mask),
    ),
    "moving": wan(size=(32, 32, 5)),
    "wan22": wan(sigmas=((0.97, 0.9), (0.8, 0.3))),
    "wan22_ti2v": wan(size=(64, 32, 9), conditioning_frames_call=ti2v_given),
    # A key bias shifts all scores of a query equally and has no gradient if keys are not normalised.
    "sana": Case(size=(32, 64, 1), block_lists=JOINT, zero_gradient_parameters=("attn2.to_k.bias",)),
    "flux2": flux(
        inputs=random_sources("source", "source_2"),
        # The pipeline refuses reference images with fewer than 64 pixels per side.
        reference_inputs=ReferenceInputs(size=(64, 96, 1), call=klein_with_sources),
    ),
    "edits": flux(size=(64, 96, 1)),
    "flux2_dev": flux(unpack_latents=dev_latents),
    "flux_kontext": flux(
        takes_negative_prompt=True,
        unpack_latents=packed_latents,
        reference_inputs=ReferenceInputs(size=(32, 48, 1), call=kontext_with_source),
    ),
    "qwen_image": Case(
        size=(32, 48, 1),
        has_euler_scheduler=True,
        unpack_latents=packed_latents,
        vae_has_frame_axis=True,
        block_lists=JOINT,
    ),
    "qwen_image_edit": qwen_edit(inputs=random_sources("source"), required_call_kwargs=asked_sources("source")),
    "qwen_image_edit_plus": qwen_edit(
        inputs=random_sources("source", "source_2"),
        required_call_kwargs=asked_sources("source", "source_2"),
        reference_inputs=ReferenceInputs(size=(32, 64, 1), call=edit_with_two_sources),
    ),
    "z_image": Case(
        size=(32, 48, 1), has_euler_scheduler=True, block_lists=("noise_refiner", "context_refiner", "layers")
    ),
    "ltx2": Case(
        size=(32, 96, 5),
        has_euler_scheduler=True,
        shared_arguments=("spatio_temporal_guidance_blocks",),
        read_latents=joined_latents,
        unpack_latents=ltx2_latents,
        block_lists=JOINT,
    ),
    "hunyuan_video15": Case(
        size=(32, 48, 5),
        has_euler_scheduler=True,
        one_sample_per_call=True,
        block_lists=JOINT,
        zero_gradient_parameters=("refiner_blocks.0.attn.to_k.bias",),  # as for SANA
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


def make_sampler(model, size=(32, 32), *, forward=None, max_joint_rows=None, **settings):
    """size: height, width and optionally number of frames. settings: keys of the recipe section `sampling`."""
    sizes = dict(zip(("height", "width", "num_frames"), size, strict=False))
    return Sampler(
        model=model,
        text_cache=TextCache(model),
        settings=SamplingRecipe(**sizes | settings),
        forward=forward or CountingForward(model.denoise),
        max_joint_rows=max_joint_rows or {},
    )


def create_prompts(*texts, **fields):
    return [Prompt(id=text, text=text, **fields) for text in texts]


def sample_latents(sampler, prompts, seeds, purpose="sample", **options):
    """Sample clean latents with the sampling plan of validation."""
    return sampler.generate(purpose, prompts, seeds, sampler.evaluation_plan(), **options).clean_latents


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
