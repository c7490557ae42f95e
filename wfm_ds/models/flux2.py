"""FLUX.2-klein (base and distilled) and FLUX.2-dev, with up to three reference images.

Latents are patches that are normalized by the VAE's batch norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from wfm_ds.errors import ModelError
from wfm_ds.models import vae
from wfm_ds.models.assets.loading import read_call_json, read_json, translate_loading_errors
from wfm_ds.models.base import DiffusionModel, pipeline_call_default
from wfm_ds.models.lora_layer_names import JOINT_ATTENTION_LAYERS, map_fused_layers, map_layers
from wfm_ds.models.source_images import create_source_specs, list_image_latents
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.types import SOURCES, Conditioning

PATCH_SIZE = 2  # VAE latents along each side of a patch

MAX_SOURCE_PIXELS = 1024 * 1024  # the diffusers pipelines shrink larger reference images
SOURCE_SPACING = 10  # reference images have the image indices 10, 20 and 30; the sample has 0

DOUBLE_BLOCK, SINGLE_BLOCK = "transformer_blocks.{}", "single_transformer_blocks.{}"
# The attention layers of double blocks are the same in FLUX.1.
DOUBLE_ATTENTION_NAMES = (
    *map_fused_layers(f"{DOUBLE_BLOCK}.attn", ("to_q", "to_k", "to_v"), "double_blocks.{}.img_attn.qkv"),
    *map_fused_layers(
        f"{DOUBLE_BLOCK}.attn", ("add_q_proj", "add_k_proj", "add_v_proj"), "double_blocks.{}.txt_attn.qkv"
    ),
    *map_layers(
        DOUBLE_BLOCK, "double_blocks.{}", {"attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj"}
    ),
)
LORA_NAMES = (
    *DOUBLE_ATTENTION_NAMES,
    *map_layers(
        DOUBLE_BLOCK,
        "double_blocks.{}",
        {
            "ff.linear_in": "img_mlp.0",
            "ff.linear_out": "img_mlp.2",
            "ff_context.linear_in": "txt_mlp.0",
            "ff_context.linear_out": "txt_mlp.2",
        },
    ),
    *map_layers(SINGLE_BLOCK, "single_blocks.{}", {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}),
)

GUIDANCE_SCALE_KEY = "guidance_scale"  # argument of the pipeline call: embedded guidance scale for dev, w for klein


class FluxModel(DiffusionModel):
    """Base class of families with networks that may have embedded guidance (`guidance_embeds` in their configs)."""

    default_guidance_embeds: ClassVar[bool]  # value of guidance_embeds if the config of the transformer lacks it

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Raise ModelError if the guidance scale in call.json is invalid."""
        super().__init__(*arguments, **options)
        if self.config.guidance_embeds and self.embedded_guidance is None:
            self.embedded_guidance = self.read_embedded_guidance()

    @classmethod
    def has_embedded_guidance(cls, folder: Path) -> bool:
        config = read_json(folder / "transformer" / "config.json")
        return bool(config.get("guidance_embeds", cls.default_guidance_embeds))

    def read_embedded_guidance(self) -> float:
        """Return `guidance_scale` in call.json or, if it is missing, the default of the diffusers pipeline.

        Raises ModelError if the scale is invalid.
        """
        default = pipeline_call_default(self.pipeline, GUIDANCE_SCALE_KEY)
        scale = read_call_json(self.path).get(GUIDANCE_SCALE_KEY, default)
        if type(scale) not in (int, float) or not 0 < scale < math.inf:
            raise ModelError(f"{self.path / 'call.json'}: {GUIDANCE_SCALE_KEY} must be a number above 0, got {scale!r}")
        return float(scale)


