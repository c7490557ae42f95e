"""Z-Image and Z-Image-Turbo: one stream of picture and text, text of any length by Qwen3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from diffusers.pipelines.z_image.pipeline_z_image import calculate_shift, get_default_z_image_sigmas
from torch import Tensor, nn
from torch.nn import functional

from wfm_ds.errors import ModelError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.loading import read_json
from wfm_ds.models.lora_names import fused, renamed
from wfm_ds.models.z_image_network import PATCH, BatchedZImage

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning

EMBEDS, MASK = "prompt_embeds", "prompt_embeds_mask"

FEED_FORWARD = {name: name for name in ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")}
LORA_NAMES = tuple(
    name
    for block in ("layers.{}", "noise_refiner.{}", "context_refiner.{}")
    for name in (
        *fused(f"{block}.attention", ("to_q", "to_k", "to_v"), f"{block}.attention.qkv"),
        *renamed(block, block, {"attention.to_out.0": "attention.out", **FEED_FORWARD}),
    )
)


class ZImage(DiffusionModel):
    """The network's time is 1 - sigma, its output the velocity's opposite."""

    family = "z_image"
    pipeline_classes = ("ZImagePipeline",)
    required_parts = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")
    conditioning_keys = frozenset({EMBEDS, MASK})
    default_lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    lora_names = LORA_NAMES
    default_side = 1024
    block_classes = (ZImageTransformerBlock,)

    @classmethod
    def check_folder(cls, folder: Path) -> None:
        """ModelError for a network with an input that text to image does not have, or with several sizes of patches."""
        config = read_json(folder / "transformer" / "config.json")
        if config.get("siglip_feat_dim") is not None:
            raise ModelError(f"{folder}: a Z-Image transformer that reads pictures is not supported; use Z-Image")
        patches = (config.get("all_patch_size", [PATCH]), config.get("all_f_patch_size", [1]))
        if patches != ([PATCH], [1]):
            raise ModelError(f"{folder}: a Z-Image transformer for patches of {patches} is not supported; use Z-Image")

    @classmethod
    def stock_guidance(cls, index: Mapping[str, Any], call: Mapping[str, Any]) -> float:
        return float(call["guidance_scale"]) + 1

    def take_denoiser(self, pipeline: Any) -> nn.Module:
        denoiser: nn.Module = pipeline.transformer
        denoiser.__class__ = BatchedZImage  # the same layers and weights with another forward
        return denoiser

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """prompt_embeds [B, n, D], prompt_embeds_mask [B, n] int64: n is the length of the longest of the prompts, at
        most max_sequence_length. ValueError for no prompts."""
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts must be a list of at least one text, got {prompts!r}")
        embeds, _ = self.pipeline.encode_prompt(
            list(prompts),  # a copy: the pipeline puts its template into the list that it is given
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        masks = [torch.ones(1, len(row), dtype=torch.int64, device=row.device) for row in embeds]
        return self.stack([{EMBEDS: row[None], MASK: mask} for row, mask in zip(embeds, masks, strict=True)])

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the longest text that there is."""
        return {EMBEDS: (self.max_sequence_length, self.config.cap_feat_dim), MASK: (self.max_sequence_length,)}

    @staticmethod
    def stack(rows: Sequence[Conditioning]) -> Conditioning:
        """Pad to the longest with zeros, and the masks with them."""
        longest = max(row[EMBEDS].shape[1] for row in rows)
        missing = [longest - row[EMBEDS].shape[1] for row in rows]
        embeds = [functional.pad(row[EMBEDS], (0, 0, 0, n)) for row, n in zip(rows, missing, strict=True)]
        masks = [functional.pad(row[MASK], (0, n)) for row, n in zip(rows, missing, strict=True)]
        return {EMBEDS: torch.cat(embeds), MASK: torch.cat(masks)}

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning)
        if latents.ndim != 4 or expert not in (None, 0):
            raise ValueError(
                f"z_image takes latents [B,C,h,w] and has one expert, got {list(latents.shape)}, expert {expert}"
            )
        output: Tensor = self.denoiser(
            hidden_states=latents.to(self.dtype),
            timestep=1 - sigma,
            encoder_hidden_states=conditioning[EMBEDS].to(self.dtype),
            encoder_attention_mask=conditioning[MASK],
        )[0]
        return -output.float()

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """(C, H/f, W/f)."""
        if num_frames != 1:
            raise ValueError(f"z_image makes images: num_frames must be 1, got {num_frames}")
        factor = self.pipeline.vae_scale_factor
        multiple = PATCH * factor
        for name, size in (("height", height), ("width", width)):
            if size < 1 or size % multiple:
                raise ValueError(f"{name} must be a multiple of {multiple}, got {size}")
        return (self.config.in_channels, height // factor, width // factor)

    def num_tokens(self, shape: Sequence[int]) -> int:
        return int(shape[1] // PATCH * (shape[2] // PATCH))

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        """The pipeline's own grid, and a shift that grows with the size, for schedulers that have none of their own."""
        config = self.pipeline.scheduler.config
        defaults = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
        limits = [config.get(name, default) for name, default in defaults.items()]
        mu = calculate_shift(self.num_tokens(shape), *limits)
        return {"sigmas": get_default_z_image_sigmas(num_steps), "mu": mu}

    def pipeline_call(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """The stock call adds guidance_scale times the difference to the conditional half."""
        return super().pipeline_call(w - 1, height, width, num_frames)
