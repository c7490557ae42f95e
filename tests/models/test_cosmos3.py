"""Tests specific to Cosmos3; test_families.py has the tests that all families share."""

import json

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from families import EXACT, denoise_latents, load_tiny
from folders import sft_recipe
from wfm_ds.contract.case import FixedGridEuler
from wfm_ds.data.datasets import TrainingData
from wfm_ds.data.episode import EpisodeVideo
from wfm_ds.data.samples import Sample
from wfm_ds.errors import ModelError
from wfm_ds.export.target import ExportTarget
from wfm_ds.models.assets.guardrail import NoGuardrail
from wfm_ds.models.assets.text_cache import format_prompts, prompt_text, require_viewpoints
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.recipe.actions import VIEWPOINTS
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.sampling.latents import draw_cpu_normal
from wfm_ds.training.caches import collect_run_texts
from wfm_ds.types import Prompt

pytestmark = pytest.mark.slow

PROMPTS = ["a red circle on white.", "the digit 7 moving left and right in the video"]
VIDEO, IMAGE, OVERHANGING = (32, 48, 9), (32, 32, 1), (40, 24, 5)
FPS = 24.0


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return load_tiny(tiny_pipelines("cosmos3"), "cosmos3", fps=FPS)


@pytest.fixture(scope="module")
def stock(tiny_pipelines):
    """Return a function that samples latents with the stock pipeline: `stock(prompt, sigmas, **call_arguments)`."""
    pipeline = DiffusionPipeline.from_pretrained(
        tiny_pipelines("cosmos3"), safety_checker=NoGuardrail(), use_safetensors=True, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)

    def draw(prompt, grid, **call):
        pipeline.scheduler = FixedGridEuler(shift=1.0).use_grid(grid)
        call = {"fps": FPS, "output_type": "latent", **call}
        return pipeline(prompt=prompt, num_inference_steps=len(grid) - 1, **call).video

    draw.pipeline = pipeline
    return draw


def told(model, size, prompts=PROMPTS):
    return model.encode_text([model.format_prompt(prompt, *size) for prompt in prompts])


def one_call(model, size=VIDEO):
    shape = model.latent_shape(*size)
    return draw_cpu_normal([1, 2], shape), torch.tensor([0.9, 0.3]), told(model, size)


def actions_of(model, count=2, seed=6):
    generator = torch.Generator().manual_seed(seed)
    rows = [{"actions": torch.randn(8, 9, generator=generator).numpy(), "domain": np.array(i)} for i in range(count)]
    return model.encode_inputs(rows, 9, (32, 48))


# Against the stock pipeline


@pytest.mark.parametrize(
    ("size", "w", "negative"),
    [(VIDEO, 4.0, None), (IMAGE, 4.0, "a blue square"), (IMAGE, 1.0, None), (OVERHANGING, 4.0, None)],
)
def test_a_batch_of_unequal_prompts_equals_single_stock_calls(model, stock, size, w, negative):
    noise, grid = draw_cpu_normal([1, 2], model.latent_shape(*size)), model.sigmas(4, model.latent_shape(*size))
    call = model.pipeline_call_kwargs(w, *size) | {"negative_prompt": negative}
    want = torch.cat([stock(p, grid, latents=noise[i : i + 1], **call) for i, p in enumerate(PROMPTS)])
    uncond = model.encode_negative_text(
        [model.format_prompt(model.resolve_negative_prompt(negative), *size, negative=True)] * 2
    )
    conditions = {"guidance_scale": w, "uncond": uncond} if w > 1 else {}
    got = denoise_latents(model, noise, told(model, size), grid, solver="ode", **conditions)
    torch.testing.assert_close(got, want, **EXACT)


def test_image_to_video_equals_the_stock_pipelines(model, stock):
    shape, pixels = model.latent_shape(*VIDEO), torch.randint(256, (1, 3, 9, 32, 48)) / 255  # stock rounds to 8 bits
    grid, call = model.sigmas(4, shape), model.pipeline_call_kwargs(1.0, *VIDEO)
    want = stock(PROMPTS[0], grid, image=pixels[:, :, 0], generator=torch.Generator().manual_seed(1), **call)
    conditioning = add_clean_frames(told(model, VIDEO, PROMPTS[:1]), model.encode_pixels(pixels), torch.tensor([1]))
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(denoise_latents(model, noise, conditioning, grid, solver="ode"), want, **EXACT)