class Flux2(FluxModel):
    """FLUX.2. The network receives sigma as its timestep, and returns the velocity.

    The text encoder is Qwen3 (klein) or Mistral3 (dev). It does not see the reference images. Their clean tokens follow
    the noisy tokens of the sample.
    """

    family = "flux2"
    default_guidance_embeds = True
    pipeline_classes = ("Flux2KleinPipeline", "Flux2Pipeline")
    required_components = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")
    conditioning_keys = frozenset({"prompt_embeds"})
    optional_conditioning_keys = frozenset(SOURCES)
    input_specs = create_source_specs(*SOURCES)
    default_lora_targets = (
        *JOINT_ATTENTION_LAYERS,
        # `to_out` is a layer in single blocks, but a list with the layer `to_out.0` in double blocks.
        *("to_qkv_mlp_proj", f"{SINGLE_BLOCK}.attn.to_out"),
    )
    lora_layer_names = LORA_NAMES
    default_image_size = 1024
    block_classes = (Flux2TransformerBlock, Flux2SingleTransformerBlock)

    @classmethod
    def component_overrides(cls, folder: Path) -> dict[str, Any]:
        """Return FLUX.2-dev's tokenizer as replacement for its processor, because the processor needs torchvision."""
        _, name = read_json(folder / "model_index.json")["tokenizer"]
        if not str(name).endswith("Processor"):
            return {}
        with translate_loading_errors(folder / "tokenizer"):
            return {"tokenizer": AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)}

    @classmethod
    def default_guidance_scale(cls, index: Mapping[str, Any], call: Mapping[str, Any]) -> float:
        """Return the default guidance scale, which is 1 for models that are distilled or have embedded guidance."""
        unguided = index.get("is_distilled") or index["_class_name"] == "Flux2Pipeline"
        return 1.0 if unguided else super().default_guidance_scale(index, call)

    def check_sampling(self, sampling: SamplingRecipe) -> None:
        super().check_sampling(sampling)
        if not sampling.uses_guidance():
            return
        if self.embedded_guidance is not None:
            raise ModelError(
                f"{self.path}: this network only supports embedded guidance; set sampling.guidance_scale: 1 and "
                "model.embedded_guidance"
            )
        if self.pipeline.config.is_distilled:
            raise ModelError(
                f"{self.path}: this pipeline is distilled and ignores guidance; set sampling.guidance_scale: 1, or use "
                "the base model"
            )

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return {prompt_embeds: [batch, max_sequence_length, channels]}. The network also attends to padding.

        The channels are the concatenated outputs of three text encoder layers.
        """
        embeds, _ = self.call_encode_prompt(prompts)
        return {"prompt_embeds": embeds}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (self.max_sequence_length, self.config.joint_attention_dim)}

    def conditioning_from_embedding(self, embedding: Tensor) -> Conditioning | None:
        if embedding.shape != self.text_shapes()["prompt_embeds"]:
            return None
        return {"prompt_embeds": embedding[None].to(self.device, self.text_dtype)}

    def to_latents(self, pixels: Tensor) -> Tensor:
        mean, std = self._patch_statistics()
        z = vae.encode_mode(self.pipeline.vae, pixels)
        patches = torch.pixel_unshuffle(z, PATCH_SIZE)  # [B, 4 C, h, w], channels in diffusers' order (C, row, column)
        return (patches - mean) / std

    def to_pixels(self, latents: Tensor) -> Tensor:
        mean, std = self._patch_statistics()
        return vae.decode_raw(self.pipeline.vae, torch.pixel_shuffle(latents * std + mean, PATCH_SIZE))

    def _patch_statistics(self) -> tuple[Tensor, Tensor]:
        """Return the mean and std in the VAE's batch norm, each float32 [1, 4 * VAE channels, 1, 1]."""
        network = self.pipeline.vae
        mean, variance = (v.float().view(1, -1, 1, 1) for v in (network.bn.running_mean, network.bn.running_var))
        return mean, torch.sqrt(variance + network.config.batch_norm_eps)

    def stock_source_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size as multiples of the patch size in pixels, shrunk to at most MAX_SOURCE_PIXELS pixels."""
        scale = min(1.0, math.sqrt(MAX_SOURCE_PIXELS / (width * height)))
        multiple = self.size_multiple()
        return int(height * scale) // multiple * multiple, int(width * scale) // multiple * multiple

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning, expert)
        count, _, h, w = latents.shape
        embeds = conditioning["prompt_embeds"]
        images = list_image_latents(latents, conditioning)
        # A position consists of image index, row, column and text token index.
        text_ids = functional.pad(torch.arange(embeds.shape[1], device=latents.device)[:, None], (3, 0))
        image_ids = image_positions([image.shape[2:] for image in images], SOURCE_SPACING, latents.device)
        tokens = [image.flatten(2).transpose(1, 2) for image in images]  # [B, h w, C] each
        velocity: Tensor = self.denoiser(
            hidden_states=(tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=1)).to(self.dtype),
            timestep=sigma,
            guidance=None if self.embedded_guidance is None else torch.full_like(sigma, self.embedded_guidance),
            encoder_hidden_states=embeds.to(self.dtype),
            txt_ids=text_ids.expand(count, -1, -1),  # the network uses the first row
            img_ids=functional.pad(image_ids, (0, 1)).expand(count, -1, -1),
            return_dict=False,
        )[0]
        return velocity[:, : h * w].transpose(1, 2).reshape(count, -1, h, w).float()

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return (4 C, H / (2 f), W / (2 f)) for H x W pixels, VAE scale factor f and C VAE channels."""
        h, w = self.image_latent_size(height, width, num_frames, PATCH_SIZE * self.pipeline.vae_scale_factor)
        return (self.config.in_channels, h // PATCH_SIZE, w // PATCH_SIZE)

    def num_tokens(self, shape: Sequence[int]) -> int:
        """Return the number of tokens of a sample and its reference images."""
        return sum(h * w for _, h, w in (shape, *self.input_shapes(shape).values()))

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        mu = compute_empirical_mu(int(shape[1] * shape[2]), num_steps)  # without the tokens of reference images
        return {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps), "mu": mu}

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """Return the pipeline call arguments for guidance scale w.

        If the network has embedded guidance, the argument `guidance_scale` is the embedded guidance scale, and any w
        other than 1 raises ModelError.
        """
        call = super().pipeline_call_kwargs(w, height, width, num_frames)
        if self.embedded_guidance is not None and w != 1:
            raise ModelError(f"{self.path}: this network has embedded guidance; w must be 1, got {w:g}")
        return call | self.export_call_kwargs()


def image_positions(sizes: Sequence[Sequence[int]], spacing: int, device: torch.device) -> Tensor:
    """Return the positions of the tokens of several images, int64 [tokens, 3]: image index, row and column.

    sizes: (rows, columns) of tokens of each image. The images have the indices 0, `spacing`, 2 * `spacing`, ...
    """
    grids = []
    for number, (h, w) in enumerate(sizes):
        grid = torch.empty(h, w, 3, dtype=torch.int64, device=device)
        grid[..., 0] = spacing * number
        grid[..., 1] = torch.arange(h, device=device)[:, None]
        grid[..., 2] = torch.arange(w, device=device)
        grids.append(grid.flatten(0, 1))
    return torch.cat(grids)
