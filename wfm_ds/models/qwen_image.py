"""Qwen-Image. The text encoder is Qwen2.5-VL, and the VAE is a video VAE that encodes single frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from torch import Tensor
from torch.nn import functional

from wfm_ds.models import vae
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.lora_layer_names import JOINT_ATTENTION_LAYERS, map_layers
from wfm_ds.models.source_images import list_image_latents
from wfm_ds.models.text_padding import pad_and_stack
from wfm_ds.models.vae import count_patches
from wfm_ds.types import Conditioning

PATCH_SIZE = 2  # latents along each side of a token
EMBEDS, MASK = "prompt_embeds", "prompt_embeds_mask"
NEGATIVE_PROMPT_KEY = "negative_prompt"
DEFAULT_NEGATIVE_PROMPT = " "  # as in the model's examples; without a negative prompt the pipeline has no guidance

FEED_FORWARD = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
BLOCK = "transformer_blocks.{}"
LAYER_NAMES = {name: name for name in (*(f"attn.{target}" for target in JOINT_ATTENTION_LAYERS), *FEED_FORWARD)}

SUPPORTED_OPTIONS = {
    "transformer/config.json": {"guidance_embeds": False, "zero_cond_t": False, "use_additional_t_cond": False}
}
UNUSED_TEXT_LAYERS = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")  # layers of the last block


class QwenImage(DiffusionModel):
    """Qwen-Image. The network receives sigma (in the compute dtype) as its timestep, and returns the velocity."""

    family = "qwen_image"
    pipeline_classes = ("QwenImagePipeline",)
    required_components: ClassVar[tuple[str, ...]] = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")
    conditioning_keys = frozenset({EMBEDS, MASK})
    default_lora_targets = JOINT_ATTENTION_LAYERS
    lora_layer_names = map_layers(BLOCK, BLOCK, LAYER_NAMES)  # the original code has the same names
    comfyui_prefix = "transformer"
    default_image_size = 1024
    guidance_arguments = ("true_cfg_scale",)  # guidance_scale is embedded guidance, which these networks do not have
    block_classes = (QwenImageTransformerBlock,)
    supports_cuda_graphs = False  # the network creates tensors from Python numbers in each forward pass
    supported_options: ClassVar[Mapping[str, Mapping[str, Any]]] = SUPPORTED_OPTIONS

    @property
    def unused_parameter_patterns(self) -> tuple[str, ...]:
        last = BLOCK.format(self.config.num_layers - 1)
        return tuple(f"{last}.{layer}.*" for layer in UNUSED_TEXT_LAYERS)

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return {prompt_embeds: [batch, tokens, channels], prompt_embeds_mask: int64 [batch, tokens]}.

        The longest prompt in the batch determines the number of tokens.
        """
        return self.embed_prompts(prompts)

    def embed_prompts(self, prompts: Sequence[str], **options: Any) -> Conditioning:
        """Return the result of `encode_text`. options: further arguments of the pipeline's encode_prompt."""
        embeds, mask = self.call_encode_prompt(prompts, **options)
        if mask is None:  # no padding
            mask = torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
        return {EMBEDS: embeds, MASK: mask}

    @staticmethod
    def stack_conditioning(rows: Sequence[Conditioning]) -> Conditioning:
        return pad_and_stack(rows, (EMBEDS, MASK))

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        length = self.max_sequence_length
        return {EMBEDS: (length, self.config.joint_attention_dim), MASK: (length,)}

    def resolve_negative_prompt(self, negative_text: str | None = None) -> str:
        return DEFAULT_NEGATIVE_PROMPT if negative_text is None else negative_text

    def to_latents(self, pixels: Tensor) -> Tensor:
        return vae.encode_normalized(self.pipeline.vae, pixels[:, :, None])[:, :, 0]

    def to_pixels(self, latents: Tensor) -> Tensor:
        return vae.decode_normalized(self.pipeline.vae, latents[:, :, None])[:, :, 0]

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning, expert)
        h, w = latents.shape[2:]
        images = list_image_latents(latents, conditioning)
        shapes = [(1, image.shape[2] // PATCH_SIZE, image.shape[3] // PATCH_SIZE) for image in images]
        velocity: Tensor = self.denoiser(
            hidden_states=torch.cat([pack_latents(image) for image in images], dim=1).to(self.dtype),
            timestep=sigma,
            encoder_hidden_states=conditioning[EMBEDS].to(self.dtype),
            encoder_hidden_states_mask=conditioning[MASK],
            img_shapes=[shapes] * len(latents),  # the network uses the positions of the first sample
            return_dict=False,
        )[0]
        return unpack_latents(velocity[:, : count_tokens(latents.shape[1:])], h, w).float()

    def combine_guidance(self, cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
        """Apply guidance, then rescale each token to its norm in `cond`, as diffusers does."""
        guided = pack_latents(super().combine_guidance(cond, uncond, scale))
        norms = pack_latents(cond).norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack_latents(guided * norms, *cond.shape[2:])

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        multiple = PATCH_SIZE * self.pipeline.vae_scale_factor
        size = self.image_latent_size(height, width, num_frames, multiple)
        return (self.config.in_channels // PATCH_SIZE**2, *size)

    def num_tokens(self, shape: Sequence[int]) -> int:
        """Return the number of tokens of a sample and its source images."""
        return sum(count_tokens(image) for image in (shape, *self.input_shapes(shape).values()))

    def sigmas(self, num_steps: int, shape: Sequence[int]) -> Tensor:
        # The scheduler divides by zero for one step.
        return torch.tensor([1.0, 0.0], dtype=torch.float64) if num_steps == 1 else super().sigmas(num_steps, shape)

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        mu = self.shift_parameter(count_tokens(shape))  # without the tokens of source images
        return {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps), "mu": mu}

    def text_call_kwargs(self) -> dict[str, Any]:
        # Without a negative prompt, the pipeline would disable guidance.
        return {**super().text_call_kwargs(), NEGATIVE_PROMPT_KEY: self.resolve_negative_prompt()}


def count_tokens(shape: Sequence[int]) -> int:
    """Return the number of tokens of one image. shape: shape of its latents, [C, h, w]."""
    return count_patches(shape, PATCH_SIZE)


def pack_latents(latents: Tensor) -> Tensor:
    """Pack latents [B, C, h, w] into tokens [B, h/2 * w/2, 4 C]. Each token is a patch of 2 x 2 latents."""
    return functional.pixel_unshuffle(latents, PATCH_SIZE).flatten(2).transpose(1, 2)


def unpack_latents(tokens: Tensor, h: int, w: int) -> Tensor:
    patches = tokens.transpose(1, 2).reshape(len(tokens), -1, h // PATCH_SIZE, w // PATCH_SIZE)
    return functional.pixel_shuffle(patches, PATCH_SIZE)
