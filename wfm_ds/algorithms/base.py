"""Interface between the RL loop and an algorithm."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from wfm_ds.algorithms.advantages import Advantages, Array, Rewards, compute_advantages
from wfm_ds.recipe.algorithms import RlSettings, RolloutSettings
from wfm_ds.sampling.latents import StreamWeights, free_frame_mask
from wfm_ds.sampling.plan import apply_shift, plan_without_window
from wfm_ds.seeds import draw_permutation, draw_uniform
from wfm_ds.tensor_memory import copy_to_device
from wfm_ds.types import DEFAULT_ADAPTER, ConditioningFrames, Prompt

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelProperties
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.sampling.denoise import SamplingPlan
    from wfm_ds.types import Rollout

Stats: TypeAlias = dict[str, "Tensor | tuple[Tensor, Tensor]"]
"""Metrics of B loss terms: {tag: detached values [B]}, or {tag: (values [B], mask [B])} if only some terms count."""
QUANTILE_MARGIN = 2.0**-33  # random draws keep this distance from 0 and 1: the velocity at sigma 0 cannot be learned


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One (sample, noise level) pair to train on. Each algorithm adds its own fields."""

    row: int  # index of the sample among this rank's rollouts
    sigma: float
    weight: float  # 1, or 0 for padding terms, with which all ranks run the same number of forward passes
    num_parts: int = 1  # number of forward and backward passes that the loss needs (LossTermBatch.parts)
    teacher: int = 0  # index of the teacher that the loss needs; all terms of a micro-batch have the same teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTermBatch:
    """Inputs of a forward pass for B loss terms, in float32. Each algorithm adds the inputs of its loss."""

    latents: Tensor  # [B, ...], denoiser input
    sigma: Tensor  # [B]
    weight: Tensor  # [B]
    prompts: Sequence[Prompt]  # encoded just before the forward pass, so that embeddings are not stored per noise level
    conditioning_frames: ConditioningFrames | None = None
    group_statistics: Tensor | None = None  # [B], see RlAlgorithm.group_statistics
    passes: Mapping[str, Tensor] = field(default_factory=dict)
    """{guidance pass: its prediction [B, ...] by the trained policy before this optimizer step}. Empty: training runs
    these passes itself."""
    stream_weights: StreamWeights | None = None  # see RlAlgorithm.stream_weights

    @property
    def loss_mask(self) -> Tensor | None:
        """Weights of the elements in means over a sample (see sample_mean): `frame_mask`, or [1,N] for several streams.

        None: all elements have equal weights.
        """
        if self.stream_weights is not None:
            return self.stream_weights.element_weights(self.latents.device)
        return self.frame_mask

    @property
    def frame_mask(self) -> Tensor | None:
        """Mask [B,1,T,1,1]: 0 on conditioning frames, 1 on other frames. None in runs without conditioning frames."""
        return None if self.conditioning_frames is None else free_frame_mask(self.conditioning_frames)

    def parts(self) -> Sequence[LossTermBatch]:
        """Return one batch for each forward and backward pass that the loss needs. The default is a single pass.

        The loss of a term is the sum of its losses in all batches. Every batch has the weights [B] of all loss terms.
        """
        return [self]

    def reference_inputs(self) -> LossTermBatch:
        """Return a batch with only the inputs for reference policies. The default is the whole batch."""
        return self


TermT = TypeVar("TermT", bound=LossTerm)
BatchT = TypeVar("BatchT", bound=LossTermBatch)


class StepSamples(Protocol):
    """This rank's samples of one RL step."""

    @property
    def local_rollouts(self) -> Sequence[Rollout]: ...

    @property
    def first_index(self) -> int:
        """Index of local_rollouts[0] among the samples of all ranks."""


