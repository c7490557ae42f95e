"""SANA 1.0 and 1.5: a deep-compression VAE, Gemma-2 text with its mask, linear attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.models.base import DiffusionModel, stock_argument
from wfm_ds.models.loading import stored_call
from wfm_ds.models.lora_names import fused, renamed

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning

INSTRUCTION = "complex_human_instruction"  # the stock call's argument: lines that go before each prompt
STOCK_MULTIPLE = 32  # the stock calls refuse other sizes, also where VAE and patches would allow them

BLOCK = "transformer_blocks.{}"
LORA_NAMES = (
    *fused(f"{BLOCK}.attn1", ("to_q", "to_k", "to_v"), "blocks.{}.attn.qkv"),
    *fused(f"{BLOCK}.attn2", ("to_k", "to_v"), "blocks.{}.cross_attn.kv_linear"),
    *renamed(
        BLOCK,
        "blocks.{}",
        {"attn1.to_out.0": "attn.proj", "attn2.to_q": "cross_attn.q_linear", "attn2.to_out.0": "cross_attn.proj"},
    ),
)


class Sana(DiffusionModel):
    """The network's time is num_train_timesteps * sigma * timestep_scale as a float, its output the velocity.

    `instruction` is what goes before prompts, never before negative texts.
    """

    family = "sana"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("SanaPipeline",)
    required_parts = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")
    conditioning_keys = frozenset({"prompt_embeds", "prompt_attention_mask"})
    default_lora_targets = ("to_q", "to_k", "to_v", "to_out.0")  # of self- and cross-attention
    lora_names = LORA_NAMES
    block_classes = (SanaTransformerBlock,)
    prompt_templates = ("stock", "none")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Check the folder as the base class does. ModelError too if call.json holds an instruction that is none."""
        super().__init__(*arguments, **options)
        self.instruction = self.chosen_instruction()

    def chosen_instruction(self) -> list[str] | None:
        stock: list[str] = stock_argument(self.pipeline, INSTRUCTION)
        if self.prompt_template is not None:
            return stock if self.prompt_template == "stock" else None
        lines = stored_call(self.path).get(INSTRUCTION, stock)
        if lines is not None and not (isinstance(lines, list) and all(isinstance(line, str) for line in lines)):
            raise ModelError(f"{self.path / 'call.json'}: {INSTRUCTION} must be null or a list of lines, got {lines!r}")
        return lines

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """prompt_embeds [B, max_sequence_length, D], prompt_attention_mask [B, max_sequence_length] int64.

        The first and the last positions of instruction and prompt, as the stock pipeline keeps them. ValueError for no
        prompts.
        """
        return self.encode_after(self.instruction, prompts)

    @torch.no_grad()
    def encode_negative(self, texts: Sequence[str]) -> Conditioning:
        return self.encode_after(None, texts)

    def encode_after(self, instruction: list[str] | None, texts: Sequence[str]) -> Conditioning:
        if isinstance(texts, str) or not texts:
            raise ValueError(f"prompts must be a list of at least one text, got {texts!r}")
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            list(texts),
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.max_sequence_length,
            complex_human_instruction=instruction,
        )
        return {"prompt_embeds": embeds, "prompt_attention_mask": mask}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        length = self.max_sequence_length
        return {"prompt_embeds": (length, self.config.caption_channels), "prompt_attention_mask": (length,)}

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning)
        if latents.ndim != 4 or expert not in (None, 0):
            raise ValueError(
                f"sana takes latents [B,C,h,w] and has one expert, got {list(latents.shape)}, expert {expert}"
            )
        time = sigma * self.pipeline.scheduler.config.num_train_timesteps * self.config.timestep_scale
        return self.predict(latents, time, conditioning)

    def predict(self, latents: Tensor, time: Tensor, conditioning: Conditioning) -> Tensor:
        """The network's velocity, float32; `time` is float32 and stays it up to the sinusoid."""
        output: Tensor = self.denoiser(
            hidden_states=latents.to(self.dtype),
            encoder_hidden_states=conditioning["prompt_embeds"].to(self.dtype),
            # Not `attention_mask`: that is another argument, and the padding would be attended to without a word.
            encoder_attention_mask=conditioning["prompt_attention_mask"],
            timestep=time,
            return_dict=False,
        )[0]
        return output[:, : self.config.in_channels].float()  # some networks put a learned variance behind it

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """(C, H/f, W/f)."""
        if num_frames != 1:
            raise ValueError(f"sana makes images: num_frames must be 1, got {num_frames}")
        factor = self.pipeline.vae_scale_factor
        multiple = math.lcm(STOCK_MULTIPLE, factor * self.config.patch_size)
        for name, size in (("height", height), ("width", width)):
            if size < 1 or size % multiple:
                raise ValueError(f"{name} must be a multiple of {multiple}, got {size}")
        return (self.config.in_channels, height // factor, width // factor)

    def num_tokens(self, shape: Sequence[int]) -> int:
        _, h, w = shape
        return int((h // self.config.patch_size) * (w // self.config.patch_size))

    def text_call(self) -> dict[str, Any]:
        return {**super().text_call(), INSTRUCTION: self.instruction}

    def pipeline_call(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """Binning would move the size to one of a table, and resize what comes out."""
        return {**super().pipeline_call(w, height, width, num_frames), "use_resolution_binning": False}
