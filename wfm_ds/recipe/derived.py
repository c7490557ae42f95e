"""The numbers that follow from a recipe and a world size, and the combinations that cannot be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """One step, cut over ranks and micro-batches. All counts are exact and the same on every rank.

    The ranks of a replica work on the same samples: what is said of a rank is said of them together.
    """

    world_size: int
    sequence_parallel: int  # ranks of a replica
    samples_per_step: int  # SFT: the global batch; RL: generated samples of one RL step
    samples_per_rank: int
    candidates_per_step: int = 0  # generated to choose these samples from (sampling.explore), without refilled groups
    terms_per_rank: int  # (sample, timestep) pairs of one optimizer step on one rank
    accumulation: int  # micro-batches of one optimizer step on one rank
    updates_per_step: int  # optimizer steps per step
    total_updates: int

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.sequence_parallel

    @property
    def candidates_per_rank(self) -> int:
        """Candidates of one rank. All generate as many: the first sample again where these cannot be shared evenly."""
        return math.ceil(self.candidates_per_step / self.num_replicas)

    def lines(self) -> list[str]:
        shared = self.sequence_parallel > 1
        replicas, unit = (f" ({self.replicas})", "replica") if shared else ("", "rank")
        return [
            f"ranks                      {self.world_size}{replicas}",
            f"samples per step           {self.samples_per_step} ({self.samples_per_rank} a {unit})",
            *self._candidates(unit),
            f"training terms a {unit:<10}{self.terms_per_rank} per optimizer step, {self.accumulation} micro-batches",
            f"optimizer steps            {self.total_updates} ({self.updates_per_step} per step)",
        ]

    def _candidates(self, unit: str) -> list[str]:
        if not self.candidates_per_step:
            return []
        return [f"candidates per step        {self.candidates_per_step} ({self.candidates_per_rank} a {unit})"]

    @property
    def replicas(self) -> str:
        """Name the processes that the samples are shared out to."""
        if self.sequence_parallel == 1:
            return f"{self.world_size} ranks"
        return f"{self.num_replicas} replica{'s' * (self.num_replicas != 1)} of {self.sequence_parallel} ranks"


def num_replicas(recipe: Recipe, world_size: int, *, ranks_per_node: int | None = None) -> int:
    """Replicas of engine.sequence_parallel ranks each. Raises RecipeError unless that divides all ranks, and those of
    a node where they are given: the exchanges of every layer must not leave it."""
    sp = recipe.engine.sequence_parallel
    for ranks, whose in ((world_size, ""), (ranks_per_node, " of a node")):
        if ranks is not None and ranks % sp:
            raise RecipeError(
                f"engine.sequence_parallel {sp} does not divide the {ranks} ranks{whose}: choose a divisor of {ranks}, "
                f"or a multiple of {sp} ranks{whose}"
            )
    return world_size // sp


def derive(recipe: Recipe, world_size: int) -> Derived:
    """Raises RecipeError with the numbers when samples cannot be shared evenly: ranks must do equal work."""
    replicas = num_replicas(recipe, world_size)
    return _rl(recipe, world_size, replicas) if recipe.is_rl else _sft(recipe, world_size, replicas)


def _sft(recipe: Recipe, world_size: int, replicas: int) -> Derived:
    per_rank = recipe.engine.micro_batch_size * recipe.engine.gradient_accumulation
    return Derived(
        world_size=world_size,
        sequence_parallel=recipe.engine.sequence_parallel,
        samples_per_step=per_rank * replicas,
        samples_per_rank=per_rank,
        terms_per_rank=per_rank,
        accumulation=recipe.engine.gradient_accumulation,
        updates_per_step=1,
        total_updates=recipe.run.steps,
    )


def _rl(recipe: Recipe, world_size: int, replicas: int) -> Derived:
    algorithm, rollout = recipe.rl.algorithm, recipe.rl.rollout
    groups, size = rollout.prompts_per_step, rollout.group_size
    updates = algorithm.updates_per_rollout
    samples = groups * size
    if samples % (replicas * updates):
        shared = f"replicas of {recipe.engine.sequence_parallel} ranks" if replicas < world_size else "ranks"
        raise RecipeError(
            f"rollout.prompts_per_step * rollout.group_size = {groups} * {size} = {samples} samples are not divisible "
            f"by {replicas} {shared} * {updates} algorithm.updates_per_rollout: choose a multiple of "
            f"{replicas * updates}, or another number of ranks"
        )
    if recipe.engine.gradient_accumulation != 1:
        raise RecipeError(
            "engine.gradient_accumulation is derived in reinforcement learning (all terms of an update divided by "
            "engine.micro_batch_size): remove it"
        )
    explore = recipe.sampling.explore
    per_update = samples // (replicas * updates)
    terms = per_update * algorithm.terms_per_sample(recipe.sampling)
    return Derived(
        world_size=world_size,
        sequence_parallel=recipe.engine.sequence_parallel,
        samples_per_step=samples,
        samples_per_rank=samples // replicas,
        candidates_per_step=0 if explore is None else groups * explore.group_size,
        terms_per_rank=terms,
        accumulation=math.ceil(terms / recipe.engine.micro_batch_size),
        updates_per_step=updates,
        total_updates=recipe.run.steps * updates,
    )
