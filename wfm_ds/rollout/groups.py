"""Groups of an RL step: a prompt each, or a captioned medium each, the same on every rank."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from wfm_ds.algorithms.advantages import group_variance
from wfm_ds.data.prompts import PromptOrder
from wfm_ds.data.reading import Reader, TrainingSample
from wfm_ds.data.replica import read_once
from wfm_ds.data.samples import pack_prompt, unpack_prompt
from wfm_ds.data.spread import SpreadTable, Weights, drawn
from wfm_ds.rollout.trajectories import Trajectories
from wfm_ds.seeds import derive_seed
from wfm_ds.types import ConditionalFrames, Prompt

if TYPE_CHECKING:
    from wfm_ds.run.job import Job

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one group share this."""

    prompt: Prompt
    data: Tensor | None = None  # clean latents [C,...] float32 of its medium, where a sample of the group is
    num_conditional_frames: int = 0  # first latent frames of it that the samples are given


def conditional_latents(groups: Sequence[Group]) -> ConditionalFrames | None:
    """Return the latents that samples of these groups are given, a row for each; None if they are given none."""
    if not any(group.num_conditional_frames for group in groups):
        return None
    data = [group.data for group in groups if group.data is not None]
    return ConditionalFrames(torch.stack(data), torch.tensor([group.num_conditional_frames for group in groups]))


RewardedGroup: TypeAlias = tuple[Group, Sequence[float | None]]
"""A group and the total reward of each of its samples; None: the sample has none."""


class GroupSource(Protocol):
    """Source of the groups of each RL step. All of its methods are collective."""

    def groups(self, step: int) -> list[Group]:
        """Return the groups of RL step `step` of all ranks; equal on every rank except for `data`. Whenever a rank
        asks, it gets the same."""

    def observe(self, step: int, rewarded: Sequence[RewardedGroup]) -> None:
        """Take up the rewards of all samples that RL step `step` generated, equal on every rank. Each rank calls it
        once a step, in their order, before the step's weights are published."""

    def stats(self) -> dict[str, float]:
        """Metrics of the data so far, `data/*`."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON: with the step, all that the next groups follow from."""

    def restore(self, state: Mapping[str, Any]) -> None: ...


class RefillableGroups(GroupSource, Protocol):
    """Groups about prompts, of which a step can have more."""

    def refill(self, step: int, attempt: int) -> list[Group]:
        """Return as many groups as RL step `step` has, for its round `attempt` of further ones, from 1; equal on every
        rank. They follow from these two and from the state, whatever was asked for before."""