def test_captions_are_the_ids_that_the_stock_pipeline_makes(model, stock):
    for size in (VIDEO, IMAGE):
        for text in (*PROMPTS, ""):
            height, width, frames = size
            want = stock.pipeline.tokenize_prompt(text, text, num_frames=frames, height=height, width=width, fps=FPS)
            captions = [model.format_prompt(text, *size, negative=negative) for negative in (False, True)]
            assert [model.tokenize_prompt(caption) for caption in captions] == list(want)


def test_captions_with_actions_name_the_view(stock, tiny_pipelines):
    model = load_tiny(tiny_pipelines("cosmos3"), "cosmos3", fps=FPS, inputs=["actions"])
    height, width, frames = VIDEO
    shape = {"num_frames": frames, "height": height, "width": width, "fps": FPS}

    def caption(viewpoint):
        (text,) = format_prompts(
            model, [prompt_text(Prompt(id="a", text=PROMPTS[0], viewpoint=viewpoint))], (32, 48), 9
        )
        return text

    for viewpoint in (None, "ego_view", "third_person_view", "wrist_view", "concat_view"):
        want, _ = stock.pipeline.tokenize_prompt(
            PROMPTS[0], "", **shape, action_mode="forward_dynamics", action_view_point=viewpoint or "ego_view"
        )
        assert model.tokenize_prompt(caption(viewpoint)) == want
    own = "The left half shows the scene; the right half shows the wrist."
    framings = {
        view: json.loads(caption(view).partition("\n")[2])["cinematography"]["framing"] for view in (*VIEWPOINTS, own)
    }
    assert framings.pop(own) == own
    assert len(set(framings.values())) == len(VIEWPOINTS) == 6
    assert all(
        framing.startswith("This video is captured") for view, framing in framings.items() if view != "concat_view"
    )
    require_viewpoints(model, SamplingRecipe(height=32, width=48, num_frames=9), "data.viewpoint")
    with pytest.raises(ModelError, match=r"data.viewpoint: captions of cosmos3 .* do not mention the view: remove it"):
        require_viewpoints(
            load_tiny(tiny_pipelines("cosmos3"), "cosmos3"), SamplingRecipe(height=32, width=48), "data.viewpoint"
        )


def test_a_run_encodes_all_alternative_captions_with_their_view(tiny_pipelines):
    model = load_tiny(tiny_pipelines("cosmos3"), "cosmos3", fps=FPS, inputs=["actions"])
    data = {"kind": "lerobot", "path": "/data", "inputs": ["actions"], "viewpoint": "wrist_view"}
    prompt, video = Prompt(id="a", text=PROMPTS[0], viewpoint="wrist_view"), EpisodeVideo("a", (), FPS, 0, 20)
    sample = Sample(id="a", media=video, prompt=prompt, texts=tuple(PROMPTS))
    loaded = TrainingData(prompts=[], samples=[sample], bad={}, held_out=[], validation_prompts=[])
    recipe = sft_recipe(data, num_frames=9)
    size = (recipe.sampling.height, recipe.sampling.width, 9)
    captions = {model.format_prompt(text, *size, viewpoint="wrist_view") for text in PROMPTS}
    assert set(collect_run_texts(recipe, model, loaded)) == captions


def test_the_stock_call_uses_only_its_first_prompt(model, stock):
    grid = model.sigmas(2, model.latent_shape(*IMAGE))
    call = model.pipeline_call_kwargs(1.0, *IMAGE)
    first, both = (
        stock(prompts, grid, generator=torch.Generator().manual_seed(1), **call) for prompts in (PROMPTS[:1], PROMPTS)
    )
    assert both.shape[0] == 1
    assert torch.equal(both, first)


def test_the_stock_call_with_given_latents_loses_the_conditioning_frame(model, stock):
    shape = model.latent_shape(*VIDEO)
    grid, call = model.sigmas(2, shape), model.pipeline_call_kwargs(1.0, *VIDEO)
    image, noise = torch.zeros(1, 3, 32, 48), draw_cpu_normal([1], shape)
    drawn = stock(PROMPTS[0], grid, image=image, latents=noise, **call)
    assert torch.equal(drawn[:, :, 0], noise[:, :, 0])  # no step changes it: the pipeline uses the noise as the frame


