"""Loss terms and their batches, the inputs of an algorithm's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from wfm_ds.sampling.shapes import free_frame_mask
from wfm_ds.types import ConditioningFrames, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One (sample, noise level) pair to train on. Host data; algorithms add their own fields."""

    row: int  # index of the sample among this rank's rollouts
    sigma: float
    weight: float  # 1, or 0 for padding that only keeps ranks equal
    num_parts: int = 1  # parts of its loss, each with its own forward and backward pass (LossTermBatch.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTermBatch:
    """B loss terms as float32 tensors: the inputs of a forward pass. Algorithms add the inputs of their loss."""

    latents: Tensor  # [B, ...], denoiser input
    sigma: Tensor  # [B]
    weight: Tensor  # [B]
    prompts: Sequence[Prompt]  # encoded at the forward pass, to avoid one copy per noise level
    conditioning_frames: ConditioningFrames | None = None
    group_statistics: Tensor | None = None  # [B], see RlAlgorithm.group_statistics

    @property
    def loss_mask(self) -> Tensor | None:
        """Return a mask [B,1,T,1,1], 0 on conditioning frames (excluded from losses). None without such frames."""
        return None if self.conditioning_frames is None else free_frame_mask(self.conditioning_frames)

    def parts(self) -> Sequence[LossTermBatch]:
        """Return one batch per forward and backward pass: only this one unless num_parts > 1.

        Every part has the weights [B] of all terms. The losses of the parts sum to the losses of the terms.
        """
        return [self]

    def reference_inputs(self) -> LossTermBatch:
        """Return the part of the batch that reference policies predict. Default: all of it."""
        return self
