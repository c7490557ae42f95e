"""Fused pointwise operators for flow-matching training: Triton on CUDA, eager torch on other devices."""

from wfm_kernels.coefficients import sde_coefficients
from wfm_kernels.noise import NOISE_CONTRACT
from wfm_kernels.ops import NftLoss, SdeStep, flow_noise, nft_loss, quantise_rows, sde_log_prob, sde_step

__all__ = [
    "NOISE_CONTRACT",
    "NftLoss",
    "SdeStep",
    "flow_noise",
    "nft_loss",
    "quantise_rows",
    "sde_coefficients",
    "sde_log_prob",
    "sde_step",
]
