"""Cosmos-Predict2.5 (2B and 14B): Text2World, Image2World, Video2World and robot/action-cond, with Wan's VAE."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from diffusers.models.transformers import transformer_cosmos
from diffusers.models.transformers.transformer_cosmos import CosmosTransformerBlock
from diffusers.pipelines.cosmos.pipeline_cosmos2_5_predict import DEFAULT_NEGATIVE_PROMPT
from torch import Tensor, nn
from torch.nn import functional

from wfm_ds.models.assets import guardrail
from wfm_ds.models.assets.guardrail import Guardrail
from wfm_ds.models.assets.weight_files import fingerprint_folders
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.conditioning_frames import get_clean_frames
from wfm_ds.models.cosmos25_action_network import ACTIONS_PER_LATENT
from wfm_ds.models.input_specs import InputSpec
from wfm_ds.models.lora_layer_names import ATTENTION_LAYERS, map_layers
from wfm_ds.models.vae import count_latent_frames, count_patches, require_multiple
from wfm_ds.tensor_memory import copy_to_device
from wfm_ds.types import Conditioning

ACTIONS = "actions"
CONDITIONING_FRAME_SIGMA = 1e-4  # sigma of conditioning frames: conditional_frame_timestep of the pipeline

LORA_NAMES = tuple(
    name
    for layer, original in (("attn1", "self_attn"), ("attn2", "cross_attn"))
    for name in map_layers(
        f"transformer_blocks.{{}}.{layer}",
        f"blocks.{{}}.{original}",
        {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out.0": "output_proj"},
    )
) + map_layers("transformer_blocks.{}", "blocks.{}", {"ff.net.0.proj": "mlp.layer1", "ff.net.2": "mlp.layer2"})


class CosmosModel(DiffusionModel):
    """Base class of the Cosmos families: videos with up to two conditioning latent frames, and NVIDIA's guardrail."""

    is_video = True
    conditioning_frame_counts = (0, 1, 2)
    has_guardrail = True

    @classmethod
    def extra_components(cls, folder: Path, setting: Guardrail) -> dict[str, Any]:
        return {"safety_checker": guardrail.load_safety_checker(setting, folder)}

    def check_prompts(self, prompts: Sequence[str]) -> None:
        guardrail.require_safe_prompts(self.pipeline.safety_checker, prompts)

    def decode_latents(self, latents: Tensor) -> Tensor:
        return guardrail.apply_guardrail(self.pipeline.safety_checker, super().decode_latents(latents))


