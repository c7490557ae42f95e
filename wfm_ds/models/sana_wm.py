"""SANA-WM without the refiner (stage 1 only): videos that start with a given image and follow a camera path."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.transformers.transformer_sana_wm import (
    SanaVideoMSCamCtrlBlock,
    SanaWMTransformer3DModel,
    _invert_SE3,
    _process_camera_conditions_ucpe,
)
from diffusers.pipelines.sana_wm.cam_utils import prepare_camera
from diffusers.pipelines.sana_wm.pipeline_sana_wm import DEFAULT_CHI_PROMPT
from torch import Tensor, nn

from wfm_ds.models.base import require_prompts
from wfm_ds.models.conditioning_frames import get_clean_frames
from wfm_ds.models.input_specs import InputSpec
from wfm_ds.models.sana import InstructedModel
from wfm_ds.models.vae import count_latent_frames, count_patches, require_multiples
from wfm_ds.tensor_memory import copy_to_device
from wfm_ds.types import Conditioning

POSES_KEY, INTRINSICS_KEY = "c2w", "intrinsics"
RAYMAP, RAYS, ANGLES, PLUCKER = CAMERA_KEYS = ("raymap", "rays", "ray_angles", "chunk_plucker")
UNUSED_GATES = ("A_log", "dt_bias", "beta_proj.*", "gate_proj.*")  # softmax blocks have these weights but ignore them


class SanaWMCameraTransformer(SanaWMTransformer3DModel, PeftAdapterMixin):  # type: ignore[misc]
    """The diffusers network with LoRA support. It receives camera geometry that is computed in advance in float32."""

    def forward(
        self,
        *arguments: Any,
        raymap: Tensor | None = None,
        rays: Tensor | None = None,
        ray_angles: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Run the network with all three camera tensors of `SanaWM.encode_inputs`, or without any of them."""
        if raymap is None:
            return super().forward(*arguments, **options)
        assert rays is not None
        assert ray_angles is not None
        geometry = {"absmap": ray_angles, "P": rays, "P_inv": _invert_SE3(rays)}
        embeds = {name: tensor.to(self.dtype) for name, tensor in geometry.items()}
        return super().forward(*arguments, camera_conditions=raymap.to(self.dtype), cam_pos_embeds=embeds, **options)


