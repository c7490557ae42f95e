"""FLOPs of the denoiser per sample, and FLOPs of all forward passes of a recipe."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wfm_ds.engine.flop_counter import Flops, copy_to_meta, measure_flops
from wfm_ds.memory.forward_counts import ForwardCount
from wfm_ds.models.base import DiffusionModel


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    forward: int
    backward: int = 0
    recompute: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recompute


def count_flops(
    model: DiffusionModel,
    latent_shape: Sequence[int],
    conditioning: Mapping[str, Tensor],
    *,
    checkpointing: bool = False,
) -> Flops:
    """Return the denoiser's FLOPs for one sample, with its current adapters and requires_grad flags.

    latent_shape: latent shape of the sample, without batch dimension.
    conditioning: conditioning tensors of the sample, each [1, ...]. Only their shapes and dtypes are used.
    checkpointing: include the recomputation of block activations in the backward pass.
    """
    shadow = copy.copy(model)
    shadow.denoiser = copy_to_meta(model.unwrapped_denoiser)
    latents, sigma = torch.empty(1, *latent_shape, device="meta"), torch.empty(1, device="meta")
    inputs = {name: torch.empty_like(tensor, device="meta") for name, tensor in conditioning.items()}
    extra_shapes = model.input_shapes(latent_shape)
    inputs |= {name: torch.empty(1, *shape, device="meta") for name, shape in extra_shapes.items()}
    return measure_flops(
        shadow.denoiser,
        lambda: shadow.denoise(latents, sigma, inputs, 0),  # all experts have the same architecture
        checkpointing=checkpointing,
    )


def flops_by_purpose(forwards: Mapping[str, ForwardCount], flops: Flops) -> dict[str, ForwardFlops]:
    """Return {purpose: FLOPs} of forward passes. Only the purpose `policy` includes backward passes.

    flops: FLOPs of one sample.
    """
    work = {}
    for purpose, f in forwards.items():
        with_adapters = f.samples - f.without_adapters
        forward = with_adapters * flops.forward + f.without_adapters * flops.forward_without_adapters
        num_backward = f.samples if purpose == "policy" else 0
        work[purpose] = ForwardFlops(forward, num_backward * flops.backward, num_backward * flops.recompute)
    return work
