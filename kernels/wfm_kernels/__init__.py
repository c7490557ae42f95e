"""Fused pointwise operators for flow-matching training: Triton on CUDA, eager torch on other devices."""

from wfm_kernels.coefficients import sde_coefficients
from wfm_kernels.norms import MAX_NORM_ROW, adaptive_layer_norm, adaptive_rms_norm, gate_residual, rms_norm
from wfm_kernels.ops import NftLoss, SdeStep, flow_noise, nft_loss, quantise_rows, sde_log_prob, sde_step
from wfm_kernels.torch_backend import NOISE_CONTRACT

__all__ = [
    "MAX_NORM_ROW",
    "NOISE_CONTRACT",
    "NftLoss",
    "SdeStep",
    "adaptive_layer_norm",
    "adaptive_rms_norm",
    "flow_noise",
    "gate_residual",
    "nft_loss",
    "quantise_rows",
    "rms_norm",
    "sde_coefficients",
    "sde_log_prob",
    "sde_step",
]
