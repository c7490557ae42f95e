"""The image models Z-Image and Z-Image-Turbo. Their text encoder is Qwen3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from diffusers.pipelines.z_image.pipeline_z_image import calculate_shift, get_default_z_image_sigmas
from torch import Tensor, nn

from wfm_ds.errors import ModelError
from wfm_ds.models.assets.loading import read_json
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.lora_layer_names import map_fused_layers, map_layers
from wfm_ds.models.text_padding import pad_and_stack
from wfm_ds.models.vae import require_image, require_multiples
from wfm_ds.models.z_image_network import PATCH_SIZE, BatchedZImage

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning

EMBEDS, MASK = "prompt_embeds", "prompt_embeds_mask"

FEED_FORWARD = {name: name for name in ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")}
LORA_NAMES = tuple(
    name
    for block in ("layers.{}", "noise_refiner.{}", "context_refiner.{}")
    for name in (
        *map_fused_layers(f"{block}.attention", ("to_q", "to_k", "to_v"), f"{block}.attention.qkv"),
        *map_layers(block, block, {"attention.to_out.0": "attention.out", **FEED_FORWARD}),
    )
)


class ZImage(DiffusionModel):
    """Z-Image. The network receives 1 - sigma as its timestep and returns the negative velocity."""

    family = "z_image"
    pipeline_classes = ("ZImagePipeline",)
    required_components = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")
    conditioning_keys = frozenset({EMBEDS, MASK})
    default_lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    lora_layer_names = LORA_NAMES
    kohya_uses_diffusers_names = True  # kohya's musubi-tuner, src/musubi_tuner/zimage/zimage_model.py
    default_image_size = 1024
    block_classes = (ZImageTransformerBlock,)
    stack_conditioning = staticmethod(pad_and_stack)

    @classmethod
    def check_folder(cls, folder: Path) -> None:
        config = read_json(folder / "transformer" / "config.json")
        if config.get("siglip_feat_dim") is not None:
            raise ModelError(f"{folder}: a Z-Image transformer with image inputs is not supported; use Z-Image")
        patches = (config.get("all_patch_size", [PATCH_SIZE]), config.get("all_f_patch_size", [1]))
        if patches != ([PATCH_SIZE], [1]):
            raise ModelError(f"{folder}: Z-Image transformers with patches {patches} are not supported; use Z-Image")

    @classmethod
    def default_guidance_scale(cls, index: Mapping[str, Any], call: Mapping[str, Any]) -> float:
        return float(call["guidance_scale"]) + 1

    def extract_denoiser(self, pipeline: Any) -> nn.Module:
        denoiser: nn.Module = pipeline.transformer
        denoiser.__class__ = BatchedZImage  # same layers and weights, different forward
        return denoiser

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return {prompt_embeds: [batch, tokens, channels], prompt_embeds_mask: int64 [batch, tokens]}.

        The longest prompt in the batch determines the number of tokens.
        """
        embeds, _ = self.call_encode_prompt(prompts, do_classifier_free_guidance=False)
        masks = [torch.ones(1, len(row), dtype=torch.int64, device=row.device) for row in embeds]
        return self.stack_conditioning(
            [{EMBEDS: row[None], MASK: mask} for row, mask in zip(embeds, masks, strict=True)]
        )

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        return {EMBEDS: (self.max_sequence_length, self.config.cap_feat_dim), MASK: (self.max_sequence_length,)}

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning, expert)
        output: Tensor = self.denoiser(
            hidden_states=latents.to(self.dtype),
            timestep=1 - sigma,
            encoder_hidden_states=conditioning[EMBEDS].to(self.dtype),
            encoder_attention_mask=conditioning[MASK],
        )[0]
        return -output.float()

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        require_image(self.family, num_frames)
        factor = self.pipeline.vae_scale_factor
        multiple = PATCH_SIZE * factor
        require_multiples(height, width, multiple)
        return (self.config.in_channels, height // factor, width // factor)

    def num_tokens(self, shape: Sequence[int]) -> int:
        return int(shape[1] // PATCH_SIZE * (shape[2] // PATCH_SIZE))

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        config = self.pipeline.scheduler.config
        defaults = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
        limits = [config.get(name, default) for name, default in defaults.items()]
        mu = calculate_shift(self.num_tokens(shape), *limits)
        return {"sigmas": get_default_z_image_sigmas(num_steps), "mu": mu}

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """Return the pipeline call arguments for guidance scale w.

        The pipeline computes cond + guidance_scale * (cond - uncond), so guidance_scale is w - 1.
        """
        return super().pipeline_call_kwargs(w - 1, height, width, num_frames)
