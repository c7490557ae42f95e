"""`python -m wfm_reward.decoder`: videos of latents that HTTP clients sent. Started by serve.py, as scorers are.

A decoded clip is too large to travel back in a message: it is left in a file of the service's private folder, and the
answer is its path.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_ds.errors import RewardError
from wfm_ds.pipes.wire import Array
from wfm_ds.pipes.worker import Progress, TaskFailed, TaskInHand
from wfm_reward.program import Work, run

STALL_S = 600.0
VIDEO_FILES = "video-*.npy"


def load(settings: Mapping[str, Any]) -> Work:
    """Raises RewardError if the VAE is not there or has another number of channels."""
    return Work(
        Decoder(**{key: settings[key] for key in ("vae", "device", "dtype", "channels", "folder")}).tasks, STALL_S
    )


class Decoder:
    """A Wan VAE (2.1: 16 channels, 2.2: 48) of diffusers."""

    def __init__(self, vae: str, device: str, dtype: str, channels: int, folder: str) -> None:
        import torch
        from diffusers import AutoencoderKLWan

        path = Path(vae).expanduser()
        try:
            part = {"subfolder": "vae"} if (path / "vae").is_dir() else {}
            self._vae: Any = AutoencoderKLWan.from_pretrained(str(path), torch_dtype=getattr(torch, dtype), **part)
        except (OSError, ValueError) as error:
            raise RewardError(f"latent_decoders.{channels}.vae: {vae} cannot be loaded: {error}") from error
        if self._vae.config.z_dim != channels:
            raise RewardError(f"latent_decoders.{channels}.vae: {vae} has {self._vae.config.z_dim} channels")
        self._vae.to(device).eval().requires_grad_(False)
        self._folder = Path(folder)

    def tasks(self, tasks: Sequence[TaskInHand], progress: Progress) -> list[Mapping[str, Any] | TaskFailed]:
        """For each task {"videos": [[path, failure, {}], ...]} of its latents [C,T,h,w] float16 or float32."""
        answers: list[Mapping[str, Any] | TaskFailed] = []
        for number, task in enumerate(tasks, start=1):
            answers.append({"videos": [self._answer(latents) for latents in task.tensors()]})
            progress(number, len(tasks))
        return answers

    def _answer(self, latents: Array) -> list[Any]:
        if not np.isfinite(latents).all():
            return [None, "latents are not finite", {}]
        path = self._folder / VIDEO_FILES.replace("*", uuid.uuid4().hex)
        np.save(path, self.decode(latents), allow_pickle=False)
        return [str(path), None, {}]

    def decode(self, latents: Array) -> npt.NDArray[np.uint8]:
        """uint8 [T,H,W,3] of latents [C,T,h,w] that are normalised channel by channel."""
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
    sys.exit(run(load))
