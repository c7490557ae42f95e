"""LTX-2 and LTX-2.3: video with sound. The text encoder is Gemma 3, followed by one connector network per stream.

The network has two streams of latents. The latents of a sample are one vector [N]: video latents, then audio latents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

from wfm_ds.errors import ModelError
from wfm_ds.models import vae
from wfm_ds.models.assets.weight_files import fingerprint_folders
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.guidance import NEGATIVE_PASS, GuidancePass, choose_rows, format_blocks, parse_blocks
from wfm_ds.models.lora_layer_names import ATTENTION_LAYERS
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.tensor_memory import copy_to_device
from wfm_ds.types import Conditioning, SoundClip

VIDEO, AUDIO = "video", "audio"  # the streams, in the order of the latents
VIDEO_TEXT, AUDIO_TEXT, MASK = "video_embeds", "audio_embeds", "embeds_mask"
STG, ISOLATED = "stg", "isolated"  # passes without self-attention in some blocks, and without attention between streams
PIPELINE_SIZE_MULTIPLE = 32  # the pipeline rejects other sizes
MEL_WINDOW = 1024  # samples per Fourier transform; the audio VAE is trained with it
MIN_MAGNITUDE = 1e-5
# Default limits of the timestep shift in the pipeline, for schedulers without them.
SHIFT_LIMITS = {"base_image_seq_len": 1024, "max_image_seq_len": 4096, "base_shift": 0.95, "max_shift": 2.05}
SUPPORTED_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "transformer/config.json": {"patch_size": 1, "patch_size_t": 1},
    "vae/config.json": {"timestep_conditioning": False},
}


@dataclass(frozen=True, slots=True)
class Streams:
    """Latent shapes of one sample."""

    video: tuple[int, ...]  # (channels, latent frames, h, w)
    audio: tuple[int, ...]  # (channels, latent frames, mel bins)

    @property
    def num_elements(self) -> dict[str, int]:
        return {VIDEO: math.prod(self.video), AUDIO: math.prod(self.audio)}


class Ltx2(DiffusionModel):
    """LTX-2. The network receives the timestep num_train_timesteps * sigma for both streams, and returns velocities."""

    family = "ltx2"
    pipeline_classes = ("LTX2Pipeline",)
    required_components = (
        *("transformer", "vae", "scheduler", "tokenizer", "text_encoder"),
        *("connectors", "audio_vae", "vocoder"),
    )
    supported_options = SUPPORTED_OPTIONS
    conditioning_keys = frozenset({VIDEO_TEXT, AUDIO_TEXT, MASK})
    default_lora_targets = ATTENTION_LAYERS  # in self-, cross- and audio-video attention
    guidance_keys = frozenset({"audio_scale", "stg_blocks", "stg_scale", "modality_scale", "rescale"})
    block_classes = (LTX2VideoTransformerBlock,)
    is_video = True
    makes_sound = True
    latent_layout = ("[B,N]", 2)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._layouts: dict[int, set[Streams]] = {}  # {N: layouts of the sizes that were used}
        self.sound_rate = int(self.pipeline.vocoder.config.output_sampling_rate)
        self.clip_sound_rate = int(self.pipeline.audio_vae.config.sample_rate)
        nn.Module.to(self.pipeline.connectors, self.text_dtype)  # the method of diffusers logs a warning
        registers = self.pipeline.connectors.config.video_connector_num_learnable_registers
        if registers and self.max_sequence_length % registers:
            raise ModelError(
                f"{self.path}: model.max_sequence_length {self.max_sequence_length} must be a multiple of {registers}"
            )

    def check_sampling(self, sampling: SamplingRecipe) -> None:
        super().check_sampling(sampling)
        blocks = sampling.guidance.stg_blocks
        if blocks and not self.config.perturbed_attn:
            raise ModelError(f"{self.path}: the blocks cannot skip self-attention: remove sampling.guidance.stg_blocks")
        if blocks and max(blocks) >= self.config.num_layers:
            raise ModelError(
                f"{self.path}: sampling.guidance.stg_blocks {blocks}: the blocks are 0 to {self.config.num_layers - 1}"
            )

    def text_encoders(self) -> dict[str, nn.Module]:
        return self.components_with_prefix("text_encoder") | self.components_with_prefix("connectors")

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return {video_embeds, audio_embeds: [batch, tokens, channels], embeds_mask: int64 [batch, tokens]}.

        These are the outputs of the connectors, for which the pipeline has separate networks for video and sound.
        """
        states, mask, _, _ = self.call_encode_prompt(prompts, do_classifier_free_guidance=False)
        side = self.pipeline.tokenizer.padding_side  # set by encode_prompt
        video, audio, mask = self.pipeline.connectors(states, mask, padding_side=side)
        return {VIDEO_TEXT: video, AUDIO_TEXT: audio, MASK: mask}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        config, length = self.pipeline.connectors.config, self.max_sequence_length
        video, audio = (
            config[f"{name}_connector_num_attention_heads"] * config[f"{name}_connector_attention_head_dim"]
            for name in (VIDEO, AUDIO)
        )
        return {VIDEO_TEXT: (length, video), AUDIO_TEXT: (length, audio), MASK: (length,)}

    def streams(self, height: int, width: int, num_frames: int) -> Streams:
        """Return the latent shapes of both streams. Raises ValueError for an unsupported size."""
        pipeline, config = self.pipeline, self.pipeline.audio_vae.config
        space = pipeline.vae_spatial_compression_ratio
        vae.require_multiples(height, width, math.lcm(PIPELINE_SIZE_MULTIPLE, space))
        frames = vae.count_latent_frames(num_frames, pipeline.vae_temporal_compression_ratio)
        per_second = config.sample_rate / config.mel_hop_length / pipeline.audio_vae_temporal_compression_ratio
        audio_frames = round(num_frames / self.fps * per_second)
        if audio_frames < 1:
            raise ValueError(f"{num_frames} frames at {self.fps:g} fps are too short for sound: raise num_frames")
        return Streams(
            video=(self.config.in_channels, frames, height // space, width // space),
            audio=(
                config.latent_channels,
                audio_frames,
                config.mel_bins // pipeline.audio_vae_mel_compression_ratio,
            ),
        )

    def stream_sizes(self, sampling: SamplingRecipe) -> Mapping[str, int]:
        return self.streams(sampling.height, sampling.width, sampling.num_frames).num_elements

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return (N,), the number of elements of both streams. See PixelCodec.latent_shape."""
        streams = self.streams(height, width, num_frames)
        count = sum(streams.num_elements.values())
        self._layouts.setdefault(count, set()).add(streams)
        return (count,)

    def find_streams(self, shape: Sequence[int]) -> Streams:
        """Return the layout of latents of this shape, which `latent_shape` returned before.

        Raises ValueError if there is none, or if several sizes have this number of elements.
        """
        found = sorted(self._layouts.get(shape[0], ()), key=str)
        if len(found) != 1:
            sizes = " and ".join(str(list(streams.video)) for streams in found) or "none"
            raise ValueError(
                f"latents with {shape[0]} elements: the video latents of the sizes in use are {sizes}, but exactly one "
                "must fit: use sizes with different numbers of pixels"
            )
        return found[0]

    def split(self, latents: Tensor) -> dict[str, Tensor]:
        """Split latents [B,N] into {video: [B,C,T,h,w], audio: [B,C,T,bins]}."""
        streams = self.find_streams(latents.shape[1:])
        video, audio = torch.split(latents, list(streams.num_elements.values()), dim=1)
        return {VIDEO: video.reshape(-1, *streams.video), AUDIO: audio.reshape(-1, *streams.audio)}

    @staticmethod
    def join(parts: Mapping[str, Tensor]) -> Tensor:
        """Join both streams to latents [B,N]. The inverse of `split`."""
        return torch.cat([parts[name].flatten(1) for name in (VIDEO, AUDIO)], dim=1)

    def grid_size(self, shape: Sequence[int]) -> tuple[int, int]:
        *_, h, w = self.find_streams(shape).video
        return h, w

    def num_latent_frames(self, shape: Sequence[int]) -> int:
        return self.find_streams(shape).video[1]

    def draw_noise(self, seeds: Sequence[int], shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """Draw the noise of the video, then that of the sound. A single draw of N numbers would give other values."""
        streams = self.find_streams(shape)
        rows = []
        for seed in seeds:
            generator = torch.Generator("cpu").manual_seed(seed)
            video = torch.randn(1, *streams.video, generator=generator)
            rows.append(self.join({VIDEO: video, AUDIO: torch.randn(1, *streams.audio, generator=generator)}))
        return copy_to_device(torch.cat(rows), device)

    def denoise(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        expert: int | None = None,
        variant: str = "",
    ) -> Tensor:
        """Predict the velocity. variant: `isolated`, or `stg` and the blocks without self-attention (`stg:28,29`)."""
        self.check_denoise(latents, sigma, conditioning, expert)
        parts = self.split(latents)
        _, _, frames, height, width = parts[VIDEO].shape
        kind, _, blocks = variant.partition(":")
        time = sigma * self.pipeline.scheduler.config.num_train_timesteps  # stays float32
        video, audio = self.denoiser(
            hidden_states=parts[VIDEO].flatten(2).transpose(1, 2).to(self.dtype),
            audio_hidden_states=parts[AUDIO].transpose(1, 2).flatten(2).to(self.dtype),
            encoder_hidden_states=conditioning[VIDEO_TEXT].to(self.dtype),
            audio_encoder_hidden_states=conditioning[AUDIO_TEXT].to(self.dtype),
            encoder_attention_mask=conditioning[MASK],
            audio_encoder_attention_mask=conditioning[MASK],
            timestep=time,
            sigma=time,
            num_frames=frames,
            height=height,
            width=width,
            fps=self.fps,
            audio_num_frames=parts[AUDIO].shape[2],
            isolate_modalities=kind == ISOLATED,
            spatio_temporal_guidance_blocks=parse_blocks(blocks) if kind == STG else None,
            use_cross_timestep=True,
            return_dict=False,
        )
        bins = parts[AUDIO].shape[3]
        velocity = {
            VIDEO: video.transpose(1, 2).unflatten(2, (frames, height, width)),
            AUDIO: audio.unflatten(2, (-1, bins)).transpose(1, 2),
        }
        return self.join(velocity).float()

    def guidance_passes(
        self, settings: SamplingRecipe, expert: int, sigma: float | None = None
    ) -> tuple[GuidancePass, ...]:
        passes, guidance = super().guidance_passes(settings, expert, sigma), settings.guidance
        if passes and guidance.stg_blocks:
            passes += (GuidancePass(STG, variant=f"{STG}:{format_blocks(guidance.stg_blocks)}"),)
        if passes and guidance.modality_scale > 1:
            passes += (GuidancePass(ISOLATED, variant=ISOLATED),)
        return passes

    def combine_passes(
        self,
        cond: Tensor,
        others: Mapping[str, Tensor],
        latents: Tensor,
        sigma: Tensor,
        settings: SamplingRecipe,
        expert: int,
    ) -> Tensor:
        if NEGATIVE_PASS.name not in others:
            return cond
        guidance, scale = settings.guidance, settings.expert_guidance_scale(expert)
        scales = {VIDEO: scale, AUDIO: scale if guidance.audio_scale is None else guidance.audio_scale}
        x, c = self.split(latents), self.split(cond)
        rest = {name: self.split(velocity) for name, velocity in others.items()}
        guided = {}
        for name in (VIDEO, AUDIO):
            s = sigma.view(-1, *[1] * (x[name].ndim - 1))
            moved = c[name] + (scales[name] - 1) * (c[name] - rest[NEGATIVE_PASS.name][name])
            if STG in rest:
                moved = moved + guidance.stg_scale * (c[name] - rest[STG][name])
            if ISOLATED in rest:
                moved = moved + (guidance.modality_scale - 1) * (c[name] - rest[ISOLATED][name])
            guided[name] = rescale_clean(x[name], s, c[name], moved, guidance.rescale) if guidance.rescale else moved
        return choose_rows(sigma, *guidance.interval, self.join(guided), cond)

    def num_tokens(self, shape: Sequence[int]) -> int:
        """Return the number of video tokens, on which the timestep shift depends. Audio tokens are not counted."""
        return math.prod(self.find_streams(shape).video[1:])

    def sigmas(self, num_steps: int, shape: Sequence[int]) -> Tensor:
        # The scheduler divides by zero for one step.
        return torch.tensor([1.0, 0.0], dtype=torch.float64) if num_steps == 1 else super().sigmas(num_steps, shape)

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        mu = self.shift_parameter(self.num_tokens(shape), **SHIFT_LIMITS)
        return {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps), "mu": mu}

    def encode_uint8(self, media: Sequence[npt.NDArray[np.uint8] | SoundClip]) -> Tensor:
        """Encode videos, which all have sound or all have none. See PixelCodec."""
        latents = super().encode_uint8(media)
        sounds = [clip.sound for clip in media if isinstance(clip, SoundClip)]
        if not sounds:
            return latents
        sound = copy_to_device(torch.from_numpy(np.stack(sounds)), self.device)
        return self.join({VIDEO: self.split(latents)[VIDEO], AUDIO: self.encode_sound(sound, latents.shape[1:])})

    @torch.no_grad()
    def encode_sound(self, sound: Tensor, shape: Sequence[int]) -> Tensor:
        """Encode sound, float32 [B,2,samples] at `clip_sound_rate`, to the audio latents [B,C,T,bins] of this shape."""
        net = self.pipeline.audio_vae
        spectrogram = log_mel(sound, net.config.sample_rate, net.config.mel_hop_length, net.config.mel_bins)
        one_by_one = [net.encode(one.to(vae.vae_dtype(net))).latent_dist.mode() for one in torch.split(spectrogram, 1)]
        packed = torch.cat(one_by_one).float().transpose(1, 2).flatten(2)  # statistics are per token
        tokens: Tensor = self.pipeline._normalize_audio_latents(packed, net.latents_mean, net.latents_std)
        channels, num_frames, bins = self.find_streams(shape).audio
        # The encoder may return one frame more than the pipeline generates: 127 and 126 for 121 frames at 24 fps.
        return tokens[:, :num_frames].reshape(len(tokens), num_frames, channels, bins).transpose(1, 2)

    def to_latents(self, pixels: Tensor) -> Tensor:
        """Encode a video without sound: the audio latents are zero, their mean."""
        net = self.pipeline.vae
        video = self.pipeline._normalize_latents(
            vae.encode_mode(net, pixels), net.latents_mean, net.latents_std, net.config.scaling_factor
        )
        frames, height, width = pixels.shape[2:]
        audio = video.new_zeros(len(video), *self.streams(height, width, frames).audio)
        return self.join({VIDEO: video, AUDIO: audio})

    def to_pixels(self, latents: Tensor) -> Tensor:
        net = self.pipeline.vae
        video = self.split(latents)[VIDEO]
        return vae.decode_raw(
            net,
            self.pipeline._denormalize_latents(video, net.latents_mean, net.latents_std, net.config.scaling_factor),
        )

    @torch.no_grad()
    def decode_sound(self, latents: Tensor) -> Tensor:
        """Decode latents to sound, float32 [B, channels, samples] in [-1, 1], at `sound_rate` samples per second."""
        net, vocoder = self.pipeline.audio_vae, self.pipeline.vocoder
        tokens = self.split(latents.to(self.device))[AUDIO].transpose(1, 2).flatten(2)  # statistics are per token
        tokens = self.pipeline._denormalize_audio_latents(tokens, net.latents_mean, net.latents_std)
        bins = net.config.mel_bins // self.pipeline.audio_vae_mel_compression_ratio
        spectrogram = net.decode(
            self.pipeline._unpack_audio_latents(tokens, tokens.shape[1], bins).to(vae.vae_dtype(net)),
            return_dict=False,
        )[0]
        sound: Tensor = vocoder(spectrogram.to(vae.vae_dtype(vocoder)))
        return sound.float()

    def latent_cache_key(self) -> dict[str, Any]:
        sound = fingerprint_folders(self.path, ["audio_vae"])
        return {**super().latent_cache_key(), "audio": sound, "fps": self.fps}

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """See DiffusionModel. Both streams have guidance scale w, and there are no further passes."""
        return {
            **super().pipeline_call_kwargs(w, height, width, num_frames),
            "frame_rate": self.fps,
            "audio_guidance_scale": w,
            **dict.fromkeys(("stg_scale", "audio_stg_scale", "guidance_rescale", "audio_guidance_rescale"), 0.0),
            **dict.fromkeys(("modality_scale", "audio_modality_scale"), 1.0),
        }


def rescale_clean(latents: Tensor, sigma: Tensor, cond: Tensor, guided: Tensor, strength: float) -> Tensor:
    """Return `guided` after rescaling its clean prediction x0 = latents - sigma * velocity.

    The clean prediction is moved by `strength` in [0, 1] towards the one with the standard deviation of that of `cond`.
    sigma: broadcast to the latents.
    """
    clean, axes = latents - sigma * guided, tuple(range(1, latents.ndim))
    std = (latents - sigma * cond).std(axes, keepdim=True) / clean.std(axes, keepdim=True)
    return (latents - clean * (strength * std + 1 - strength)) / sigma


def log_mel(sound: Tensor, rate: int, hop: int, bins: int) -> Tensor:
    """Return the natural logarithm of the mel spectrogram of float32 sound [B, channels, samples].

    The result is float32 [B, channels, 1 + samples // hop, bins]. It equals the output of AudioProcessor in Lightricks'
    LTX-2 repository: magnitudes of windows with reflected ends, and filters of the Slaney mel scale from 0 to rate / 2.

    rate: samples per second. hop: samples between two windows.
    """
    filters = mel_filter_bank(MEL_WINDOW // 2 + 1, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    spectrum = torch.stft(
        sound.flatten(0, 1),
        MEL_WINDOW,
        hop_length=hop,
        window=torch.hann_window(MEL_WINDOW, device=sound.device),
        pad_mode="reflect",
        return_complex=True,
    ).abs()
    mel = spectrum.transpose(1, 2) @ torch.from_numpy(filters.astype(np.float32)).to(sound.device)
    return mel.clamp(min=MIN_MAGNITUDE).log().view(*sound.shape[:2], -1, bins)