class SanaWM(InstructedModel):
    """SANA-WM. The network receives the timestep int(num_train_timesteps * sigma) and returns the velocity.

    The timestep is 0 on the conditioning frame.
    """

    family = "sana_wm"
    pipeline_classes = ("SanaWMPipeline",)
    instruction_argument = "chi_prompt"  # null in call.json: the pipeline's default
    optional_conditioning_keys = frozenset(CAMERA_KEYS)
    input_specs: ClassVar[Mapping[str, InputSpec]] = MappingProxyType(
        {POSES_KEY: InputSpec(rank=3, required=True), INTRINSICS_KEY: InputSpec(rank=2, required=True)}
    )
    default_lora_targets = (
        *("attn.qkv", "attn.proj", "cross_attn.q_linear", "cross_attn.kv_linear", "cross_attn.proj"),
        *("attn.q_proj_cam", "attn.k_proj_cam", "attn.v_proj_cam", "attn.out_proj_cam"),
    )
    block_classes = (SanaVideoMSCamCtrlBlock,)
    is_video = True
    conditioning_frame_counts = (1,)

    def extract_denoiser(self, pipeline: Any) -> nn.Module:
        network: nn.Module = pipeline.transformer
        network.__class__ = SanaWMCameraTransformer
        return network

    @property
    def unused_parameter_patterns(self) -> tuple[str, ...]:
        config, every = self.config, self.config.softmax_every_n
        softmax = range(every - 1, config.num_layers, every) if every > 0 else ()
        gates = [f"blocks.{i}.attn.{name}" for i in softmax for name in UNUSED_GATES]
        return (*gates, *(("raymap_embedder.*",) if config.use_chunk_plucker_post_attn else ()))

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return {prompt_embeds: [batch, tokens, channels], prompt_attention_mask: int64 [batch, tokens]}.

        The number of tokens is max_sequence_length.
        """
        head = "\n".join(self.instruction or DEFAULT_CHI_PROMPT)
        if not head:
            return self.encode_tokens(prompts, self.max_sequence_length)
        # The same number of tokens as in the diffusers pipeline. The encoded head includes <bos>.
        whole = self.encode_tokens(
            prompts, len(self.pipeline.tokenizer.encode(head)) + self.max_sequence_length - 2, head
        )
        positions = [0, *range(1 - self.max_sequence_length, 0)]
        return {name: tensor[:, positions] for name, tensor in whole.items()}

    @torch.no_grad()
    def encode_negative_text(self, texts: Sequence[str]) -> Conditioning:
        return self.encode_tokens(texts, self.max_sequence_length)

    def encode_tokens(self, texts: Sequence[str], length: int, head: str = "") -> Conditioning:
        """Return embeddings and mask of each text with the prefix `head`.

        Prefix and text together are truncated or padded on the right to `length` tokens.
        """
        require_prompts(texts)
        tokens = self.pipeline.tokenizer(
            [head + text for text in texts],
            max_length=length,
            padding="max_length",
            padding_side="right",
            truncation=True,
            return_tensors="pt",
        ).to(self.device)
        # base_model skips the language model head; its logits are not needed.
        states = self.pipeline.text_encoder.base_model(tokens.input_ids, attention_mask=tokens.attention_mask)
        return {"prompt_embeds": states.last_hidden_state, "prompt_attention_mask": tokens.attention_mask}

    def encode_inputs(
        self, inputs: Sequence[Mapping[str, npt.NDArray[np.float32]]], num_frames: int, size: tuple[int, int]
    ) -> Conditioning:
        """Return the camera geometry of B samples with T latent frames of h x w latents, as four float32 tensors.

        raymap [B, T, 20]: camera pose relative to the first pose, and intrinsics, for each latent frame.
        rays [B, tokens, 4, 4]: transform from world to ray coordinates for each token.
        ray_angles [B, 3, T, h, w]: for each token, the direction of world up in the image (2 numbers), and the angle of
        the token's ray above the horizon.
        chunk_plucker [B, 6 k, T, h, w]: Pluecker coordinates of all pixel frames, k per latent frame.
        Raises ValueError if the input c2w does not have the shape [num_frames, 4, 4], if intrinsics does not have the
        shape [4] or [num_frames, 4], if one of them is missing, or if a focal length is not positive.
        """
        rows = [self.encode_camera(row, num_frames, size) for row in inputs]
        return {name: copy_to_device(torch.cat([row[name] for row in rows]), self.device) for name in CAMERA_KEYS}

    def input_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        _, *size = shape
        return {
            RAYMAP: (size[0], 20),
            RAYS: (self.num_tokens(shape), 4, 4),
            ANGLES: (3, *size),
            PLUCKER: (6 * self.pipeline.vae_temporal_compression_ratio, *size),
        }

    def encode_camera(
        self, sample: Mapping[str, npt.NDArray[np.float32]], num_frames: int, size: tuple[int, int]
    ) -> dict[str, Tensor]:
        if missing := [name for name in self.input_specs if name not in sample]:
            raise ValueError(f"a sample has no {' and no '.join(missing)}")
        poses, intrinsics = (np.asarray(sample[name], np.float32) for name in (POSES_KEY, INTRINSICS_KEY))
        if poses.shape != (num_frames, 4, 4):
            raise ValueError(f"c2w must be [{num_frames}, 4, 4], got {list(poses.shape)}")
        if intrinsics.shape not in ((4,), (num_frames, 4)):
            raise ValueError(f"intrinsics must be [4] or [{num_frames}, 4], got {list(intrinsics.shape)}")
        if not (intrinsics[..., :2] > 0).all():
            raise ValueError("intrinsics: focal lengths must be positive")
        shape, space = self.latent_shape(*size, num_frames), self.pipeline.vae_spatial_compression_ratio
        stride = (self.pipeline.vae_temporal_compression_ratio, space, space)
        intrinsics = np.broadcast_to(intrinsics, (num_frames, 4)).copy()
        geometry = prepare_camera(poses, intrinsics, target_size=size, vae_stride=stride)
        raymap, patch = geometry["raymap"][None], self.config.patch_size
        tokens = tuple(n // side for n, side in zip(shape[1:], patch, strict=True))
        rays, angles = _process_camera_conditions_ucpe(raymap, 1, tokens, patch)
        return {
            RAYMAP: raymap,
            RAYS: rays.reshape(1, -1, 4, 4),
            ANGLES: angles.permute(0, 4, 1, 2, 3),
            PLUCKER: geometry["chunk_plucker"][None],
        }

    def to_latents(self, pixels: Tensor) -> Tensor:
        return super().to_latents(pixels) * float(self.pipeline.vae.config.scaling_factor)

    def to_pixels(self, latents: Tensor) -> Tensor:
        return super().to_pixels(latents / float(self.pipeline.vae.config.scaling_factor))

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning, expert)
        frames = get_clean_frames(conditioning)
        free = latents.new_ones(len(latents), 1, latents.shape[2]) if frames is None else 1 - frames.mask[..., 0, 0]
        velocity: Tensor = self.denoiser(
            hidden_states=(latents if frames is None else frames.insert_clean_latents(latents)).to(self.dtype),
            timestep=sigma.view(-1, 1, 1) * self.pipeline.scheduler.config.num_train_timesteps * free,
            encoder_hidden_states=conditioning["prompt_embeds"][:, None].to(self.dtype),
            mask=conditioning["prompt_attention_mask"],
            return_dict=False,
            **{name: conditioning[name] for name in CAMERA_KEYS if name in conditioning},
        )[0].float()
        return velocity if frames is None else frames.insert_known_velocity(velocity, latents, sigma)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        patch, factor = self.config.patch_size, self.pipeline.vae_spatial_compression_ratio
        num_latent_frames = count_latent_frames(num_frames, self.pipeline.vae_temporal_compression_ratio)
        if num_latent_frames % patch[0]:
            raise ValueError(f"num_frames must give a multiple of {patch[0]} latent frames, got {num_frames}")
        require_multiples(height, width, factor * math.lcm(*patch[1:]))
        return (self.config.in_channels, num_latent_frames, height // factor, width // factor)

    def num_tokens(self, shape: Sequence[int]) -> int:
        return count_patches(shape, self.config.patch_size)
