"""The image models Z-Image and Z-Image-Turbo. Their text encoder is Qwen3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF, ZImageTransformerBlock
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas
from torch import Tensor, nn
from torch.nn import functional

from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.flux2 import image_positions
from wfm_ds.models.lora_layer_names import ATTENTION_LAYERS, map_fused_layers, map_layers
from wfm_ds.models.text_padding import pad_and_stack
from wfm_ds.models.vae import count_patches
from wfm_ds.types import Conditioning

EMBEDS, MASK = "prompt_embeds", "prompt_embeds_mask"
PATCH_SIZE = 2  # latents along each side of a token
PATCH_LAYERS = f"{PATCH_SIZE}-1"  # name of the layers for this patch size and one frame
SUPPORTED_OPTIONS = {  # siglip_feat_dim: the network has no image inputs
    "transformer/config.json": {"siglip_feat_dim": None, "all_patch_size": [PATCH_SIZE], "all_f_patch_size": [1]}
}
# Default limits of the timestep shift in the pipeline, for schedulers without them.
SHIFT_LIMITS = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}

FEED_FORWARD = {name: name for name in ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")}
LORA_NAMES = tuple(
    name
    for block in ("layers.{}", "noise_refiner.{}", "context_refiner.{}")
    for name in (
        *map_fused_layers(f"{block}.attention", ("to_q", "to_k", "to_v"), f"{block}.attention.qkv"),
        *map_layers(block, block, {"attention.to_out.0": "attention.out", **FEED_FORWARD}),
    )
)


class BatchedZImage(ZImageTransformer2DModel):  # type: ignore[misc]
    """The diffusers network with a `forward` for batched tensors instead of lists of samples.

    It does not read tensor values, so it never waits for a GPU.

    Learned padding tokens extend image tokens and text tokens to a multiple of 32 each. Positions of image tokens
    depend on the text length.
    """

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Return the network's output [B,C,h,w] for latents [B,C,h,w].

        timestep: [B], from 0 (noise) to 1 (clean). encoder_hidden_states: text embeddings [B, tokens, channels].
        encoder_attention_mask: [B, tokens] int64, 0 on the padding at the end of each text.
        """
        h, w = hidden_states.shape[2:]
        time = self.t_embedder(timestep * self.t_scale).type_as(hidden_states)
        text_length = encoder_attention_mask.sum(1)  # [B]
        padded_length = -(-text_length // SEQ_MULTI_OF) * SEQ_MULTI_OF
        image, image_rope = self._image_tokens(hidden_states, padded_length)
        for layer in self.noise_refiner:
            image = self._run_layer(layer, image, None, image_rope, time)
        text, text_rope = self._text_tokens(encoder_hidden_states, text_length)
        # A single text has only learned padding and needs no mask. With a mask, fast kernels could not be used.
        attended = None
        if len(text) > 1:
            attended = torch.arange(text.shape[1], device=text.device) < padded_length[:, None]
        for layer in self.context_refiner:
            text = self._run_layer(layer, text, attended, text_rope)
        tokens, rope = torch.cat([image, text], 1), torch.cat([image_rope, text_rope], 1)
        if attended is not None:
            attended = torch.cat([attended.new_ones(image.shape[:2]), attended], 1)
        for layer in self.layers:
            tokens = self._run_layer(layer, tokens, attended, rope, time)
        patches = self.all_final_layer[PATCH_LAYERS](tokens[:, : h // PATCH_SIZE * (w // PATCH_SIZE)], c=time)
        return (unpatchify(patches, h, w),)

    def _image_tokens(self, latents: Tensor, padded_length: Tensor) -> tuple[Tensor, Tensor]:
        """Return image tokens, including padding tokens, and their rotary embeddings, each [batch, tokens, channels].

        padded_length: [batch], number of text tokens including padding tokens.
        """
        count, _, h, w = latents.shape
        tokens = self.all_x_embedder[PATCH_LAYERS](patchify(latents))
        missing = -tokens.shape[1] % SEQ_MULTI_OF
        grid = image_positions([(h // PATCH_SIZE, w // PATCH_SIZE)], 1, latents.device)
        positions = grid.expand(count, -1, -1).clone()  # [B,N,3]
        positions[..., 0] = padded_length[:, None] + 1
        positions = functional.pad(positions, (0, 0, 0, missing))  # padding tokens have position 0
        padding = self.x_pad_token.expand(count, missing, -1)
        return torch.cat([tokens, padding], 1), self._rotary_embeddings(positions)

    def _text_tokens(self, embeds: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return text tokens, including padding tokens, and their rotary embeddings, each [batch, tokens, channels].

        embeds: [batch, tokens, channels]. length: [batch], number of tokens without padding.
        """
        embeds = functional.pad(embeds, (0, 0, 0, -embeds.shape[1] % SEQ_MULTI_OF))
        index = torch.arange(embeds.shape[1], device=embeds.device)
        is_text = (index < length[:, None])[..., None]
        tokens = torch.where(is_text, self.cap_embedder(embeds), self.cap_pad_token)
        positions = functional.pad(index[:, None] + 1, (0, 2))  # [n,3]
        return tokens, self._rotary_embeddings(positions.expand(len(embeds), -1, -1))

    def _rotary_embeddings(self, positions: Tensor) -> Tensor:
        rotations: Tensor = self.rope_embedder(positions.flatten(0, 1))
        return rotations.view(*positions.shape[:2], -1)

    def _run_layer(self, layer: nn.Module, *arguments: Any) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            checkpointed: Tensor = self._gradient_checkpointing_func(layer, *arguments)
            return checkpointed
        output: Tensor = layer(*arguments)
        return output


def patchify(latents: Tensor) -> Tensor:
    """Convert latents [B,C,h,w] to 2 x 2 patches [B, h/2 * w/2, 4 C]. Values are ordered by row, column, channel."""
    count, channels, h, w = latents.shape
    patches = latents.reshape(count, channels, h // PATCH_SIZE, PATCH_SIZE, w // PATCH_SIZE, PATCH_SIZE)
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, h: int, w: int) -> Tensor:
    rows = patches.reshape(len(patches), h // PATCH_SIZE, w // PATCH_SIZE, PATCH_SIZE, PATCH_SIZE, -1)
    return rows.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), -1, h, w)


class ZImage(DiffusionModel):
    """Z-Image. The network receives 1 - sigma as its timestep and returns the negative velocity."""

    family = "z_image"
    pipeline_classes = ("ZImagePipeline",)
    required_components = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")
    conditioning_keys = frozenset({EMBEDS, MASK})
    default_lora_targets = ATTENTION_LAYERS
    lora_layer_names = LORA_NAMES
    supported_options = SUPPORTED_OPTIONS
    kohya_uses_diffusers_names = True  # kohya's musubi-tuner, src/musubi_tuner/zimage/zimage_model.py
    default_image_size = 1024
    block_classes = (ZImageTransformerBlock,)
    stack_conditioning = staticmethod(pad_and_stack)

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
        multiple = PATCH_SIZE * self.pipeline.vae_scale_factor
        return (self.config.in_channels, *self.image_latent_size(height, width, num_frames, multiple))

    def num_tokens(self, shape: Sequence[int]) -> int:
        return count_patches(shape, PATCH_SIZE)

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        mu = self.shift_parameter(self.num_tokens(shape), **SHIFT_LIMITS)
        return {"sigmas": get_default_z_image_sigmas(num_steps), "mu": mu}

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """Return the pipeline call arguments for guidance scale w.

        The pipeline computes cond + guidance_scale * (cond - uncond), so guidance_scale is w - 1.
        """
        return super().pipeline_call_kwargs(w - 1, height, width, num_frames)
