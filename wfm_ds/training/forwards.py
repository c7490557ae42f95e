"""Predict the number of denoiser forward passes of a recipe (the metrics `perf/forwards_*`) without running it.

Counts are per rank, equal on all ranks (the ranks of a replica run each forward pass together), and exact while every
optimizer step is applied. Two cases can add forward passes. With two experts a micro-batch holds terms of one expert,
so an update may run one more per purpose, and one more of `policy` for separate data forwards. With `data.buckets`
the validation loss runs one more per additional size. Purposes are named as in `CountingForward.counts`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.algorithms.sft import NUM_BUCKETS
from wfm_ds.chunks import chunks

if TYPE_CHECKING:
    from wfm_ds.algorithms import RlAlgorithm
    from wfm_ds.recipe.derived import Derived
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.sampling.denoise import Plan


@dataclass(frozen=True, slots=True)
class Forwards:
    """Number of forward passes of one purpose."""

    calls: int
    samples: int  # total over all calls
    without_adapters: int = 0  # samples with adapters disabled: reference policy of a LoRA run

    def __add__(self, other: Forwards) -> Forwards:
        return Forwards(
            self.calls + other.calls,
            self.samples + other.samples,
            self.without_adapters + other.without_adapters,
        )


NONE = Forwards(0, 0)
Guided = Callable[[float], bool]
"""Return whether predictions at a noise level use guidance, which adds an unconditional pass."""


def in_batches(samples: int, batch: int, times: int = 1) -> Forwards:
    """Count `num_passes` passes over the samples in batches of this size."""
    return Forwards(times * math.ceil(samples / batch), times * samples)


def added(*parts: Mapping[str, Forwards]) -> dict[str, Forwards]:
    """Sum the counts by purpose. Purposes without calls are omitted."""
    sums = {purpose: sum((p.get(purpose, NONE) for p in parts), NONE) for part in parts for purpose in part}
    return {purpose: forwards for purpose, forwards in sums.items() if forwards.calls}


def sft_step(recipe: Recipe, derived: Derived) -> dict[str, Forwards]:
    """Count one optimizer step of a supervised algorithm."""
    settings = recipe.supervised
    calls = math.ceil(derived.samples_per_rank / recipe.engine.micro_batch_size)
    count = Forwards(calls, derived.samples_per_rank * settings.num_media)
    return {"policy": count, **{policy: seen_by(policy, count) for policy in settings.references}}


def rl_step(
    recipe: Recipe,
    derived: Derived,
    algorithm: RlAlgorithm,
    step: int,
    *,
    guided: Guided | None = None,
    explored_at: Sequence[float] | None = None,
) -> dict[str, Forwards]:
    """Count RL step `step` (from 1): the rollout, unless other processes run it, and the predictions of every update.

    guided: needed if only some noise levels use guidance; the fraction of guided training terms is then assumed to
    equal that of the rollout. exploration_sigmas: noise levels of the candidates of sampling.explore.

    The actual count is lower if samples or terms are dropped (failed rewards, `zero_std: drop`, no gradient), and
    higher if groups are refilled. best_of_n is assumed to select the same fraction of every update. This is exact if
    each rank holds whole groups and trains them in one update.
    """
    policy, sigmas = algorithm.rollout_policy, evaluations(algorithm.plan(step))
    num_guided = sum(map(guided or guided_by(recipe), sigmas))
    guided_fraction = num_guided / len(sigmas)
    rollout = sampled(recipe, "rollout", derived.samples_per_rank, len(sigmas), num_guided)
    if (explore := recipe.sampling.explore) is not None:
        explored = [1.0] * explore.steps if explored_at is None else explored_at
        num_explored_guided = sum(map(guided or guided_by(recipe), explored))
        candidates = sampled(recipe, "rollout", derived.candidates_per_rank, explore.steps, num_explored_guided)
        rollout = candidates + rollout if explore.regenerate else candidates
    rollout = seen_by(policy, rollout)
    if recipe.rl.rollout.merge_lora:
        rollout = dataclasses.replace(rollout, without_adapters=rollout.samples)
    terms = num_terms(recipe, derived)
    num_split, size = algorithm.settings.num_divided(terms), recipe.engine.micro_batch_size
    sizes = [*map(len, chunks(range(terms - num_split), size)), *map(len, chunks(range(num_split), size))]
    calls, data_calls = len(sizes), math.ceil(num_split / size)  # a term and its data share a forward unless split
    training = Forwards(calls + data_calls, terms + algorithm.settings.num_data(terms))
    references = Forwards(folded_calls(sizes, recipe.engine.max_forward_batch), terms)

    parts = [] if recipe.is_async else [{"rollout": rollout}]
    current = equal_policies(algorithm, derived, step)
    for update in range(derived.updates_per_step):
        own_old = (
            {"old"} if algorithm.recalls_old and update == 0 else set()
        )  # `old` equals the policy in the first update
        policies = [p for p in algorithm.references if p not in current | own_old]
        counts = {"policy": training, **{p: seen_by(p, references) for p in policies}}
        if algorithm.uses_group_statistics:
            counts["survey"] = Forwards(calls, terms)
        if "old" in counts and algorithm.recalls_old:
            counts["old"] = Forwards(calls, terms)  # uses the batch size of training
        parts.append(counts)
        parts.append({"uncond": sum((part_of(f, guided_fraction) for f in counts.values()), NONE)})
        current = set()
    return added(*parts)


def equal_policies(algorithm: RlAlgorithm, derived: Derived, step: int) -> set[str]:
    """Return policies equal to the trained one at the start of RL step `step`. Their forward passes are skipped."""
    if step == 1:
        return {algorithm.rollout_policy}
    decays = algorithm.moves(step - 1, (step - 1) * derived.updates_per_step)
    return {policy for policy, decay in decays.items() if decay == 0}


def num_terms(recipe: Recipe, derived: Derived) -> int:
    """Return the number of terms of one optimizer step on one rank."""
    algorithm, rollout = recipe.rl.algorithm, recipe.rl.rollout
    num_selected = algorithm.best_of_n or rollout.group_size
    return math.ceil(derived.terms_per_rank * num_selected / rollout.group_size)


def evaluations(plan: Plan) -> list[float]:
    """Return the noise levels at which this plan calls the denoiser. Runs the plan on a single number."""
    sigmas: list[float] = []

    def record_sigma(latents: Tensor, sigma: float) -> Tensor:
        sigmas.append(sigma)
        return torch.zeros_like(latents)

    plan.run(record_sigma, torch.zeros(1, 1, 1, 1), [0])
    return sigmas


def folded_calls(sizes: Iterable[int], most: int) -> int:
    """Count the forward passes of reference predictions: micro-batches share one up to `max_terms` terms."""
    calls, remaining = 0, 0
    for size in sizes:
        if size > remaining:
            calls, remaining = calls + 1, most
        remaining -= size
    return calls


def seen_by(policy: str, forwards: Forwards) -> Forwards:
    """Return the count for this policy: `ref` runs without adapters."""
    return dataclasses.replace(forwards, without_adapters=forwards.samples) if policy == "ref" else forwards


def evaluation(
    recipe: Recipe,
    num_replicas: int,
    *,
    num_prompts: int,
    num_images: int = 0,
    guided_steps: int | None = None,
    rollout: Sequence[float] = (),
    guided: Guided | None = None,
) -> dict[str, Forwards]:
    """Count one evaluation: sampling, and in supervised training the validation loss on `num_images` images or pairs.

    guided_steps: number of sampling.eval_steps with guidance, if only some have it. rollout_sigmas: noise levels of a
    rollout, if validation.rollout_correlation samples rollouts too. guided: as in count_rl_step.
    """
    num_samples = min(num_prompts, recipe.validation.num_prompts) * len(recipe.validation.seeds)
    if not recipe.is_rl:
        num_samples = min(num_samples, recipe.logging.num_samples)
    steps = recipe.sampling.eval_steps
    if guided_steps is None:
        guided_steps = steps if guided_by(recipe)(1.0) else 0
    shard_size = math.ceil(num_samples / num_replicas)
    count = sampled(recipe, "validation", shard_size, steps, guided_steps)
    count += sampled(recipe, "validation", shard_size, len(rollout), sum(map(guided or guided_by(recipe), rollout)))
    return {"validation": count + (NONE if recipe.is_rl else measured(recipe, num_replicas, num_images))}


def measured(recipe: Recipe, num_replicas: int, num_images: int) -> Forwards:
    """Count the validation loss on this many held-out samples, for the evaluation weights and each reference."""
    settings, size = recipe.supervised, recipe.engine.max_forward_batch
    terms = math.ceil(num_images * NUM_BUCKETS / num_replicas)
    count = Forwards(math.ceil(terms / max(1, size // settings.num_media)), terms * settings.num_media)
    return sum((seen_by(policy, count) for policy in settings.references), count)


def sampled(recipe: Recipe, purpose: str, samples: int, steps: int, guided_steps: int) -> Forwards:
    """Count the sampling of `samples` in batches of engine.max_forward_batch.

    Guided steps run two forward passes, or one joint pass if the doubled batch fits.
    """
    max_joint_rows = recipe.joint_rows.get(purpose, 0)
    sizes = [len(part) for part in chunks(range(samples), recipe.engine.max_forward_batch)]
    calls = sum(steps + (guided_steps if 2 * size > max_joint_rows else 0) for size in sizes)
    return Forwards(calls, samples * (steps + guided_steps))


def guided_by(recipe: Recipe, expert_of: Callable[[float], int] = lambda sigma: 0) -> Guided:
    """Return a function that tells whether guidance is used at a noise level. expert_of: maps sigma to the expert."""
    return lambda sigma: recipe.sampling.is_guided(expert_of(sigma))


def part_of(forwards: Forwards, share: float) -> Forwards:
    """Multiply a count by a fraction, rounded up."""
    return Forwards(*(math.ceil(number * share) for number in dataclasses.astuple(forwards)))