class Cosmos25(CosmosModel):
    """Cosmos-Predict2.5. The network receives one sigma per latent frame as timesteps, and returns the velocity."""

    family = "cosmos25"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("Cosmos2_5_PredictBasePipeline",)
    required_components = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")
    conditioning_keys = frozenset({"prompt_embeds"})
    default_lora_targets = ATTENTION_LAYERS
    lora_layer_names = LORA_NAMES
    block_classes = (CosmosTransformerBlock,)

    def __init__(self, pipeline: Any, path: Path, **options: Any) -> None:
        provide_torchvision_resize()
        self.text_projection: nn.Module | None = None  # moved from the denoiser into encode_text by prepare_for_lora
        super().__init__(pipeline, path, **options)

    @classmethod
    def default_guidance_scale(cls, index: Mapping[str, Any], call: Mapping[str, Any]) -> float:
        return super().default_guidance_scale(index, call) + 1  # see pipeline_call_kwargs

    def auxiliary_modules(self) -> list[nn.Module]:
        projection = [] if self.text_projection is None else [self.text_projection]
        return [*super().auxiliary_modules(), *projection]

    def prepare_for_lora(self, targets: Sequence[str]) -> None:
        denoiser: Any = self.unwrapped_denoiser
        if not self.config.use_crossattn_projection or self.text_projection is not None:
            return
        layers = [f"crossattn_proj.{name}" for name, _ in denoiser.crossattn_proj.named_modules() if name]
        if any(layer == target or layer.endswith(f".{target}") for layer in layers for target in targets):
            return
        self.text_projection = denoiser.crossattn_proj.to(self.device, self.dtype).requires_grad_(False)
        denoiser.crossattn_proj = nn.Identity()

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return {prompt_embeds: [batch, max_sequence_length, channels]}. The network also attends to padding.

        The channels are the concatenated outputs of all text encoder layers. After prepare_for_lora has moved the text
        projection into this method, they are the projection's output.
        """
        embeds, _ = self.call_encode_prompt(prompts, do_classifier_free_guidance=False)
        if self.text_projection is not None:
            embeds = self.text_projection(embeds.to(self.dtype))
        return {"prompt_embeds": embeds}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        if not self.config.use_crossattn_projection:
            width = self.config.text_embed_dim
        elif self.text_projection is None:
            width = self.config.crossattn_proj_in_channels
        else:
            width = self.config.encoder_hidden_states_channels
        return {"prompt_embeds": (self.max_sequence_length, width)}

    @torch.no_grad()
    def conditioning_from_embedding(self, embedding: Tensor) -> Conditioning | None:
        """Convert one prompt's precomputed embedding [max_sequence_length, channels] to the format of `encode_text`.

        The embedding must include padding tokens and the outputs of all text encoder layers. Returns None for other
        shapes.
        """
        width = self.config.crossattn_proj_in_channels if self.config.use_crossattn_projection else None
        if embedding.shape != (self.max_sequence_length, width or self.config.text_embed_dim):
            return None
        embeds = embedding[None].to(self.device, self.dtype)
        return {"prompt_embeds": embeds if self.text_projection is None else self.text_projection(embeds)}

    def text_cache_key(self) -> dict[str, Any]:
        identity = super().text_cache_key()
        if self.text_projection is not None:
            identity["projection"] = [str(self.dtype), fingerprint_folders(self.path, ["transformer"])]
        return identity

    def resolve_negative_prompt(self, negative_text: str | None = None) -> str:
        return DEFAULT_NEGATIVE_PROMPT if negative_text is None else negative_text

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning, expert)
        count, _, num_frames, h, w = latents.shape
        frames = get_clean_frames(conditioning)
        mask = latents.new_zeros(count, 1, num_frames, 1, 1) if frames is None else frames.mask
        visible = latents if frames is None else frames.insert_clean_latents(latents)
        # Masks must have the compute dtype: a float32 mask would promote the latents that it is concatenated with.
        velocity: Tensor = self.denoiser(
            hidden_states=visible.to(self.dtype),
            condition_mask=mask.expand(-1, -1, -1, h, w).to(self.dtype),
            timestep=self.frame_timesteps(sigma, mask),  # stays float32
            encoder_hidden_states=conditioning["prompt_embeds"].to(self.dtype),
            padding_mask=latents.new_zeros(1, 1, h, w, dtype=self.dtype),
            return_dict=False,
            **self.network_inputs(conditioning),
        )[0].float()
        return velocity if frames is None else frames.insert_known_velocity(velocity, latents, sigma)

    def frame_timesteps(self, sigma: Tensor, mask: Tensor) -> Tensor:
        """Return the timestep of each latent frame, in the shape of `mask` [B,1,T,1,1], 1 on conditioning frames."""
        return mask * CONDITIONING_FRAME_SIGMA + (1 - mask) * sigma.view(-1, 1, 1, 1, 1)

    def network_inputs(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """Return further arguments of the network's forward pass."""
        return {}

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return (channels, (F - 1) / 4 + 1, H / 8, W / 8) for F frames of H x W pixels.

        Raises ValueError if the latents exceed max_size in the network's config, or if the pipeline does not support
        the size.
        """
        factor, frames_factor = self.pipeline.vae_scale_factor_spatial, self.pipeline.vae_scale_factor_temporal
        (_, *patch), (most_frames, *largest) = self.config.patch_size, self.config.max_size
        num_latent_frames = count_latent_frames(num_frames, frames_factor, frames_factor * (most_frames - 1) + 1)
        for name, size, p, most in zip(("height", "width"), (height, width), patch, largest, strict=True):
            require_multiple(name, size, factor * p, factor * most)
        return (self.config.out_channels, num_latent_frames, height // factor, width // factor)

    def num_tokens(self, shape: Sequence[int]) -> int:
        return count_patches(shape, self.config.patch_size)

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """Return the pipeline call arguments for guidance scale w.

        The pipeline computes v_cond + guidance_scale * (v_cond - v_uncond), so guidance_scale is w - 1. Raises
        ValueError for 1 < w <= 2, because the pipeline disables guidance if guidance_scale <= 1.
        """
        if 1 < w <= 2:
            raise ValueError(f"the diffusers pipeline disables guidance for w = {w}: choose 1 or more than 2")
        call = super().pipeline_call_kwargs(w, height, width, num_frames)
        return call | {"guidance_scale": w - 1}


class Cosmos25Actions(Cosmos25):
    """Cosmos-Predict2.5 robot/action-cond: videos that continue a first frame and follow robot actions.

    All latent frames have the timestep sigma, also the conditioning frames.
    """

    family = "cosmos25_actions"
    pipeline_classes = ("CosmosActionPipeline",)
    optional_conditioning_keys = frozenset({ACTIONS})
    input_specs: ClassVar[Mapping[str, InputSpec]] = MappingProxyType({ACTIONS: InputSpec(rank=2, required=True)})

    def encode_inputs(
        self, inputs: Sequence[Mapping[str, npt.NDArray[Any]]], num_frames: int, size: tuple[int, int]
    ) -> Conditioning:
        """Return {actions: float32 [batch, num_frames - 1, action_dim]}.

        Raises ValueError if a sample has no actions, or actions of another shape.
        """
        expected = (num_frames - 1, self.config.action_dim)
        for sample in inputs:
            if ACTIONS not in sample:
                raise ValueError(f"{ACTIONS} is missing")
            if sample[ACTIONS].shape != expected:
                raise ValueError(f"{ACTIONS} must be {list(expected)}, got {list(sample[ACTIONS].shape)}")
        rows = np.stack([np.asarray(sample[ACTIONS], np.float32) for sample in inputs])
        return {ACTIONS: copy_to_device(torch.from_numpy(rows), self.device)}

    def input_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {ACTIONS: (ACTIONS_PER_LATENT * (shape[1] - 1), self.config.action_dim)}

    def frame_timesteps(self, sigma: Tensor, mask: Tensor) -> Tensor:
        return sigma.view(-1, 1, 1, 1, 1).expand_as(mask)

    def network_inputs(self, conditioning: Conditioning) -> dict[str, Tensor]:
        if ACTIONS not in conditioning:
            raise ValueError(f"conditioning lacks {ACTIONS}, which this network needs")
        return {ACTIONS: conditioning[ACTIONS].to(self.dtype)}


def provide_torchvision_resize() -> None:
    """Patch diffusers' Cosmos transformer so that it resizes its padding mask without torchvision."""
    if hasattr(transformer_cosmos, "transforms"):
        return

    def resize(image: Tensor, size: Sequence[int], interpolation: str) -> Tensor:
        return functional.interpolate(image, size=tuple(size), mode=interpolation)

    transformer_cosmos.transforms = types.SimpleNamespace(
        InterpolationMode=types.SimpleNamespace(NEAREST="nearest"), functional=types.SimpleNamespace(resize=resize)
    )
