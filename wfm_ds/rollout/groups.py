"""Groups and samples of an RL step. Group ids, sample ids and seeds are identical on every rank."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.algorithms.advantages import group_variance
from wfm_ds.data.order import PromptOrder
from wfm_ds.data.prompt_weights import RewardStdTable, Weights, draw_prompts
from wfm_ds.data.samples import pack_prompt
from wfm_ds.rollout.rewards import Scores
from wfm_ds.sampling.denoise import Trajectory
from wfm_ds.seeds import derive_seed
from wfm_ds.types import ConditioningFrames, Prompt, Rollout, Score, Transition

if TYPE_CHECKING:
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.runs.job import Job

log = logging.getLogger(__name__)

Images: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Prompt and data that all samples of a group share.

    If `history_seeds` is not empty, the rollout policy first generates other clips, and the samples continue the last
    of them. Before that, the inputs of `prompt`, such as actions, cover all clips, and `data` starts with the
    conditioning frames of the first clip. Afterwards, `prompt` and `data` are for the clip of the samples only.
    """

    prompt: Prompt
    data: Tensor | None = None  # clean latents [C,...] float32 of the captioned sample, on replicas that need them
    num_conditioning_frames: int = 0  # number of latent frames at the start of `data` that condition the samples
    history_seeds: tuple[int, ...] = ()  # noise seeds of the clips before the samples
    recording: Images | None = None  # [n,F,H,W,3] recorded clip 0 and clip after the history; on the leader, if needed
    clip: int = 0  # index of the samples' clip; 0 despite history_seeds if the history was not finite
    reference: Images | None = None  # [T,H,W,3] recorded frames that samples should show, after encoding and decoding


def stack_conditioning_frames(groups: Sequence[Group]) -> ConditioningFrames | None:
    """Return the conditioning frames of these groups, one row per group, or None if no group has any."""
    if not any(group.num_conditioning_frames for group in groups):
        return None
    data = [group.data for group in groups if group.data is not None]
    return ConditioningFrames(torch.stack(data), torch.tensor([group.num_conditioning_frames for group in groups]))


def first_replica(job: Job, group: int) -> int:
    """Return the index of the first replica that has samples of group number `group` of the step."""
    return group * job.recipe.rl.rollout.group_size // job.run_sizes.samples_per_rank


RewardedGroup: TypeAlias = tuple[Group, Sequence[float | None]]
"""A group and the total reward of each of its samples. The reward of a failed sample is None."""


class GroupSource(Protocol):
    """Provides the groups of each RL step. All ranks must call every method. By default, it has no state."""

    def step_groups(self, step: int) -> list[Group]:
        """Return the groups of RL step `step`. A repeated call returns the same groups.

        Only `data`, `recording` and the images and videos of the prompt differ between ranks.
        """

    def observe_rewards(self, step: int, group_rewards: Sequence[RewardedGroup]) -> None:
        """Record the rewards of all samples of RL step `step`. All ranks must pass identical rewards.

        Call this once per step, in the order of the steps, before the policy after this step is published.
        """
        return

    def data_metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state as JSON. This state and the step number determine all later groups."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        return


class RefillableGroups(GroupSource, Protocol):
    """Group source that can provide additional groups for a step."""

    def refill_groups(self, step: int, attempt: int) -> list[Group]:
        """Return as many additional groups as `step_groups`, identical on every rank. attempt: refill round, from 1."""


class PromptGroups(RefillableGroups):
    """Group source for prompts without images or videos. The order of the prompts depends only on the step."""

    def __init__(self, prompts: PromptOrder, num_groups: int) -> None:
        self.prompts, self.num_groups = prompts, num_groups

    def step_groups(self, step: int) -> list[Group]:
        return [Group(prompt=prompt) for prompt in self.prompts.step_prompts(step, self.num_groups)]

    def refill_groups(self, step: int, attempt: int) -> list[Group]:
        return [Group(prompt=prompt) for prompt in self.prompts.extra_prompts(step, self.num_groups, attempt)]


