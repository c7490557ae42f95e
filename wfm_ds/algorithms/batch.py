"""Loss terms and their batches, the inputs of an algorithm's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from wfm_ds.sampling.shapes import free_frame_mask
from wfm_ds.types import ConditioningFrames, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One (sample, noise level) pair to train on, without tensors. Each algorithm adds its own fields."""

    row: int  # index of the sample among this rank's rollouts
    sigma: float
    weight: float  # 1; 0 for padding, so that all ranks run equal forward passes
    num_parts: int = 1  # forward and backward passes that its loss needs (LossTermBatch.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTermBatch:
    """The inputs of a forward pass for B loss terms, in float32. Each algorithm adds the inputs of its loss."""

    latents: Tensor  # [B, ...], denoiser input
    sigma: Tensor  # [B]
    weight: Tensor  # [B]
    prompts: Sequence[Prompt]  # encoded at the forward pass, to avoid one copy per noise level
    conditioning_frames: ConditioningFrames | None = None
    group_statistics: Tensor | None = None  # [B], see RlAlgorithm.group_statistics

    @property
    def loss_mask(self) -> Tensor | None:
        """Mask [B,1,T,1,1]: 0 on conditioning frames, which losses exclude, else 1; None without conditioning."""
        return None if self.conditioning_frames is None else free_frame_mask(self.conditioning_frames)

    def parts(self) -> Sequence[LossTermBatch]:
        """Return one batch for each forward and backward pass: only `self` unless num_parts > 1.

        Each batch has the weights [B] of all loss terms. The loss of a term is the sum of its losses in all batches.
        """
        return [self]

    def reference_inputs(self) -> LossTermBatch:
        """Return a batch with only the inputs for reference policies. Default: the whole batch."""
        return self
