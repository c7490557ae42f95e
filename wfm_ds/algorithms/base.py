"""Interface between the RL loop and an algorithm. Pure torch and numpy: no engine, files or collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from wfm_ds.algorithms.advantages import Advantages, Rewards, compute_advantages
from wfm_ds.algorithms.batch import LossTerm, LossTermBatch
from wfm_ds.pinned_memory import copy_to_device
from wfm_ds.types import ConditioningFrames

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms import RlSettings
    from wfm_ds.recipe.algorithms.base import ModelProperties
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.sampling.denoise import SamplingPlan
    from wfm_ds.types import Rollout

TermT = TypeVar("TermT", bound=LossTerm)
BatchT = TypeVar("BatchT", bound=LossTermBatch)
Stats: TypeAlias = dict[str, "Tensor | tuple[Tensor, Tensor]"]
"""Detached values [B] by metric tag, or (value [B], mask [B]) if only some terms count (meter.Meter)."""


class StepSamples(Protocol):
    """The samples of one RL step on this rank."""

    @property
    def local_rollouts(self) -> Sequence[Rollout]: ...

    @property
    def first_index(self) -> int:
        """Return the index of local_rollouts[0] among the samples of all ranks."""


class RlAlgorithm(ABC, Generic[TermT, BatchT]):
    """An RL algorithm for one recipe and its rollout noise levels.

    Decisions on the host are identical on every rank.
    """

    Settings: ClassVar[type[RlSettings]]
    """Settings class of the recipe section `algorithm`."""
    area: ClassVar[str]
    """Prefix of the algorithm's metric tags."""
    settings: RlSettings
    rollout_policy = "train"
    """The policy that generates rollouts: `train` or the name of a copy."""
    references: tuple[str, ...] = ()
    """Policies that the loss compares against, in the order of their forward passes: `old`, `ref`, or `ema` (if the
    recipe has one). A policy is omitted from the loss's `references` while its weights equal the trained ones; the loss
    then uses its own detached prediction."""
    uses_old_predictions = False
    """Whether `old` predictions come from the trained weights before the first update of the RL step, instead of from a
    copy of the weights."""

    uses_group_statistics = False
    """Whether the loss needs sums over groups of terms that span micro-batches and ranks. If True, the loop calls
    `group_statistics` on every micro-batch before the first backward pass, without gradients. It sums the results per
    group over all ranks and stores each term's sum in `batch.group_statistics`."""

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> None:
        """sigmas: noise levels of rollouts, [N+1] float64, descending to 0.

        model: the model to train; None if rollouts are only planned or counted. Raises RecipeError for settings that
        these noise levels do not support.
        """
        self.settings = recipe.rl.algorithm
        self.run_seed, self.sampling, self.grid = recipe.run.seed, recipe.sampling, sigmas
        num_frames = self.settings.conditioning_frame_range
        self.uses_conditioning_frames = (num_frames if model is None else model.clean_frame_range(num_frames))[1] > 0

    @abstractmethod
    def plan(self, step: int) -> SamplingPlan:
        """Return the sampling plan of this RL step: how rollouts are denoised and which steps are stored."""

    def compute_advantages(self, rewards: Rewards, groups: Sequence[str]) -> Advantages:
        """Return one advantage per sample of all ranks; None for samples that are not trained on."""
        return compute_advantages(rewards, groups, self.settings)

    @abstractmethod
    def updates(self, rollouts: StepSamples, advantages: Sequence[float | None], step: int) -> list[list[TermT]]:
        """Return this rank's loss terms for each optimizer step.

        Every rank must return the same number of terms with each value of `num_parts`. Terms of samples without an
        advantage have weight 0; the loop drops them unless they are needed for padding.
        """

    def has_gradient(self, term: TermT, equal_policies: Set[str]) -> bool:
        """Return False if the gradient of the term is known to be zero, else True.

        equal_policies: names of the policies that equal the trained policy. The loop skips terms without gradient but
        still counts them in the loss denominator.
        """
        return True

    @abstractmethod
    def assemble(self, terms: Sequence[TermT], rollouts: Sequence[Rollout], device: torch.device) -> BatchT:
        """Build the batch of these terms. rollouts: all rollouts of this rank."""

    def conditioning_frames(self, samples: Sequence[Rollout], device: torch.device) -> ConditioningFrames | None:
        """Return the conditioning frames of these samples, for `assemble`. None in runs without conditioning frames."""
        if not self.uses_conditioning_frames:
            return None
        latents = torch.stack([sample.data_latents for sample in samples if sample.data_latents is not None])
        counts = torch.tensor([sample.num_conditioning_frames for sample in samples])
        return ConditioningFrames(latents, copy_to_device(counts, device))

    @abstractmethod
    def loss(self, velocity: Tensor, batch: BatchT, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        """Return the unreduced loss of each term, [B], and statistics.

        velocity: prediction at (latents, sigma) with the guidance of the rollout, with gradient. references:
        predictions of the reference policies by name. If `batch` is one of several parts, return only this part's
        contribution to the loss. The loop sums `loss/total` over parts; every other statistic must come from one part
        only.
        """

    def group_statistics(
        self, terms: Sequence[TermT], velocity: Tensor, batch: BatchT, references: Mapping[str, Tensor]
    ) -> tuple[Sequence[str], Tensor]:
        """Return the id of each term's group, and the value that each term adds to the sum of its group, [B].

        Only called if `uses_group_statistics`. velocity: prediction of the weights before the optimizer step, without
        gradient. references: as in `loss`.
        """
        raise NotImplementedError

    def policy_decays(self, step: int, num_updates: int) -> Mapping[str, float]:
        """Return the decay d of each policy copy to update at the end of this RL step, by name.

        The update is copy <- d*copy + (1-d)*trained weights. num_updates: optimizer steps of the run so far.
        """
        return {}

    def check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log warnings about the metrics of an optimizer step."""


def split_rows_over_updates(num_samples: int, first_index: int, num_updates: int) -> list[list[int]]:
    """Return the indices of this rank's samples that each optimizer step trains.

    Sample i of all ranks is trained in optimizer step i mod num_updates. first_index: i of this rank's first sample.
    """
    return [[row for row in range(num_samples) if (first_index + row) % num_updates == u] for u in range(num_updates)]
