"""Loss terms and their batches, the inputs of an algorithm's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from wfm_ds.sampling.shapes import free_frame_mask
from wfm_ds.types import ConditioningFrames, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One (sample, noise level) pair to train on. Holds no tensors. Each algorithm adds its own fields."""

    row: int  # index of the sample among this rank's rollouts
    sigma: float
    weight: float  # 1, or 0 for padding that only keeps ranks equal
    num_parts: int = 1  # parts of its loss, each with its own forward and backward pass (LossTermBatch.parts)


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
        """Return a mask [B,1,T,1,1]: 0 on conditioning frames, which losses exclude, and 1 elsewhere.

        Returns None if there are no conditioning frames.
        """
        return None if self.conditioning_frames is None else free_frame_mask(self.conditioning_frames)

    def parts(self) -> Sequence[LossTermBatch]:
        """Return one batch for each forward and backward pass. This is only `self` unless num_parts > 1.

        Every part has the weights [B] of all terms. The loss of a term is the sum of its losses in all parts.
        """
        return [self]

    def reference_inputs(self) -> LossTermBatch:
        """Return a batch with only the inputs that reference policies predict. Default: the whole batch."""
        return self
