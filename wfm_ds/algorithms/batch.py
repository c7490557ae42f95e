"""Loss terms and their batches, the inputs of an algorithm's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from wfm_ds.sampling.shapes import free_frames
from wfm_ds.types import ConditionalFrames, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One (sample, noise level) pair to train on. Host data; algorithms add their own fields."""

    row: int  # index of the sample among this rank's rollouts
    sigma: float
    weight: float  # 1, or 0 for padding that only keeps ranks equal
    num_parts: int = 1  # parts of its loss, each with its own forward and backward pass (LossTermBatch.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TermBatch:
    """B loss terms as float32 tensors: the inputs of a forward pass. Algorithms add the inputs of their loss."""

    latents: Tensor  # [B, ...], denoiser input
    sigma: Tensor  # [B]
    weight: Tensor  # [B]
    prompts: Sequence[Prompt]  # encoded at the forward pass, to avoid one copy per noise level
    conditional_frames: ConditionalFrames | None = None
    group_statistics: Tensor | None = None  # [B], see RlAlgorithm.group_statistics

    @property
    def free(self) -> Tensor | None:
        """Return a mask [B,1,T,1,1], 0 on conditioning frames (excluded from losses). None without such frames."""
        return None if self.conditional_frames is None else free_frames(self.conditional_frames)

    def parts(self) -> Sequence[TermBatch]:
        """Return one batch per forward and backward pass: only this one unless num_parts > 1.

        Every part has the weights [B] of all terms. The losses of the parts sum to the losses of the terms.
        """
        return [self]

    def for_references(self) -> TermBatch:
        """Return the part of the batch that reference policies predict. Default: all of it."""
        return self
