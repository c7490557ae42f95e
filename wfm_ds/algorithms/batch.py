"""The terms and batches that a training loop hands to an algorithm's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from wfm_ds.sampling.shapes import free_frames
from wfm_ds.types import ConditionalFrames, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One (sample, noise level) pair to train on, decided on the host; algorithms add fields of their own."""

    row: int  # of the sample among this rank's rollouts
    sigma: float
    weight: float  # 1, or 0 for a term that only keeps ranks equal
    num_parts: int = 1  # of its loss, each with a forward and backward of its own (TermBatch.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TermBatch:
    """B terms as tensors, float32: what a forward needs. Algorithms add what their loss needs."""

    latents: Tensor  # [B, ...], what the denoiser is asked about
    sigma: Tensor  # [B]
    weight: Tensor  # [B]
    prompts: Sequence[Prompt]  # embedded when a forward needs them: a term for each noise level would hold a copy
    conditional_frames: ConditionalFrames | None = None  # of these samples
    survey: Tensor | None = None  # [B], the sums that RlAlgorithm.surveys asks for

    @property
    def free(self) -> Tensor | None:
        """[B,1,T,1,1], 0 on conditional frames: what losses leave out. None where nothing is ever given."""
        return None if self.conditional_frames is None else free_frames(self.conditional_frames)

    def parts(self) -> Sequence[TermBatch]:
        """Return what each forward and backward is about: all of it, unless the terms have more parts than one.

        All parts have the weights [B] of all terms, and their losses add up to those of the terms.
        """
        return [self]

    def for_references(self) -> TermBatch:
        """Return the part that other policies predict for the loss: all of it, unless an algorithm says less."""
        return self
