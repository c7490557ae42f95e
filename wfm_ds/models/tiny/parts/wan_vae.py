"""A tiny video VAE: spatial factor 8, temporal factor 4, one mean and one std per channel."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diffusers import AutoencoderKLWan

from wfm_ds.models.base import temporary_seed

VAE_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0, 0.1, 0.2, 0.3],
        "latents_std": [1.0, 1.1, 1.2, 1.3],
    }
)


def wan_vae(seed: int, **config: Any) -> AutoencoderKLWan:
    """Return a VAE with 4 latent channels. `config` adds or replaces constructor arguments."""
    with temporary_seed(seed):
        return AutoencoderKLWan(**{**VAE_CONFIG, **config})
