"""The numbers that follow from a recipe and a world size, and the combinations that cannot be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wfm_ds.errors import RecipeError
from wfm_ds.recipe import Recipe
from wfm_ds.recipe_algorithms import SftAlgorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """How one step is cut over ranks and micro-batches. All counts are exact and the same on every rank."""

    world_size: int
    samples_per_step: int  # SFT: the global batch; RL: generated samples of one RL step
    samples_per_rank: int
    terms_per_rank: int  # (sample, timestep) pairs of one optimizer step on one rank
    accumulation: int  # micro-batches of one optimizer step on one rank
    updates_per_step: int  # optimizer steps per step
    total_updates: int

    def lines(self) -> list[str]:
        return [
            f"ranks                      {self.world_size}",
            f"samples per step           {self.samples_per_step} ({self.samples_per_rank} a rank)",
            f"training terms a rank      {self.terms_per_rank} per optimizer step, {self.accumulation} micro-batches",
            f"optimizer steps            {self.total_updates} ({self.updates_per_step} per step)",
        ]


def derive(recipe: Recipe, world_size: int) -> Derived:
    """Raises RecipeError with the numbers when samples cannot be shared evenly: ranks must do equal work."""
    micro = recipe.engine.micro_batch_size
    if isinstance(recipe.algorithm, SftAlgorithm):
        per_rank = micro * recipe.engine.gradient_accumulation
        return Derived(
            world_size=world_size,
            samples_per_step=per_rank * world_size,
            samples_per_rank=per_rank,
            terms_per_rank=per_rank,
            accumulation=recipe.engine.gradient_accumulation,
            updates_per_step=1,
            total_updates=recipe.run.steps,
        )
    assert recipe.rollout is not None
    groups, size = recipe.rollout.prompts_per_step, recipe.rollout.group_size
    updates = recipe.algorithm.updates_per_rollout
    samples = groups * size
    if samples % (world_size * updates):
        raise RecipeError(
            f"rollout.prompts_per_step * rollout.group_size = {groups} * {size} = {samples} samples are not divisible "
            f"by {world_size} ranks * {updates} algorithm.updates_per_rollout: choose a multiple of "
            f"{world_size * updates}, or another number of ranks"
        )
    if recipe.engine.gradient_accumulation != 1:
        raise RecipeError(
            "engine.gradient_accumulation is derived in reinforcement learning (all terms of an update divided by "
            "engine.micro_batch_size): remove it"
        )
    per_update = samples // (world_size * updates)
    terms = per_update * recipe.algorithm.num_trained_timesteps(recipe.sampling)
    return Derived(
        world_size=world_size,
        samples_per_step=samples,
        samples_per_rank=samples // world_size,
        terms_per_rank=terms,
        accumulation=math.ceil(terms / micro),
        updates_per_step=updates,
        total_updates=recipe.run.steps * updates,
    )
