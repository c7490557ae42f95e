"""SANA 1.0 and 1.5. The text encoder is Gemma-2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.models.assets.loading import read_call_json
from wfm_ds.models.base import DiffusionModel, pipeline_call_default
from wfm_ds.models.lora_layer_names import ATTENTION_LAYERS, map_fused_layers, map_layers
from wfm_ds.models.vae import count_patches
from wfm_ds.types import Conditioning

INSTRUCTION = "complex_human_instruction"
PIPELINE_SIZE_MULTIPLE = 32  # the diffusers pipelines reject other sizes, even if VAE and patches allow them

BLOCK = "transformer_blocks.{}"
LORA_NAMES = (
    *map_fused_layers(f"{BLOCK}.attn1", ("to_q", "to_k", "to_v"), "blocks.{}.attn.qkv"),
    *map_fused_layers(f"{BLOCK}.attn2", ("to_k", "to_v"), "blocks.{}.cross_attn.kv_linear"),
    *map_layers(
        BLOCK,
        "blocks.{}",
        {"attn1.to_out.0": "attn.proj", "attn2.to_q": "cross_attn.q_linear", "attn2.to_out.0": "cross_attn.proj"},
    ),
)


class InstructedModel(DiffusionModel):
    """Base class of families that prepend an instruction to prompts, but not to negative prompts."""

    required_components = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")
    conditioning_keys = frozenset({"prompt_embeds", "prompt_attention_mask"})
    instruction_argument: ClassVar[str]  # argument of the pipeline call: lines before each prompt

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Raise ModelError if the instruction in call.json is invalid."""
        super().__init__(*arguments, **options)
        self.instruction = self.resolve_instruction()

    def resolve_instruction(self) -> list[str] | None:
        name = self.instruction_argument
        default: list[str] | None = pipeline_call_default(self.pipeline, name)
        if self.prompt_template is not None:
            return default if self.prompt_template == "stock" else None
        lines = read_call_json(self.path).get(name, default)
        if lines is not None and not (isinstance(lines, list) and all(isinstance(line, str) for line in lines)):
            raise ModelError(f"{self.path / 'call.json'}: {name} must be null or a list of lines, got {lines!r}")
        return lines

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        length = self.max_sequence_length
        return {"prompt_embeds": (length, self.config.caption_channels), "prompt_attention_mask": (length,)}

    def text_call_kwargs(self) -> dict[str, Any]:
        return {**super().text_call_kwargs(), self.instruction_argument: self.instruction}


class Sana(InstructedModel):
    """SANA. The network receives the timestep num_train_timesteps * sigma * timestep_scale and returns the velocity."""

    family = "sana"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("SanaPipeline",)
    instruction_argument = INSTRUCTION
    default_lora_targets = ATTENTION_LAYERS  # of self-attention and cross-attention
    lora_layer_names = LORA_NAMES
    block_classes = (SanaTransformerBlock,)
    prompt_templates = ("stock", "none")

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return {prompt_embeds: [B, n, channels], prompt_attention_mask: int64 [B, n]} for B prompts.

        n is max_sequence_length. The result contains only the first token and the last n - 1 tokens of instruction and
        prompt.
        """
        return self.encode_with_instruction(self.instruction, prompts)

    @torch.no_grad()
    def encode_negative_text(self, texts: Sequence[str]) -> Conditioning:
        return self.encode_with_instruction(None, texts)

    def encode_with_instruction(self, instruction: list[str] | None, texts: Sequence[str]) -> Conditioning:
        options = {"do_classifier_free_guidance": False, "complex_human_instruction": instruction}
        embeds, mask, _, _ = self.call_encode_prompt(texts, **options)
        return {"prompt_embeds": embeds, "prompt_attention_mask": mask}

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning, expert)
        time = sigma * self.pipeline.scheduler.config.num_train_timesteps * self.config.timestep_scale
        return self.predict_velocity(latents, time, conditioning)

    def predict_velocity(self, latents: Tensor, time: Tensor, conditioning: Conditioning) -> Tensor:
        output: Tensor = self.denoiser(
            hidden_states=latents.to(self.dtype),
            encoder_hidden_states=conditioning["prompt_embeds"].to(self.dtype),
            # The network's argument `attention_mask` would not mask the padding of the text.
            encoder_attention_mask=conditioning["prompt_attention_mask"],
            timestep=time,
            return_dict=False,
        )[0]
        return output[:, : self.config.in_channels].float()  # some networks append a learned variance

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        multiple = math.lcm(PIPELINE_SIZE_MULTIPLE, self.pipeline.vae_scale_factor * self.config.patch_size)
        return (self.config.in_channels, *self.image_latent_size(height, width, num_frames, multiple))

    def num_tokens(self, shape: Sequence[int]) -> int:
        return count_patches(shape, self.config.patch_size)

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        # Resolution binning would generate an image of another size and resize it.
        return {**super().pipeline_call_kwargs(w, height, width, num_frames), "use_resolution_binning": False}