class RlAlgorithm(ABC, Generic[TermT, BatchT]):
    """Base class of RL algorithms. Results that do not depend on this rank's samples must be equal on every rank."""

    Settings: ClassVar[type[RolloutSettings]]
    """Class of the recipe section `algorithm`, a subclass of `base_settings`."""
    base_settings: ClassVar[type[RolloutSettings]] = RlSettings
    area: ClassVar[str] = "algorithm"
    """Prefix of the algorithm's metric tags."""
    settings: RolloutSettings
    rollout_policy = "train"
    """Policy that generates rollouts: `train` or the name of a policy copy."""
    references: tuple[str, ...] = ()
    """Policies that the loss compares with the trained policy (`old`, `ref`, `ema`), in the order of forward passes.

    While a policy has the trained weights, the argument `references` of `loss` does not contain the policy's
    prediction. The loss then uses the detached prediction of the trained policy instead.
    """
    reference_weights: Mapping[str, str] = MappingProxyType({})
    """{reference: engine policy that has its weights}. A reference that is missing here has the name of its policy."""
    reference_guidance: Mapping[str, float] = MappingProxyType({})
    """{reference: guidance scale}. References that are missing here use the guidance scale of the rollout."""
    num_teachers = 1
    """Number of teachers. Each loss term uses one of them (LossTerm.teacher)."""
    uses_old_predictions = False
    """Whether `old` predictions come from the trained weights at the start of the RL step, not from a policy copy."""

    advantage_transform: Callable[[Array], Array] | None = None
    """Elementwise function that is applied to the advantages before they are clipped."""
    keeps_passes = False
    """Whether rollouts keep the predictions of their guidance passes for the first optimizer step."""
    uses_group_statistics = False
    """Whether the loss of a term depends on sums over its group, which the trainer computes with `group_statistics`."""

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> None:
        """sigmas: [N+1] float64, descending: the noise levels of the N rollout steps and a final 0.

        model: properties of the model to train; None if rollouts are only planned or counted. Raises RecipeError for
        settings that these noise levels do not support.
        """
        self.settings = recipe.rl.algorithm
        self.advantage_settings = self.settings.advantages
        self.num_selected, self.drops_zero_std = self.settings.num_selected, self.settings.drops_zero_std
        self.run_seed, self.sampling, self.grid = recipe.run.seed, recipe.sampling, sigmas
        num_frames = self.settings.conditioning_frame_range
        sizes = {} if model is None else model.stream_sizes(recipe.sampling)
        self.stream_weights = choose_stream_weights(getattr(self.settings, "stream_weights", "elements"), sizes)
        self.uses_conditioning_frames = (num_frames if model is None else model.clean_frame_range(num_frames))[1] > 0

    @functools.cached_property
    def noisy_table(self) -> Tensor:
        """FlowPlan.table with noise at every step, whatever the window of the recipe is."""
        return plan_without_window(self.sampling, self.grid).table

    @abstractmethod
    def plan(self, step: int) -> SamplingPlan:
        """Return the sampling plan of RL step `step`."""

    def initial_equal_policies(self, recipe: Recipe) -> set[str]:
        """Return the policies that are known to have the trained weights before the first update of a run."""
        if recipe.lora is not None and recipe.lora.init_from is not None:
            return {self.rollout_policy} - {"ref"}  # ref is the base model, without the LoRA that the run starts from
        return {self.rollout_policy}

    def needs_reference(self, term: TermT, reference: str) -> bool:
        """Return whether the loss of this term needs the prediction of the policy `reference`.

        Terms with the same teacher in the same optimizer step must need the same references.
        """
        return True

    def choose_adapter(self, step: int, update: int) -> str:
        """Return the adapter that optimizer step `update` (from 0) of RL step `step` trains.

        `default` is the adapter that the run exports. In runs without LoRA, `default` means all weights.
        """
        return DEFAULT_ADAPTER

    def compute_advantages(self, rewards: Rewards, groups: Sequence[str]) -> Advantages:
        """Return one advantage per sample of all ranks; None for samples that are not trained on.

        If the algorithm uses no rewards, advantages are 0, or None for failed samples.
        """
        if self.advantage_settings is None:
            return Advantages([None if total is None else 0.0 for total in rewards.totals], {})
        return compute_advantages(
            rewards,
            groups,
            self.advantage_settings,
            num_selected=self.num_selected,
            drops_zero_std=self.drops_zero_std,
            transform=self.advantage_transform,
        )

    @abstractmethod
    def updates(self, rollouts: StepSamples, advantages: Sequence[float | None], step: int) -> list[list[TermT]]:
        """Return this rank's loss terms for each optimizer step.

        For each optimizer step and each value of `LossTerm.num_parts`, all ranks must return the same number of terms.
        Terms of samples without an advantage have weight 0.
        """

    def has_gradient(self, term: TermT, equal_policies: Set[str]) -> bool:
        """Return False if the gradient of the loss term is known to be zero, else True.

        equal_policies: names of the policies that have the trained weights.
        """
        return True

    @abstractmethod
    def assemble(self, terms: Sequence[TermT], rollouts: Sequence[Rollout], device: torch.device) -> BatchT:
        """Build the batch of these loss terms. rollouts: all rollouts of this rank."""

    def conditioning_frames(self, samples: Sequence[Rollout], device: torch.device) -> ConditioningFrames | None:
        """Return the conditioning frames of these samples; None in runs without conditioning frames."""
        if not self.uses_conditioning_frames:
            return None
        latents = torch.stack([sample.data_latents for sample in samples if sample.data_latents is not None])
        counts = torch.tensor([sample.num_conditioning_frames for sample in samples])
        return ConditioningFrames(latents, copy_to_device(counts, device))

    @abstractmethod
    def loss(self, velocity: Tensor, batch: BatchT, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        """Return (unreduced loss of each loss term [B], statistics).

        velocity: prediction at (batch.latents, batch.sigma) with the guidance of the rollout, with gradient.
        references: {policy: prediction}. If `LossTermBatch.parts` returned several batches, return only the
        contribution of `batch` to the loss and to the statistic `loss/total`, and return every other statistic for only
        one of these batches.
        """

    def group_statistics(
        self, terms: Sequence[TermT], velocity: Tensor, batch: BatchT, references: Mapping[str, Tensor]
    ) -> tuple[Sequence[str], Tensor]:
        """Return the group id of each of the B loss terms, and the value [B] that each term adds to its group's sum.

        Called only if `uses_group_statistics`. velocity: prediction before the optimizer step, without gradient.
        references: as in `loss`.
        """
        raise NotImplementedError

    def policy_decays(self, step: int, num_updates: int) -> Mapping[str, float]:
        """Return {policy: decay d} for the policy copies that are updated at the end of this RL step.

        The update is copy <- d*copy + (1-d)*trained weights. num_updates: optimizer steps of the run so far.
        """
        return {}

    def check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log warnings about the metrics of an optimizer step."""


def choose_stream_weights(
    setting: Literal["equal", "elements"] | Mapping[Any, float], sizes: Mapping[str, int]
) -> StreamWeights | None:
    """Return the weights of the model's streams in means over a sample. None: all elements have equal weights.

    setting: algorithm.stream_weights. sizes: {stream: number of elements}, {} for a single stream.
    """
    if not sizes or setting == "elements":
        return None
    weights = [1.0 if isinstance(setting, str) else setting.get(name, 1.0) for name in sizes]
    return StreamWeights(tuple(sizes.values()), tuple(weight / sum(weights) for weight in weights))


def split_over_updates(
    samples: StepSamples, advantages: Sequence[float | None], num_updates: int
) -> list[list[tuple[int, Rollout, float | None]]]:
    """Split this rank's samples over the optimizer steps of an RL step.

    Returns one list of (index in local_rollouts, sample, advantage) per optimizer step. Sample i of all ranks is
    trained in optimizer step i mod num_updates. advantages: one per sample of all ranks.
    """
    first = samples.first_index
    rows = [(row, sample, advantages[first + row]) for row, sample in enumerate(samples.local_rollouts)]
    return [[part for part in rows if (first + part[0]) % num_updates == update] for update in range(num_updates)]


def draw_steps(num_steps: int, count: int, seed: int) -> list[int]:
    """Return `count` different steps from 0 to num_steps - 1 in random order."""
    return draw_permutation(num_steps, seed, "trained_steps")[:count]


def draw_stratified_sigmas(num_levels: int, shift: float, run_seed: int, *key: int | str) -> list[float]:
    """Draw num_levels noise levels, ascending and rounded to float32. Equal arguments give equal levels.

    One number is drawn from each of num_levels equal parts of (0, 1). The timestep shift converts the number to a noise
    level.
    """
    draws = [(part + draw_uniform(run_seed, "train_sigma", *key, part)) / num_levels for part in range(num_levels)]
    q = torch.tensor(draws, dtype=torch.float64).clamp(QUANTILE_MARGIN, 1 - QUANTILE_MARGIN)
    return apply_shift(q, shift).float().tolist()
