"""`python -m wfm_reward.decoder`: process of the reward service that decodes latents of HTTP clients to video files."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_ds.errors import RewardError
from wfm_ds.storage.filesystem import read_regular
from wfm_ds.transport.wire import Array
from wfm_ds.transport.worker import LeasedTask, ReportProgress, TaskFailed
from wfm_reward.worker_process import WorkerSetup, run_worker

STALL_S = 600.0
VIDEO_FILES = "video-*.npy"


def load_decoder(settings: Mapping[str, Any]) -> WorkerSetup:
    return WorkerSetup(
        LatentDecoder(**{key: settings[key] for key in ("vae", "device", "dtype", "channels", "folder")}).decode_tasks,
        STALL_S,
    )


@dataclass(frozen=True, slots=True)
class VaeScale:
    """Compression factors of a VAE: size of the video divided by size of the latents."""

    temporal: int
    spatial: int

    @classmethod
    def from_vae_config(cls, channels: int, vae: str) -> VaeScale:
        """Read the factors from the VAE's config.json. Raises RewardError if it cannot be read."""
        path = vae_folder(vae) / "config.json"
        try:
            content = json.loads(read_regular(path))
            # Defaults of diffusers' AutoencoderKLWan.
            return cls(int(content.get("scale_factor_temporal", 4)), int(content.get("scale_factor_spatial", 8)))
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RewardError(f"latent_decoders.{channels}.vae: {path} cannot be read: {error}") from error

    def video_bytes(self, shape: Sequence[int]) -> int:
        """Return the size in bytes of the uint8 RGB video that latents [C,T,h,w] decode to."""
        _, frames, height, width = shape
        return ((frames - 1) * self.temporal + 1) * height * self.spatial * width * self.spatial * 3


def vae_folder(vae: str) -> Path:
    path = Path(vae).expanduser()
    return path / "vae" if (path / "vae").is_dir() else path


class LatentDecoder:
    """Decodes latents with a Wan VAE of diffusers (2.1: 16 channels, 2.2: 48)."""

    def __init__(self, vae: str, device: str, dtype: str, channels: int, folder: str) -> None:
        import torch
        from diffusers import AutoencoderKLWan

        try:
            folder_of_vae = str(vae_folder(vae))
            self._vae: Any = AutoencoderKLWan.from_pretrained(folder_of_vae, torch_dtype=getattr(torch, dtype))
        except (OSError, ValueError) as error:
            raise RewardError(f"latent_decoders.{channels}.vae: {vae} cannot be loaded: {error}") from error
        if self._vae.config.z_dim != channels:
            raise RewardError(f"latent_decoders.{channels}.vae: {vae} has {self._vae.config.z_dim} channels")
        self._vae.to(device).eval().requires_grad_(False)
        self._folder = Path(folder)

    def decode_tasks(
        self, tasks: Sequence[LeasedTask], progress: ReportProgress
    ) -> list[Mapping[str, Any] | TaskFailed]:
        """Decode the latents [C,T,h,w] (float16 or float32) of each task and write the videos to files.

        Returns {"videos": [[path, failure, {}], ...]} for each task. Either the path or the failure is None.
        """
        replies: list[Mapping[str, Any] | TaskFailed] = []
        for number, task in enumerate(tasks, start=1):
            replies.append({"videos": [self._decode_to_file(latents) for latents in task.read_tensors()]})
            progress(number, len(tasks))
        return replies

    def _decode_to_file(self, latents: Array) -> list[Any]:
        if not np.isfinite(latents).all():
            return [None, "latents are not finite", {}]
        path = self._folder / VIDEO_FILES.replace("*", uuid.uuid4().hex)
        np.save(path, self.decode_latents(latents), allow_pickle=False)
        return [str(path), None, {}]

    def decode_latents(self, latents: Array) -> npt.NDArray[np.uint8]:
        """Decode latents [C,T,h,w] to a uint8 video [T frames,H,W,3].

        The latents must be normalized per channel with the VAE's statistics.
        """
        import torch

        config, device, dtype = self._vae.config, self._vae.device, self._vae.dtype
        mean, std = (
            torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        with torch.inference_mode():
            z = torch.from_numpy(latents.astype(np.float32))[None].to(device) * std + mean
            pixels = self._vae.decode(z.to(dtype), return_dict=False)[0][0]  # [3,T,H,W] in -1 to 1
            video = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        frames: npt.NDArray[np.uint8] = video.permute(1, 2, 3, 0).cpu().numpy()
        return frames


if __name__ == "__main__":
    sys.exit(run_worker(load_decoder))