class PromptGroups:
    """Groups about a prompt and nothing else, in an order that follows from the step alone."""

    def __init__(self, prompts: PromptOrder, num_groups: int) -> None:
        self.prompts, self.num_groups = prompts, num_groups

    def groups(self, step: int) -> list[Group]:
        return [Group(prompt=prompt) for prompt in self.prompts.prompts(step, self.num_groups)]

    def refill(self, step: int, attempt: int) -> list[Group]:
        return [Group(prompt=prompt) for prompt in self.prompts.further(step, self.num_groups, attempt)]

    def observe(self, step: int, rewarded: Sequence[RewardedGroup]) -> None:
        """Ignore them: the order does not depend on rewards."""

    def stats(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


class SpreadGroups:
    """Groups about prompts that are drawn by the spread of their rewards (data/spread.py).

    Samples of step s may be asked for once step s - 1 - ahead is done, by rank 0 at once and by the others later. So
    the prompts of step s are drawn when step s - 1 - ahead is observed, and kept until step s is. The first steps of a
    run have no such step before them: all prompts are equally likely there.
    """

    def __init__(
        self, prompts: Sequence[Prompt], num_groups: int, *, table: SpreadTable, seed: int, ahead: int = 0
    ) -> None:
        """`table`: empty, of as many prompts. ahead: how many steps before the last one a step's groups may be asked
        for, rollout.max_staleness of an async run."""
        self.prompts, self.num_groups, self.table = prompts, num_groups, table
        self.seed, self.ahead = seed, ahead
        self._first = table.weights()
        self._index = {prompt.id: i for i, prompt in enumerate(prompts)}
        self._drawn: dict[int, list[int]] = {}  # by step

    def groups(self, step: int) -> list[Group]:
        found = self._drawn.get(step) or self._draw(step, self._first)
        return [Group(prompt=self.prompts[i]) for i in found]

    def observe(self, step: int, rewarded: Sequence[RewardedGroup]) -> None:
        found: dict[int, list[float]] = defaultdict(list)
        for group, rewards in rewarded:
            variance = group_variance(rewards)
            if variance is not None and math.isfinite(variance):
                found[self._index[group.prompt.id]].append(variance)
        for prompt, variances in found.items():
            self.table.observe(prompt, variances)
        self._drawn = {later: prompts for later, prompts in self._drawn.items() if later > step}
        next_step = step + 1 + self.ahead
        self._drawn[next_step] = self._draw(next_step, self.table.weights())

    def refill(self, step: int, attempt: int) -> list[Group]:
        seed = derive_seed(self.seed, "further_prompts", attempt)
        further = drawn(self.table.weights(), self.num_groups, seed=seed, step=step)
        return [Group(prompt=self.prompts[i]) for i in further]

    def _draw(self, step: int, weights: Weights) -> list[int]:
        return drawn(weights, self.num_groups, seed=self.seed, step=step)

    def stats(self) -> dict[str, float]:
        return self.table.stats()

    def state(self) -> dict[str, Any]:
        return {"set": self._fingerprint, "table": self.table.state(), "drawn": sorted(self._drawn.items())}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["set"] != self._fingerprint:
            log.warning("the prompts are others than those of the checkpoint: their spreads are measured anew")
            return
        self.table.restore(state["table"])
        self._drawn = {step: prompts for step, prompts in state["drawn"]}

    @functools.cached_property
    def _fingerprint(self) -> str:
        """A hash of the prompts in their order."""
        packed = json.dumps([pack_prompt(prompt) for prompt in self.prompts], sort_keys=True)
        return hashlib.blake2b(packed.encode(), digest_size=16).hexdigest()


class PairGroups:
    """Groups about a captioned medium: group g of RL step s has the one at position (s-1) * groups + g of the data.

    The leader of a replica reads and encodes what its own samples need. All ranks learn every caption: where a file is
    bad, the substitute's.
    """

    def __init__(
        self,
        job: Job,
        source: Reader,
        encode: Callable[[Sequence[TrainingSample]], Tensor] | None,
        num_conditional_frames: tuple[int, int] = (0, 0),
        trajectories: Trajectories | None = None,
    ) -> None:
        """encode: clean latents [B, ...] float32 of samples, collective; None: groups have no data of their own.
        num_conditional_frames: the smallest and the largest number of latent frames that a group is given.
        trajectories: what groups are told instead of what their clips do; None: nothing."""
        self.trajectories = trajectories
        self.job, self.source, self.encode, self.num_conditional_frames = job, source, encode, num_conditional_frames
        self.num_groups, size = job.recipe.rl.rollout.prompts_per_step, job.recipe.rl.rollout.group_size
        first = job.world.dp_rank * job.derived.samples_per_rank
        self.mine = range(first // size, (first + job.derived.samples_per_rank - 1) // size + 1)
        self._before: dict[int, dict[str, Any]] = {}  # what was known of bad files before a step's were read

    def groups(self, step: int) -> list[Group]:
        job = self.job
        self._before.setdefault(step, self.source.state())
        here = [(step - 1) * self.num_groups + g for g in self.mine]
        with job.timer("data_wait"):
            media = read_once(job.world, lambda: self.source.at(here, ahead=[p + self.num_groups for p in here]))
        with job.timer("encode"):
            # One by one: the last bits of a latent must not depend on what else the rank encodes.
            encode = self.encode
            data = {} if encode is None else {g: encode([m])[0] for g, m in zip(self.mine, media, strict=True)}
        captions = [[g, pack_prompt(m.prompt)] for g, m in zip(self.mine, media, strict=True)]
        prompts = {g: unpack_prompt(packed) for part in job.world.replica_gather(captions) for g, packed in part}
        if self.trajectories is not None:
            prompts = dict(enumerate(self.trajectories.of_step([prompts[g] for g in range(self.num_groups)], step)))
        return [
            Group(prompt=prompts[g], data=data.get(g), num_conditional_frames=self._drawn(step, g))
            for g in range(self.num_groups)
        ]

    def _drawn(self, step: int, group: int) -> int:
        low, high = self.num_conditional_frames
        return low + derive_seed(self.job.recipe.run.seed, "given_frames", step, group) % (high - low + 1)

    def observe(self, step: int, rewarded: Sequence[RewardedGroup]) -> None:
        """Ignore them: the order does not depend on rewards."""
        self._before = {later: state for later, state in self._before.items() if later > step}

    def stats(self) -> dict[str, float]:
        return self.source.bad_counts(self.job.world.replica_sums)

    def state(self) -> dict[str, Any]:
        """Without the steps that were read ahead, which the run that goes on reads again."""
        known = self._before[min(self._before)] if self._before else self.source.state()
        return {"sources": self.job.world.replica_gather(known)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.source.restore_from_ranks(state["sources"], self.job.world.dp_rank, self.job.world.dp_size)
