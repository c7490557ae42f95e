"""The interface between the RL loop and an algorithm. Pure torch and numpy: no engine, no file, no collective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from wfm_ds.algorithms.advantages import Advantages, Rewards, step_advantages
from wfm_ds.algorithms.batch import Term, TermBatch
from wfm_ds.pinned import on_device
from wfm_ds.types import ConditionalFrames

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms import RlSettings
    from wfm_ds.recipe.algorithms.base import ModelFacts
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.sampling.denoise import Plan
    from wfm_ds.types import Rollout

TermT = TypeVar("TermT", bound=Term)
BatchT = TypeVar("BatchT", bound=TermBatch)
Stats: TypeAlias = dict[str, "Tensor | tuple[Tensor, Tensor]"]
"""Detached [B] by metric tag, or (value [B], mask [B]) where it counts for some terms only (meter.Meter)."""


class StepSamples(Protocol):
    """The samples of one RL step that this rank generated."""

    @property
    def mine(self) -> Sequence[Rollout]: ...

    @property
    def first(self) -> int:
        """Index of mine[0] among the samples of all ranks."""


class RlAlgorithm(ABC, Generic[TermT, BatchT]):
    """One algorithm for one recipe, on the rollout's grid. What it decides on the host is the same on every rank."""

    Settings: ClassVar[type[RlSettings]]
    """The recipe's section `algorithm`."""
    area: ClassVar[str]
    """The first word of the tags of its own metrics."""
    settings: RlSettings
    rollout_policy = "train"
    """The policy that denoises: the trained weights, or a copy."""
    references: tuple[str, ...] = ()
    """Policies whose predictions the loss gets beside the trained one's, in the order of their forwards: of `old`,
    `ref` and, where the recipe averages weights, `ema`. One is missing where its weights equal the trained ones: the
    loss detaches its own prediction."""
    recalls_old = False
    """`old` is no copy of the weights but the trained ones at the start of the RL step, asked before its first
    update."""

    surveys = False
    """The loss weighs its terms by sums over all terms of the optimizer step, which no micro-batch has: a pass without
    gradient asks `surveyed` of each term, adds up what has one `survey_key`, and puts it into `batch.survey`."""

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelFacts | None = None) -> None:
        """sigmas: the rollout grid [N+1] float64, descending to 0. model: the one that is trained; None where rollouts
        are only planned or counted. Raises RecipeError for what cannot work on the grid."""
        self.settings = recipe.rl.algorithm
        self.run_seed, self.sampling, self.grid = recipe.run.seed, recipe.sampling, sigmas
        given = self.settings.num_conditional_frames
        self.gives_frames = (given if model is None else model.pinned(given))[1] > 0

    @abstractmethod
    def plan(self, step: int) -> Plan:
        """Return how the rollouts of this RL step are denoised and which of their steps are stored."""

    def advantages(self, rewards: Rewards, groups: Sequence[str]) -> Advantages:
        """One for each sample of all ranks; None where it is not trained on."""
        return step_advantages(rewards, groups, self.settings)

    @abstractmethod
    def updates(self, rollouts: StepSamples, advantages: Sequence[float | None], step: int) -> list[list[TermT]]:
        """This rank's terms of each optimizer step, equally many of each `num_parts` on every rank; of weight 0 for a
        sample without an advantage. The loop drops what no rank needs for keeping its forwards equal to the others'."""

    def has_gradient(self, term: TermT, current: Set[str]) -> bool:
        """Tell if the term can move a weight while the policies `current` have the trained weights; this may say too
        often that it can. The loop leaves out terms that cannot, and counts them all the same."""
        return True

    @abstractmethod
    def assemble(self, terms: Sequence[TermT], rollouts: Sequence[Rollout], device: torch.device) -> BatchT:
        """The tensors of these terms; rollouts: this rank's."""

    def conditional_frames(self, samples: Sequence[Rollout], device: torch.device) -> ConditionalFrames | None:
        """Return the frames that these samples were given, for `assemble`; None in a run that gives none."""
        if not self.gives_frames:
            return None
        latents = torch.stack([sample.data for sample in samples if sample.data is not None])
        counts = torch.tensor([sample.num_conditional_frames for sample in samples])
        return ConditionalFrames(latents, on_device(counts, device))

    @abstractmethod
    def loss(self, velocity: Tensor, batch: BatchT, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        """The loss of each term [B], unreduced, and its statistics. velocity: at (latents, sigma), guided like the
        rollout, with gradient; references: theirs, by policy. Of a batch that is one of several parts: the part's share
        of the loss; `loss/total` of the parts is added up, any other statistic belongs to one of them."""

    def survey_key(self, term: TermT) -> str:
        """Return the name of the sum that the term is part of, and that its loss is told."""
        raise NotImplementedError

    def surveyed(self, velocity: Tensor, batch: BatchT, references: Mapping[str, Tensor]) -> Tensor:
        """Return the part of its sum [B] that each term is. velocity: of the weights before the step, without gradient;
        references: as in `loss`."""
        raise NotImplementedError

    def moves(self, step: int, num_updates: int) -> Mapping[str, float]:
        """Copies that follow the trained weights at the end of this RL step, after `num_updates` optimizer steps of the
        run: the d of `copy <- d*copy + (1-d)*theta`, by policy."""
        return {}

    def review(self, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of an optimizer step, and warn of what the user should know."""


def shared_out(num_samples: int, first: int, num_updates: int) -> list[list[int]]:
    """This rank's rows of each optimizer step: sample i of the RL step trains in update i mod U."""
    return [[row for row in range(num_samples) if (first + row) % num_updates == u] for u in range(num_updates)]
