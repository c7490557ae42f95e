"""Mel spectrograms of sound."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

WINDOW = 1024  # samples per Fourier transform; the audio VAE of LTX-2 is trained with it
MIN_MAGNITUDE = 1e-5


def log_mel(sound: Tensor, rate: int, hop: int, bins: int) -> Tensor:
    """Return the natural logarithm of the mel spectrogram of float32 sound [B, channels, samples].

    The result is float32 [B, channels, 1 + samples // hop, bins]. It equals the output of AudioProcessor in Lightricks'
    LTX-2 repository: magnitudes of windows with reflected ends, and filters of the Slaney mel scale from 0 to rate / 2.

    rate: samples per second. hop: samples between two windows.
    """
    filters = mel_filter_bank(WINDOW // 2 + 1, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    spectrum = torch.stft(
        sound.flatten(0, 1),
        WINDOW,
        hop_length=hop,
        window=torch.hann_window(WINDOW, device=sound.device),
        pad_mode="reflect",
        return_complex=True,
    ).abs()
    mel = spectrum.transpose(1, 2) @ torch.from_numpy(filters.astype(np.float32)).to(sound.device)
    return mel.clamp(min=MIN_MAGNITUDE).log().view(*sound.shape[:2], -1, bins)
