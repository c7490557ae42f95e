"""Wan 2.1, Wan 2.2 A14B (two experts) and Wan 2.2 TI2V 5B (one timestep per token). The text encoder is UMT5.

If an optimizer step uses only one of two experts, the gradient of the other expert is zero, but Adam still changes that
expert, because Adam's moments contain earlier gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import ftfy  # noqa: F401, the pipeline silently skips prompt cleaning if it is missing
import numpy as np
import numpy.typing as npt
import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from PIL import Image
from torch import Tensor, nn

from wfm_ds.errors import ModelError
from wfm_ds.models import vae
from wfm_ds.models.assets.loading import read_json
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.conditioning_frames import get_clean_frames
from wfm_ds.models.lora_layer_names import ATTENTION_LAYERS, LoraLayerName, map_layers
from wfm_ds.models.source_images import MAX_CACHE_BYTES, ImageCache
from wfm_ds.models.vae import count_latent_frames, count_patches, require_multiple
from wfm_ds.tensor_memory import copy_to_device
from wfm_ds.types import FIRST_FRAME, Conditioning

EXPERT_NAMES = ("transformer", "transformer_2")  # high noise first
CHANNELS_KEY, EMBEDS_KEY = "image_channels", "image_embeds"


def map_block_layers(block: str) -> tuple[LoraLayerName, ...]:
    """Map the attention and feed-forward layers of a block, such as `blocks.{}`, to their original names."""
    attention = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
    return (
        *map_layers(f"{block}.attn1", f"{block}.self_attn", attention),
        *map_layers(f"{block}.attn2", f"{block}.cross_attn", attention),
        *map_layers(block, block, {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}),
    )


LORA_NAMES = map_block_layers("blocks.{}")
IMAGE_ATTENTION_LAYERS = ("add_k_proj", "add_v_proj")  # layers of the attention to CLIP embeddings
LORA_NAMES += map_layers("blocks.{}.attn2", "blocks.{}.cross_attn", {"add_k_proj": "k_img", "add_v_proj": "v_img"})
IMAGE_TO_VIDEO_TEXT_TOKENS = 512  # diffusers assumes this number when it separates text tokens from image tokens


class Experts(nn.Module):
    """The expert networks of a denoiser as one module. Parameter names start with the name of the expert."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, network in networks.items():
            self.add_module(name, network)

    def forward(self, *args: Any, expert: int, **kwargs: Any) -> Any:
        return self.networks[expert](*args, **kwargs)

    @property
    def networks(self) -> list[Any]:
        return list(self.children())

    @property
    def peft_config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.networks[0].peft_config
        return config

    def add_adapter(self, config: Any, adapter_name: str = "default") -> None:
        """Add a separate adapter to each expert, initialized from torch's global random generator."""
        for network in self.networks:
            network.add_adapter(config, adapter_name=adapter_name)

    def set_adapter(self, adapter_name: str) -> None:
        for network in self.networks:
            network.set_adapter(adapter_name)

    def enable_adapters(self) -> None:
        for network in self.networks:
            network.enable_adapters()

    def disable_adapters(self) -> None:
        for network in self.networks:
            network.disable_adapters()

    def enable_gradient_checkpointing(self, checkpoint_block: Callable[..., Any] | None = None) -> None:
        """checkpoint_block: function (block, *arguments) -> outputs. None selects diffusers' function."""
        for network in self.networks:
            network.enable_gradient_checkpointing(checkpoint_block)

    def disable_gradient_checkpointing(self) -> None:
        for network in self.networks:
            network.disable_gradient_checkpointing()