class RewardStdGroups:
    """Group source that draws prompts more often if the std of their rewards is larger (data/prompt_weights.py).

    The prompts of step s depend on the rewards of the steps up to s - 1 - `steps_ahead`. If there are no such steps,
    all prompts have equal probability.
    """

    def __init__(
        self, prompts: Sequence[Prompt], num_groups: int, *, table: RewardStdTable, seed: int, steps_ahead: int = 0
    ) -> None:
        """table: empty table of reward stds. steps_ahead: rollout.max_staleness in an async run, otherwise 0."""
        self.prompts, self.num_groups, self.table = prompts, num_groups, table
        self.seed, self.steps_ahead = seed, steps_ahead
        self._initial_weights = table.weights()
        self._prompt_indices = {prompt.id: i for i, prompt in enumerate(prompts)}
        self._prompts_by_step: dict[int, list[int]] = {}  # indices of prompts, by step

    def step_groups(self, step: int) -> list[Group]:
        indices = self._prompts_by_step.get(step) or self._sample_prompts(step, self._initial_weights)
        return [Group(prompt=self.prompts[i]) for i in indices]

    def observe_rewards(self, step: int, group_rewards: Sequence[RewardedGroup]) -> None:
        by_prompt: dict[int, list[float]] = defaultdict(list)
        for group, rewards in group_rewards:
            variance = group_variance(rewards)
            if variance is not None and math.isfinite(variance):
                by_prompt[self._prompt_indices[group.prompt.id]].append(variance)
        for prompt, variances in by_prompt.items():
            self.table.update(prompt, variances)
        self._prompts_by_step = {later: prompts for later, prompts in self._prompts_by_step.items() if later > step}
        next_step = step + 1 + self.steps_ahead
        self._prompts_by_step[next_step] = self._sample_prompts(next_step, self.table.weights())

    def refill_groups(self, step: int, attempt: int) -> list[Group]:
        seed = derive_seed(self.seed, "further_prompts", attempt)
        indices = draw_prompts(self.table.weights(), self.num_groups, seed=seed, step=step)
        return [Group(prompt=self.prompts[i]) for i in indices]

    def _sample_prompts(self, step: int, weights: Weights) -> list[int]:
        return draw_prompts(weights, self.num_groups, seed=self.seed, step=step)

    def data_metrics(self) -> dict[str, float]:
        return self.table.stats()

    def state_dict(self) -> dict[str, Any]:
        return {"set": self._prompts_hash, "table": self.table.state(), "drawn": sorted(self._prompts_by_step.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["set"] != self._prompts_hash:
            log.warning("the prompts differ from the checkpoint's: the std of their rewards is measured again")
            return
        self.table.restore(state["table"])
        self._prompts_by_step = {step: prompts for step, prompts in state["drawn"]}

    @functools.cached_property
    def _prompts_hash(self) -> str:
        packed = json.dumps([pack_prompt(prompt) for prompt in self.prompts], sort_keys=True)
        return hashlib.blake2b(packed.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSample:
    """One sample to generate. Its ids and seeds do not depend on the rank."""

    sample_id: str
    group_id: str
    group: Group
    seed: int  # unique to the sample
    noise_seed: int  # seed of the initial noise: `seed`, or one value for the whole group

    @property
    def prompt(self) -> Prompt:
        return self.group.prompt


def plan_samples(
    recipe: Recipe, groups: Sequence[Group], step: int, group_size: int, *, first_group: int = 0
) -> list[RolloutSample]:
    """Return the samples of one RL step with the seed and the noise of a recipe, see `plan_step_samples`."""
    return plan_step_samples(
        groups,
        group_size=group_size,
        step=step,
        run_seed=recipe.run.seed,
        same_noise=recipe.sampling.same_noise,
        first_group=first_group,
    )


def plan_step_samples(
    groups: Sequence[Group],
    *,
    group_size: int,
    step: int,
    run_seed: int,
    same_noise: bool = False,
    first_group: int = 0,
) -> list[RolloutSample]:
    """Return the samples of one RL step: `group_size` consecutive samples for each group.

    same_noise: use the same initial noise for all samples of a group.
    first_group: index of the first group. It is above 0 for additional groups of the step.
    """
    samples = []
    for g, group in enumerate(groups, start=first_group):
        group_id = f"{step}/{g}/{group.prompt.id}"
        group_seed = derive_seed(run_seed, "group_noise", step, g)
        for k in range(group_size):
            seed = derive_seed(run_seed, "init_noise", step, g, k)
            samples.append(
                RolloutSample(
                    sample_id=f"{group_id}/{k}",
                    group_id=group_id,
                    group=group,
                    seed=seed,
                    noise_seed=group_seed if same_noise else seed,
                )
            )
    return samples


def group_rewards(samples: Sequence[RolloutSample], rewards: Sequence[float | None]) -> list[RewardedGroup]:
    """Return each group with the rewards of its samples. rewards: one per sample, in the order of `samples`."""
    groups = {sample.group_id: sample.group for sample in samples}
    by_group: dict[str, list[float | None]] = {group_id: [] for group_id in groups}
    for sample, reward in zip(samples, rewards, strict=True):
        by_group[sample.group_id].append(reward)
    return [(group, by_group[group_id]) for group_id, group in groups.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """Samples of one RL step: the metadata of all samples, and the tensors of this replica's samples."""

    samples: Sequence[RolloutSample]  # of all ranks
    local_rollouts: Sequence[Rollout]  # of this replica's samples, which are contiguous in `samples`
    first_index: int  # index of the first local sample in `samples`
    failures: Scores  # failed Scores of local samples with non-finite latents
    group_rewards: Sequence[RewardedGroup] | None = None  # of all candidates if `samples` are a selection, else None


class RolloutSource(Protocol):
    """Generates the samples of each RL step and collects their scores. All ranks must call every method."""

    groups: GroupSource

    def publish_policy(self, step: int) -> None:
        """Make the policy after RL step `step` available for rollouts. Also called once before the first step."""

    def wait_until_ready(self, step: int) -> bool:
        """Wait until the samples of this RL step are available. Returns False if a rank gets a stop request first."""
        return True

    def collect_rollouts(self, step: int) -> StepRollouts:
        """Return the samples of this RL step. Only this replica's samples have latents."""

    def collect_rewards(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        """Return a dict {reward name: Score} for each sample of all ranks, in the order of `rollouts.samples`.

        In runs without rewards, the dict of a sample is empty, or has a failed Score if the sample failed.
        """

    def step_metrics(self) -> dict[str, float]:
        """Return the metrics of the last call of `collect_rollouts`. They are identical on every rank."""


def extract_rollout(sample: RolloutSample, trajectory: Trajectory, row: int, *, replace_nonfinite: bool) -> Rollout:
    """Return the rollout of one sample. row: index of the sample in `trajectory`.

    replace_nonfinite: replace NaN and infinity by 0 in all tensors. If False, replace them only in the clean latents.
    """
    convert = replace_nonfinite_values if replace_nonfinite else Tensor.detach
    return Rollout(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        prompt=sample.prompt,
        seed=sample.seed,
        noise_seed=sample.noise_seed,
        clean_latents=replace_nonfinite_values(trajectory.clean_latents[row]),
        transitions=extract_transitions(trajectory, row, replace_nonfinite=replace_nonfinite),
        states={k: convert(states[row]) for k, states in trajectory.states.items()},
        predictions={k: convert(clean[row]) for k, clean in trajectory.predictions.items()},
        is_finite=not replace_nonfinite,
        data_latents=sample.group.data,
        num_conditioning_frames=sample.group.num_conditioning_frames,
    )


def extract_transitions(trajectory: Trajectory, row: int, *, replace_nonfinite: bool) -> list[Transition]:
    """Return the stored denoising steps of sample `row`: copies if `replace_nonfinite` is True, otherwise views."""
    convert = replace_nonfinite_values if replace_nonfinite else Tensor.detach
    return [
        Transition(
            index=stored.index,
            latents=convert(stored.latents[row]),
            next_latents=convert(stored.next_latents[row]),
            log_prob=convert(stored.log_prob[row]),
            mean=None if stored.mean is None else convert(stored.mean[row]),
            passes={name: convert(velocity[row]) for name, velocity in stored.passes.items()},
        )
        for stored in trajectory.stored_steps
    ]


def replace_nonfinite_values(tensor: Tensor) -> Tensor:
    """Return a copy with 0 in place of NaN and infinity."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)  # a loss weight of 0 is not enough, because NaN * 0 is NaN
