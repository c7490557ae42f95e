"""FLUX.1-Kontext: edits a source image, or generates an image from text. The text encoders are CLIP-L and T5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.pipelines.flux import pipeline_flux_kontext
from torch import Tensor, nn

from wfm_ds.models.flux2 import DOUBLE_ATTENTION_NAMES, DOUBLE_BLOCK, SINGLE_BLOCK, FluxModel, image_positions
from wfm_ds.models.lora_layer_names import JOINT_ATTENTION_LAYERS, map_fused_layers, map_layers
from wfm_ds.models.qwen_image import NEGATIVE_PROMPT_KEY, PATCH_SIZE, count_tokens, pack_latents, unpack_latents
from wfm_ds.models.source_images import create_source_specs, list_image_latents
from wfm_ds.types import SOURCE, Conditioning

EMBEDS, POOLED = "prompt_embeds", "pooled_prompt_embeds"
LORA_NAMES = (
    *DOUBLE_ATTENTION_NAMES,
    *map_layers(
        DOUBLE_BLOCK,
        "double_blocks.{}",
        {
            "ff.net.0.proj": "img_mlp.0",
            "ff.net.2": "img_mlp.2",
            "ff_context.net.0.proj": "txt_mlp.0",
            "ff_context.net.2": "txt_mlp.2",
        },
    ),
    # The hidden size of the feed-forward layer is four times the width.
    *map_fused_layers(
        SINGLE_BLOCK,
        ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        "single_blocks.{}.linear1",
        sizes=(1, 1, 1, 4),
    ),
    *map_layers(SINGLE_BLOCK, "single_blocks.{}", {"proj_out": "linear2"}),
)


class BatchedFlux(FluxTransformer2DModel):  # type: ignore[misc]
    """FluxTransformer2DModel whose positions have a batch axis, like its other arguments."""

    def forward(self, *arguments: Any, txt_ids: Tensor, img_ids: Tensor, **options: Any) -> Any:
        """txt_ids, img_ids: positions [B, tokens, 3], the same for all samples."""
        return super().forward(*arguments, txt_ids=txt_ids[0], img_ids=img_ids[0], **options)


class FluxKontext(FluxModel):
    """FLUX.1-Kontext. The network receives sigma as its timestep, and returns the velocity.

    The clean tokens of the source follow the noisy tokens of the sample. The text encoders do not see the source.
    """

    family = "flux_kontext"
    default_guidance_embeds = False
    pipeline_classes = ("FluxKontextPipeline",)
    required_components = (
        *("transformer", "vae", "scheduler"),
        *("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
    )
    conditioning_keys = frozenset({EMBEDS, POOLED})
    optional_conditioning_keys = frozenset({SOURCE})
    input_specs = create_source_specs(SOURCE)
    default_lora_targets = JOINT_ATTENTION_LAYERS
    lora_layer_names = LORA_NAMES
    comfyui_prefix = "transformer"
    default_image_size = 1024
    guidance_arguments = ("true_cfg_scale",)  # guidance_scale is the embedded guidance
    block_classes = (FluxTransformerBlock, FluxSingleTransformerBlock)

    def extract_denoiser(self, pipeline: Any) -> nn.Module:
        network: nn.Module = pipeline.transformer
        network.__class__ = BatchedFlux
        return network

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return {prompt_embeds: [batch, max_sequence_length, channels], pooled_prompt_embeds: [batch, channels]}.

        prompt_embeds is the output of T5, which the network uses with its padding. pooled_prompt_embeds is from CLIP.
        """
        embeds, pooled, _ = self.call_encode_prompt(prompts)
        return {EMBEDS: embeds, POOLED: pooled}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            EMBEDS: (self.max_sequence_length, self.config.joint_attention_dim),
            POOLED: (self.config.pooled_projection_dim,),
        }

    def stock_source_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the preferred size of the model with the most similar aspect ratio."""
        sizes = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
        _, best_width, best_height = min((abs(width / height - w / h), w, h) for w, h in sizes)
        multiple = self.size_multiple()
        return best_height // multiple * multiple, best_width // multiple * multiple

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning, expert)
        count, _, h, w = latents.shape
        embeds = conditioning[EMBEDS]
        images = list_image_latents(latents, conditioning)
        grids = [(image.shape[2] // PATCH_SIZE, image.shape[3] // PATCH_SIZE) for image in images]
        text_ids = torch.zeros(count, embeds.shape[1], 3, dtype=torch.int64, device=latents.device)
        velocity: Tensor = self.denoiser(
            hidden_states=torch.cat([pack_latents(image) for image in images], dim=1).to(self.dtype),
            timestep=sigma,
            guidance=None if self.embedded_guidance is None else torch.full_like(sigma, self.embedded_guidance),
            pooled_projections=conditioning[POOLED].to(self.dtype),
            encoder_hidden_states=embeds.to(self.dtype),
            txt_ids=text_ids,
            img_ids=image_positions(grids, 1, latents.device).expand(count, -1, -1),
            return_dict=False,
        )[0]
        return unpack_latents(velocity[:, : count_tokens(latents.shape[1:])], h, w).float()

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return (C, H / f, W / f) for H x W pixels and VAE scale factor f. Tokens are patches of 2 x 2 latents."""
        multiple = PATCH_SIZE * self.pipeline.vae_scale_factor
        size = self.image_latent_size(height, width, num_frames, multiple)
        return (self.config.in_channels // PATCH_SIZE**2, *size)

    def num_tokens(self, shape: Sequence[int]) -> int:
        """Return the number of tokens of a sample and its source."""
        return sum(count_tokens(image) for image in (shape, *self.input_shapes(shape).values()))

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        mu = self.shift_parameter(count_tokens(shape))  # without the tokens of the source
        return {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps), "mu": mu}

    def text_call_kwargs(self) -> dict[str, Any]:
        # Without a negative prompt, the pipeline would disable guidance.
        return {**super().text_call_kwargs(), NEGATIVE_PROMPT_KEY: self.resolve_negative_prompt()}

    def export_call_kwargs(self) -> dict[str, Any]:
        """Return the text arguments, the embedded guidance scale and, for runs with sources, _auto_resize.

        _auto_resize is whether the pipeline resizes the source to a preferred size.
        """
        resize = {"_auto_resize": self.source_size == "stock"} if SOURCE in self.input_names else {}
        return super().export_call_kwargs() | resize

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """Return the pipeline call arguments for guidance scale w, including those of exports.

        max_area keeps the pipeline from scaling height and width to an area of 1024 x 1024 pixels.
        """
        call = super().pipeline_call_kwargs(w, height, width, num_frames) | self.export_call_kwargs()
        return call | {"max_area": height * width}
