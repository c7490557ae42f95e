"""What test_families.py must know of each family. A new one adds a line to CASES."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SanaImageToVideoPipeline,
    WanImageToVideoPipeline,
)

from wfm_ds.models.guardrail import NoGuardrail
from wfm_ds.sampling.plan import deterministic_plan

PROMPTS = ["a red circle on white", "the digit 7"]
EXACT = {"rtol": 0, "atol": 1e-5}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One tiny pipeline."""

    size: tuple[int, int, int]  # height, width, frames
    load_options: dict[str, Any] = field(default_factory=dict)  # of registry.load
    stock_parts: dict[str, Any] = field(default_factory=dict)  # that plain diffusers needs besides the folder
    euler: bool = False  # the stock scheduler is Euler on float times: what our `ode` does
    given: Callable[..., tuple[Any, dict[str, Any]]] | None = None  # (folder, pixels, count) -> pipeline, call
    blocks: str = "transformer_blocks"  # where the denoiser lists its blocks
    sigmas: tuple[tuple[float, float], ...] = ((0.9, 0.3),)  # noise levels of two samples, for each expert
    without_gradient: tuple[str, ...] = ()  # layers that a loss cannot reach


class GridEuler(FlowMatchEulerDiscreteScheduler):
    """Euler on a given grid, with float times: makes a stock pipeline step as our `ode` does."""

    def on(self, sigmas):
        self.grid = [float(sigma) for sigma in sigmas[:-1]]
        return self

    def set_timesteps(self, num_inference_steps=None, device=None, **_):
        super().set_timesteps(sigmas=self.grid, device=device)


def stock(folder, case, pipeline_class=DiffusionPipeline):
    """The plain diffusers pipeline of a folder: of the class that it names, or of another one."""
    pipeline = pipeline_class.from_pretrained(folder, use_safetensors=True, local_files_only=True, **case.stock_parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def denoise_latents(model, noise, conditioning, sigmas, *, solver, guidance_scale=1.0, uncond=None):
    """Our own clean latents. guidance_scale: a number, or one for each stage."""

    def predict(latents, sigma):
        sigma_B, stage = torch.full((len(latents),), sigma), model.expert_of(sigma)
        velocity = model.denoise(latents, sigma_B, conditioning, stage)
        if uncond is None:
            return velocity
        w = guidance_scale[stage] if isinstance(guidance_scale, dict) else guidance_scale
        return model.combine_guidance(velocity, model.denoise(latents, sigma_B, uncond, stage), w)

    return deterministic_plan(solver, sigmas).run(predict, noise, [0] * len(noise)).clean


def draw(pipeline, case, sigmas, **call):
    """What a stock pipeline makes of PROMPTS on this grid: images, or frames as [B,C,F,H,W] in pixels."""
    if not case.euler:
        pipeline.scheduler = GridEuler(shift=1.0).on(sigmas)
    call = {"prompt": PROMPTS, "output_type": "latent", **call}
    output = pipeline(num_inference_steps=len(sigmas) - 1, **call)
    drawn = output.images if hasattr(output, "images") else output.frames
    return drawn.movedim(2, 1) if call["output_type"] == "pt" and drawn.ndim == 5 else drawn


def cosmos25_given(folder, pixels, count):
    """Image to world is video to world with one latent frame: the image path alone needs torchvision."""
    frames = pixels[:, :, : 1 + 4 * (count - 1)]
    return stock(folder, CASES["cosmos25"]), {"video": 2 * frames - 1, "num_latent_conditional_frames": count}


def ti2v_given(folder, pixels, count):
    assert count == 1
    parts = stock(folder, CASES["wan22_ti2v"]).components
    pipeline = WanImageToVideoPipeline(**parts, expand_timesteps=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, {"image": pixels[:, :, 0]}


def sana_video_given(folder, pixels, count):
    return stock(folder, CASES["sana_video"], SanaImageToVideoPipeline), {"image": pixels[:, :, 0]}


def text_queries(block):
    return f"{block}.attn.add_q_proj", f"{block}.attn.norm_added_q"


CASES = {
    # The last block drops its text output, so the text queries of that block can have no effect.
    "sd3": Case(size=(32, 48, 1), euler=True, without_gradient=text_queries("transformer_blocks.1")),
    "digits": Case(size=(8, 8, 1), euler=True, without_gradient=text_queries("transformer_blocks.3")),
    "cosmos25": Case(
        size=(32, 48, 9),
        load_options={"guardrail": "off"},
        stock_parts={"safety_checker": NoGuardrail()},
        given=cosmos25_given,
    ),
    "wan21": Case(size=(32, 48, 5), blocks="blocks"),
    "moving": Case(size=(32, 32, 5), blocks="blocks"),
    "wan22": Case(size=(32, 48, 5), blocks="blocks", sigmas=((0.97, 0.9), (0.8, 0.3))),
    "wan22_ti2v": Case(size=(64, 32, 9), blocks="blocks", given=ti2v_given),
    # The same vector added to every key shifts all scores alike, unless keys are normalised.
    "sana": Case(size=(32, 64, 1), without_gradient=("attn2.to_k.bias",)),
    "sana_video": Case(size=(32, 64, 5), given=sana_video_given),
}