def test_videos_in_one_call_of_the_stock_transformer_see_each_other(model, stock):
    """The velocity of the first video changes when the second video after the same text changes."""
    pipeline, shape = stock.pipeline, model.latent_shape(*OVERHANGING)
    ids = torch.tensor(model.tokenize_prompt(PROMPTS[0]))
    text = pipeline._prepare_text_segment(ids.tolist(), device="cpu")
    first, *others = draw_cpu_normal([1, 2, 3], shape)[:, None]

    @torch.no_grad()
    def velocity_beside(other):
        segments, start = [], text["und_len"]
        for latents in (first, other):
            made = pipeline._prepare_vision_segment(
                latents, False, text["vision_start_temporal_offset"], FPS, start, "cpu"
            )
            segments.append(made)
            start += made["num_vision_tokens"]
        joined = {
            name: torch.cat([segment[name] for segment in segments])
            for name in ("vision_sequence_indexes", "vision_mse_loss_indexes")
        }
        lists = {
            name: [segment[name][0] for segment in segments]
            for name in ("vision_token_shapes", "vision_noisy_frame_indexes")
        }
        positions = [text["text_mrope_ids"], *(segment["vision_mrope_ids"] for segment in segments)]
        return pipeline.transformer(
            input_ids=text["input_ids"],
            text_indexes=text["text_indexes"],
            position_ids=torch.cat(positions, 1),
            und_len=text["und_len"],
            sequence_length=start,
            vision_tokens=[first, other],
            vision_timesteps=torch.full((start - text["und_len"],), 500.0),
            **joined,
            **lists,
        ).sample[0]

    one, another = map(velocity_beside, others)
    assert (one - another).abs().max() > 1e-3


def test_the_stock_pipeline_has_no_loader_of_adapters(stock):
    assert not hasattr(stock.pipeline, "load_lora_weights")


# Actions


@torch.no_grad()
def test_each_domain_has_weights_of_its_own(model):
    noise, sigma, text = one_call(model)
    latents, sigma = noise[:1].repeat(2, 1, 1, 1, 1), sigma[:1].repeat(2)
    same = {name: tensor[:1].repeat(2, *[1] * (tensor.ndim - 1)) for name, tensor in text.items()}
    actions = actions_of(model)
    one, other = model.denoise(latents, sigma, same | actions | {"actions": actions["actions"][:1].repeat(2, 1, 1)})
    assert (one - other).abs().max() > 1e-4


# The two towers


def test_the_two_towers_contain_all_parameters_except_text_heads(model, stock):
    names = set(stock.pipeline.transformer.state_dict())
    denoises = set(model.unwrapped_denoiser.state_dict())
    reads = {name.replace("text_tower.", "") for name in model.text_tower.state_dict()}
    assert denoises < names
    assert reads < names
    assert not denoises & reads
    assert names - denoises - reads == {"lm_head.weight", "norm.weight"}


def test_full_training_excludes_parameters_without_gradient(model, tiny_pipelines):
    told = load_tiny(tiny_pipelines("cosmos3"), "cosmos3", fps=FPS, inputs=["actions"])
    reads = {"action_modality_embed", "action_proj_in.fc.weight", "action_proj_in.bias.weight"}
    predicts = {"action_proj_out.fc.weight", "action_proj_out.bias.weight"}
    assert model.find_unused_parameters() == reads | predicts
    assert told.find_unused_parameters() == predicts
    noise, sigma, text = one_call(told)
    told.denoise(noise, sigma, text | actions_of(told)).square().mean().backward()
    without = {name for name, weight in told.unwrapped_denoiser.named_parameters() if weight.grad is None}
    assert without == predicts


def test_dropping_the_text_tower_keeps_encoded_texts(tiny_pipelines):
    model = load_tiny(tiny_pipelines("cosmos3"), "cosmos3", fps=FPS)
    arguments = one_call(model)
    with torch.no_grad():
        before = model.denoise(*arguments)
        model.drop_text_encoders()
        assert model.text_encoders() == {}
        assert model.auxiliary_modules() == [model.pipeline.vae]
        torch.testing.assert_close(model.denoise(*arguments), before, rtol=0, atol=0)


def test_a_pipeline_that_sets_its_own_levels_has_no_even_ones(tiny_pipelines):
    model = load_tiny(tiny_pipelines("cosmos3"), "cosmos3")
    height, width, frames = VIDEO
    even = SamplingRecipe(height=height, width=width, num_frames=frames, eval_steps=4, eval_grid="even")
    assert ExportTarget.from_model(model, even).scheduler is not None
    model.pipeline.register_to_config(use_native_flow_schedule=True)
    with pytest.raises(ModelError, match="Cosmos3OmniPipeline of diffusers cannot use the even noise levels"):
        ExportTarget.from_model(model, even)
