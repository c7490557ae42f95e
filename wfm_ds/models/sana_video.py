"""SANA-Video: SANA with a time axis, a video VAE, and an optional conditioning frame."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import diffusers
from diffusers.models.transformers.transformer_sana_video import SanaVideoTransformerBlock
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.models.assets.loading import read_json
from wfm_ds.models.conditioning_frames import CleanFrames, get_clean_frames
from wfm_ds.models.sana import PIPELINE_SIZE_MULTIPLE, Sana
from wfm_ds.models.vae import require_multiples
from wfm_ds.types import Conditioning


class SanaVideo(Sana):
    """SANA-Video. The network receives the timestep num_train_timesteps * sigma and returns the velocity.

    With conditioning frames, there is one timestep per token, which is 0 for tokens of conditioning frames.
    """

    family = "sana_video"
    pipeline_classes = ("SanaVideoPipeline", "SanaImageToVideoPipeline")
    block_classes = (SanaVideoTransformerBlock,)
    is_video = True
    conditioning_frame_counts = (0, 1)

    @classmethod
    def check_folder(cls, folder: Path) -> None:
        if read_json(folder / "model_index.json").get("vae") == ["diffusers", "AutoencoderDC"]:
            raise ModelError(
                f"{folder}: diffusers {diffusers.__version__} cannot load a SANA-Video pipeline with the VAE "
                "AutoencoderDC (it reads factors that its config lacks); use one with the Wan or LTX-2 VAE"
            )

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning, expert)
        time = sigma * self.pipeline.scheduler.config.num_train_timesteps
        clean_frames = get_clean_frames(conditioning)
        if clean_frames is None:
            return self.predict_velocity(latents, time, conditioning)
        token_times = self.token_timesteps(time, latents, clean_frames)
        velocity = self.predict_velocity(clean_frames.insert_clean_latents(latents), token_times, conditioning)
        return clean_frames.insert_known_velocity(velocity, latents, sigma)

    def token_timesteps(self, time: Tensor, latents: Tensor, clean_frames: CleanFrames) -> Tensor:
        """Return one timestep per patch, [batch, 1, latent frames, rows, columns].

        The timestep is 0 on conditioning frames and `time` on noisy frames. time: [batch].
        """
        count, _, *size = latents.shape
        frames, height, width = (n // patch for n, patch in zip(size, self.config.patch_size, strict=True))
        noisy = 1 - clean_frames.mask[:, :, :: self.config.patch_size[0]]
        return (time.view(-1, 1, 1, 1, 1) * noisy).expand(count, 1, frames, height, width)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return (channels, (F - 1) / k + 1, H / f, W / f) for F frames of H x W pixels.

        k and f are the VAE's temporal and spatial scale factors. The size of the network's rotary embedding table
        limits duration, height and width.
        """
        in_space, in_time = self.pipeline.vae_scale_factor_spatial, self.pipeline.vae_scale_factor_temporal
        patch_time, patch, _ = self.config.patch_size
        positions = self.config.rope_max_seq_len  # along each axis
        multiple = math.lcm(PIPELINE_SIZE_MULTIPLE, in_space * patch)
        largest = in_space * patch * positions // multiple * multiple
        require_multiples(height, width, multiple, largest)
        step, fewest = in_time * patch_time, in_time * (patch_time - 1) + 1
        most = fewest + step * (positions - 1)
        if (num_frames - fewest) % step or not fewest <= num_frames <= most:
            raise ValueError(f"num_frames must be {fewest}, {fewest + step}, ... or {most}, got {num_frames}")
        return (self.config.in_channels, (num_frames - 1) // in_time + 1, height // in_space, width // in_space)

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        call = super().pipeline_call_kwargs(w, height, width, num_frames)
        return call | {"frames": call.pop("num_frames")}