class ImageConditioner:
    """Encodes first frames for image-to-video networks. Results are cached in host memory."""

    def __init__(self, pipeline: Any, *, embeds: bool, max_cache_bytes: int = MAX_CACHE_BYTES) -> None:
        """embeds: whether the network also receives CLIP image embeddings."""
        self.pipeline, self.embeds, self._cache = pipeline, embeds, ImageCache(max_cache_bytes)

    @property
    def keys(self) -> tuple[str, ...]:
        return (CHANNELS_KEY, EMBEDS_KEY) if self.embeds else (CHANNELS_KEY,)

    def encode_frames(
        self, frames: Sequence[npt.NDArray[np.uint8]], num_frames: int, device: torch.device
    ) -> Conditioning:
        """Encode the first frames [H,W,3] of videos with num_frames frames.

        Returns {image_channels: float32 [batch, channels, latent frames, h, w]}. The first channels, as many as the
        VAE's temporal scale factor, are a mask that is 1 on the first latent frame. The remaining channels are the
        normalized latents of a video with grey frames after the first frame.
        If the network receives CLIP embeddings, the result also contains image_embeds: [batch, tokens, channels] in
        CLIP's dtype.
        """
        rows = [
            self._cache.encode([frame], num_frames, partial(self._encode_frame, frame, num_frames)) for frame in frames
        ]
        return {name: copy_to_device(torch.cat([row[name] for row in rows]), device) for name in rows[0]}

    def conditioning_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return {name: shape without batch axis} of the tensors from `encode_frames`.

        shape: shape [C,T,h,w] of the latents of one video.
        """
        channels, *grid = shape
        shapes = {CHANNELS_KEY: (self.pipeline.vae_scale_factor_temporal + channels, *grid)}
        if not self.embeds:
            return shapes
        clip = self.pipeline.image_encoder.config
        return {**shapes, EMBEDS_KEY: ((clip.image_size // clip.patch_size) ** 2 + 1, clip.hidden_size)}

    @torch.no_grad()
    def _encode_frame(self, frame: npt.NDArray[np.uint8], num_frames: int) -> Conditioning:
        """Encode one frame as the pipeline does."""
        device = self.pipeline.vae.device
        pixels = copy_to_device(torch.from_numpy(frame), device).permute(2, 0, 1).float() / 255
        clip = pixels.new_zeros(1, 3, num_frames, *pixels.shape[1:])  # grey (0) after the first frame
        clip[0, :, 0] = 2 * pixels - 1
        latents = vae.encode_normalized(self.pipeline.vae, clip)
        mask = latents.new_zeros(1, self.pipeline.vae_scale_factor_temporal, *latents.shape[2:])
        mask[:, :, 0] = 1
        conditioning = {CHANNELS_KEY: torch.cat([mask, latents], dim=1)}
        if self.embeds:
            embeds: Tensor = self.pipeline.encode_image(Image.fromarray(frame), device)
            conditioning[EMBEDS_KEY] = embeds
        return conditioning


def create_image_conditioner(pipeline: Any, path: Path, configs: Sequence[Any]) -> ImageConditioner | None:
    """Return the encoder of first frames for image-to-video networks, or None for text-to-video networks.

    Raises ModelError if the network needs inputs that are not supported.
    """
    num_channels = pipeline.vae.config.z_dim
    num_image_channels = 2 * num_channels + pipeline.vae_scale_factor_temporal  # latents, image latents, frame masks
    config, *others = configs
    in_channels, embeds = config.in_channels, config.image_dim is not None
    if any((other.in_channels, other.image_dim) != (in_channels, config.image_dim) for other in others):
        raise ModelError(f"{path}: its two experts have different inputs; use a complete pipeline")
    if in_channels not in (num_channels, num_image_channels) or (embeds and in_channels == num_channels):
        raise ModelError(
            f"{path}: a network with {in_channels} input channels is not supported, only {num_channels} (latents) or "
            f"{num_image_channels} (latents and an image); use a text-to-video, TI2V or image-to-video pipeline"
        )
    if in_channels == num_channels:
        return None
    if config.pos_embed_seq_len is not None:
        raise ModelError(f"{path}: first-and-last-frame checkpoints are not supported; use the image-to-video pipeline")
    if not hasattr(pipeline, "encode_image") or (embeds and pipeline.image_encoder is None):
        raise ModelError(
            f"{path}: the network takes an image, but the pipeline lacks the components for it; use a complete "
            "WanImageToVideoPipeline"
        )
    return ImageConditioner(pipeline, embeds=embeds)


class Wan(DiffusionModel):
    """Wan 2.1 and 2.2. The network receives the timestep num_train_timesteps * sigma and returns the velocity.

    Pipelines with `boundary_ratio` in model_index.json have two experts (2.2 A14B). Pipelines with `expand_timesteps`
    support a conditioning frame (TI2V). Image-to-video networks receive a first frame as input and denoise all latent
    frames.
    """

    family = "wan"
    pipeline_classes: ClassVar[tuple[str, ...]] = ("WanPipeline", "WanImageToVideoPipeline")
    required_components = ("transformer", "vae", "scheduler", "tokenizer", "text_encoder")
    conditioning_keys = frozenset({"prompt_embeds"})
    default_lora_targets: tuple[str, ...] = ATTENTION_LAYERS
    lora_layer_names = LORA_NAMES
    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (WanTransformerBlock,)
    denoiser_components: tuple[str, ...] = EXPERT_NAMES
    guidance_arguments = ("guidance_scale", "guidance_scale_2")
    is_video = True

    def __init__(self, pipeline: Any, path: Path, **options: Any) -> None:
        """Raise ModelError if the pipeline or max_sequence_length is not supported."""
        # The sigma between the two experts of 2.2 A14B. None: one network.
        self.boundary_ratio: float | None = pipeline.config.get("boundary_ratio")
        self.has_token_timesteps = bool(pipeline.config.get("expand_timesteps"))  # TI2V
        networks = {name: network for name in EXPERT_NAMES if (network := getattr(pipeline, name, None)) is not None}
        if (len(networks) == 2) != (self.boundary_ratio is not None):
            raise ModelError(
                f"{path}: model_index.json must have both transformer_2 and boundary_ratio, or neither; use a complete "
                "pipeline"
            )
        self.denoiser_components = tuple(networks)
        configs = [network.config for network in networks.values()]
        self.image_conditioner = create_image_conditioner(pipeline, path, configs)
        if self.image_conditioner is not None:
            self.conditioning_frame_counts, self.uses_clean_frames = (1,), False
            self.optional_conditioning_keys = frozenset(self.image_conditioner.keys)
            if self.image_conditioner.embeds:
                self.default_lora_targets = (*self.default_lora_targets, *IMAGE_ATTENTION_LAYERS)
        elif self.has_token_timesteps:
            self.conditioning_frame_counts = (0, 1)
        super().__init__(pipeline, path, **options)
        has_image_tokens = self.image_conditioner is not None and self.image_conditioner.embeds
        if has_image_tokens and self.max_sequence_length != IMAGE_TO_VIDEO_TEXT_TOKENS:
            raise ModelError(
                f"{path}: this image-to-video network requires {IMAGE_TO_VIDEO_TEXT_TOKENS} text tokens; remove "
                f"model.max_sequence_length, which is {self.max_sequence_length}"
            )

    @classmethod
    def check_folder(cls, folder: Path) -> None:
        index = read_json(folder / "model_index.json")
        absent = [name for name in ("image_encoder", "image_processor") if not any(index.get(name) or [])]
        if len(absent) == 1:
            raise ModelError(f"{folder} has no {absent[0]}, which encodes the first frame; use a complete pipeline")

    def extract_denoiser(self, pipeline: Any) -> nn.Module:
        networks: dict[str, nn.Module] = {name: getattr(pipeline, name) for name in self.denoiser_components}
        return networks["transformer"] if self.boundary_ratio is None else Experts(networks)

    @classmethod
    def needs_first_frame(cls, folder: Path) -> bool:
        config = read_json(folder / "transformer" / "config.json")
        return bool(config["in_channels"] > config["out_channels"])

    @property
    def sigma_ranges(self) -> tuple[tuple[float, float], ...]:
        """The sigma range (low, high) of each expert.

        If there are two experts, `transformer` runs for sigma >= boundary_ratio, and `transformer_2` runs below.
        """
        boundary = self.boundary_ratio
        return super().sigma_ranges if boundary is None else ((boundary, 1.0), (0.0, boundary))

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return {prompt_embeds: [batch, max_sequence_length, channels]}. The embeddings of padding are zero."""
        embeds, _ = self.call_encode_prompt(prompts, do_classifier_free_guidance=False)
        return {"prompt_embeds": embeds}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (self.max_sequence_length, self.config.text_dim)}

    def encode_inputs(
        self, inputs: Sequence[Mapping[str, npt.NDArray[np.float32]]], num_frames: int, size: tuple[int, int]
    ) -> Conditioning:
        """Encode the first frames for an image-to-video network. Returns {} for other networks.

        Raises ValueError if a frame is missing or has the wrong size.
        """
        if self.image_conditioner is None:
            return {}
        frames = [row[FIRST_FRAME] for row in inputs if FIRST_FRAME in row]
        if len(frames) < len(inputs):
            raise ValueError(f"{len(inputs) - len(frames)} of {len(inputs)} samples have no first frame")
        if wrong := [list(frame.shape) for frame in frames if frame.shape != (*size, 3)]:
            raise ValueError(f"a first frame must be {[*size, 3]}, got {wrong[0]}")
        return self.image_conditioner.encode_frames(
            [frame.astype(np.uint8) for frame in frames], num_frames, self.device
        )

    def input_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {} if self.image_conditioner is None else self.image_conditioner.conditioning_shapes(shape)

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        """Predict the velocity. If there are two experts, all values of sigma must be in the range of one expert.

        If `expert` is None, sigma is copied to the host to select the expert.
        """
        self.check_denoise(latents, sigma, conditioning, expert)
        if missing := sorted(self.optional_conditioning_keys - conditioning.keys()):
            raise ValueError(f"conditioning lacks {missing}, which this network needs")
        expert = self.resolve_expert(sigma, expert)
        frames = get_clean_frames(conditioning)
        visible = latents if frames is None else frames.insert_clean_latents(latents)
        if self.image_conditioner is not None:
            visible = torch.cat([visible, conditioning[CHANNELS_KEY]], dim=1)
        velocity: Tensor = self.denoiser(
            hidden_states=visible.to(self.dtype),
            timestep=self.network_timesteps(sigma, latents.shape, None if frames is None else frames.mask),
            encoder_hidden_states=conditioning["prompt_embeds"].to(self.dtype),
            return_dict=False,
            **({} if self.boundary_ratio is None else {"expert": expert}),
            **self.network_inputs(conditioning),
        )[0].float()
        return velocity if frames is None else frames.insert_known_velocity(velocity, latents, sigma)

    def network_inputs(self, conditioning: Conditioning) -> dict[str, Tensor]:
        """Return the network's keyword arguments besides latents, timestep and text embeddings."""
        if EMBEDS_KEY not in conditioning:
            return {}
        return {"encoder_hidden_states_image": conditioning[EMBEDS_KEY].to(self.dtype)}

    def resolve_expert(self, sigma: Tensor, expert: int | None) -> int:
        """Return `expert` or, if it is None, the index of the expert that runs for these sigmas.

        Raises ValueError if the values of sigma belong to different experts, or not to `expert`. If `expert` is given
        and sigma is on a GPU, the values are not checked.
        """
        if len(self.sigma_ranges) == 1 or (expert is not None and sigma.device.type != "cpu"):
            return expert or 0
        experts = {self.select_expert(level) for level in sigma.tolist()}
        if experts != {expert} and (expert is not None or len(experts) > 1):
            raise ValueError(f"all of sigma must belong to one expert: {sigma.tolist()} belong to {sorted(experts)}")
        return experts.pop()

    def network_timesteps(self, sigma: Tensor, shape: Sequence[int], conditional_mask: Tensor | None) -> Tensor:
        """Return the network's timesteps, float32: one per sample, or for TI2V one per token.

        For TI2V, the shape is [batch, tokens], and tokens of conditioning frames have timestep 0.
        """
        time_B: Tensor = sigma * self.pipeline.scheduler.config.num_train_timesteps
        if not self.has_token_timesteps:
            return time_B
        time_BT = time_B[:, None].expand(-1, shape[2])
        if conditional_mask is not None:
            time_BT = (1 - conditional_mask.view(len(sigma), -1)) * time_BT
        return time_BT.repeat_interleave(self.num_tokens(shape[1:]) // shape[2], dim=1)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return (channels, (F - 1) / 4 + 1, H / f, W / f) for F frames of H x W pixels and VAE scale factor f.

        The size of the network's rotary embedding table limits duration, height and width.
        """
        _, patch_h, patch_w = self.config.patch_size
        factor, factor_t = self.pipeline.vae_scale_factor_spatial, self.pipeline.vae_scale_factor_temporal
        positions = self.config.rope_max_seq_len
        require_multiple("height", height, factor * patch_h, factor * patch_h * positions)
        require_multiple("width", width, factor * patch_w, factor * patch_w * positions)
        num_latent_frames = count_latent_frames(num_frames, factor_t, factor_t * (positions - 1) + 1)
        return (self.pipeline.vae.config.z_dim, num_latent_frames, height // factor, width // factor)

    def num_tokens(self, shape: Sequence[int]) -> int:
        return count_patches(shape, self.config.patch_size)
