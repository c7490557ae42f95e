"""Compute batch sizes and numbers of steps from a recipe and a world size, and reject invalid combinations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSizes:
    """Numbers of samples, loss terms and optimizer steps per step of a run. All ranks compute equal numbers.

    With sequence parallelism, "per rank" means per replica.
    """

    world_size: int
    sequence_parallel: int  # ranks per replica
    samples_per_step: int  # SFT: global batch size; RL: prompts_per_step * group_size
    samples_per_rank: int
    extra_updates_per_step: int = 0  # optimizer steps of adapters that are not exported
    candidates_per_step: int = 0  # generated candidates with sampling.explore, without refills
    terms_per_rank: int  # loss terms ((sample, timestep) pairs) per optimizer step and rank
    accumulation: int  # micro-batches per optimizer step and rank
    updates_per_step: int  # optimizer steps per SFT or RL step, of all trained adapters
    total_updates: int  # optimizer steps of the exported weights: the length of the learning rate schedule

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.sequence_parallel

    @property
    def candidates_per_rank(self) -> int:
        return math.ceil(self.candidates_per_step / self.num_replicas)

    def summary_lines(self) -> list[str]:
        shared = self.sequence_parallel > 1
        replicas, unit = (f" ({self.replicas_text})", "replica") if shared else ("", "rank")
        candidates = f"candidates per step        {self.candidates_per_step} ({self.candidates_per_rank} per {unit})"
        own = self.updates_per_step - self.extra_updates_per_step
        extra = f", after {self.extra_updates_per_step} of the fake score" if self.extra_updates_per_step else ""
        return [
            f"ranks                      {self.world_size}{replicas}",
            f"samples per step           {self.samples_per_step} ({self.samples_per_rank} per {unit})",
            *([candidates] if self.candidates_per_step else []),
            f"{f'loss terms per {unit}':<27}{self.terms_per_rank} per optimizer step, {self.accumulation} "
            "micro-batches",
            f"optimizer steps            {self.total_updates} ({own} per step{extra})",
        ]

    @property
    def replicas_text(self) -> str:
        """Description of the ranks for messages, such as `8 ranks` or `4 replicas of 2 ranks`."""
        if self.sequence_parallel == 1:
            return f"{self.world_size} ranks"
        return f"{self.num_replicas} replica{'s' * (self.num_replicas != 1)} of {self.sequence_parallel} ranks"


def num_replicas(recipe: Recipe, world_size: int, *, ranks_per_node: int | None = None) -> int:
    """Return the number of replicas. A replica has engine.sequence_parallel ranks.

    Raises RecipeError if engine.sequence_parallel does not divide the world size or, if given, `ranks_per_node`.
    """
    sp = recipe.engine.sequence_parallel
    for ranks, whose in ((world_size, ""), (ranks_per_node, " of a node")):
        if ranks is not None and ranks % sp:
            raise RecipeError(
                f"engine.sequence_parallel {sp} does not divide the {ranks} ranks{whose}: set it to a divisor of "
                f"{ranks}, or use a multiple of {sp} ranks{whose}"
            )
    return world_size // sp


def derive_run_sizes(recipe: Recipe, world_size: int) -> RunSizes:
    """Compute the numbers of samples, loss terms and optimizer steps of a run.

    Raises RecipeError if the samples cannot be partitioned evenly over the ranks, or if engine.gradient_accumulation is
    set in RL.
    """
    replicas = num_replicas(recipe, world_size)
    if recipe.is_rl:
        return _derive_rl_sizes(recipe, world_size, replicas)
    per_rank = recipe.engine.micro_batch_size * recipe.engine.gradient_accumulation
    return RunSizes(
        world_size=world_size,
        sequence_parallel=recipe.engine.sequence_parallel,
        samples_per_step=per_rank * replicas,
        samples_per_rank=per_rank,
        terms_per_rank=per_rank,
        accumulation=recipe.engine.gradient_accumulation,
        updates_per_step=1,
        total_updates=recipe.run.steps,
    )


def _derive_rl_sizes(recipe: Recipe, world_size: int, replicas: int) -> RunSizes:
    algorithm, rollout = recipe.rl.algorithm, recipe.rl.rollout
    groups, size = rollout.prompts_per_step, rollout.group_size
    parts = algorithm.num_sample_parts
    samples = groups * size
    if samples % (replicas * parts):
        shared = f"replicas of {recipe.engine.sequence_parallel} ranks" if replicas < world_size else "ranks"
        raise RecipeError(
            f"rollout.prompts_per_step * rollout.group_size = {groups} * {size} = {samples} samples are not divisible "
            f"by {replicas} {shared} * {parts} algorithm.updates_per_rollout: use a multiple of "
            f"{replicas * parts}, or another number of ranks"
        )
    if recipe.engine.gradient_accumulation != 1:
        raise RecipeError(
            "engine.gradient_accumulation is derived in RL (loss terms per update / engine.micro_batch_size): remove it"
        )
    explore = recipe.sampling.explore
    per_update = samples // (replicas * parts)
    terms = per_update * algorithm.terms_per_sample(recipe.sampling)
    return RunSizes(
        world_size=world_size,
        sequence_parallel=recipe.engine.sequence_parallel,
        samples_per_step=samples,
        samples_per_rank=samples // replicas,
        candidates_per_step=0 if explore is None else groups * explore.group_size,
        terms_per_rank=terms,
        accumulation=math.ceil(terms / recipe.engine.micro_batch_size),
        updates_per_step=algorithm.num_updates,
        extra_updates_per_step=algorithm.num_updates - parts,
        total_updates=algorithm.num_default_updates(recipe.run.steps),
    )
