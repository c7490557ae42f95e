"""Counts of denoiser forwards by recipe: what `perf/forwards_*` will say, known before anything runs.

Counts are those of one rank, equal on all ranks (those of a replica run each forward together), and exact as long as
every optimizer step is applied. With two experts a micro-batch holds terms of one, so an update may run one forward
more of each purpose, and of `policy` one more for data in forwards of its own; with `data.buckets` a validation loss
runs a forward more for each further size. The names are those of `CountedForward.counts`.
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
    """Forwards of one purpose."""

    calls: int
    samples: int  # through all calls together
    without_adapters: int = 0  # of the samples, those that see the reference: in a LoRA run the base alone

    def __add__(self, other: Forwards) -> Forwards:
        return Forwards(
            self.calls + other.calls,
            self.samples + other.samples,
            self.without_adapters + other.without_adapters,
        )


NONE = Forwards(0, 0)
Guided = Callable[[float], bool]
"""Tells for a noise level if the prediction there is guided, that is, takes an unconditional pass too."""


def in_batches(samples: int, batch: int, times: int = 1) -> Forwards:
    """`times` passes over the samples in batches of this size."""
    return Forwards(times * math.ceil(samples / batch), times * samples)


def added(*parts: Mapping[str, Forwards]) -> dict[str, Forwards]:
    """Sums by purpose; purposes without a call are left out."""
    sums = {purpose: sum((p.get(purpose, NONE) for p in parts), NONE) for part in parts for purpose in part}
    return {purpose: forwards for purpose, forwards in sums.items() if forwards.calls}


def sft_step(recipe: Recipe, derived: Derived) -> dict[str, Forwards]:
    """One optimizer step of a supervised algorithm."""
    settings = recipe.supervised
    calls = math.ceil(derived.samples_per_rank / recipe.engine.micro_batch_size)
    asked = Forwards(calls, derived.samples_per_rank * settings.num_media)
    return {"policy": asked, **{policy: seen_by(policy, asked) for policy in settings.references}}


def rl_step(
    recipe: Recipe,
    derived: Derived,
    algorithm: RlAlgorithm,
    step: int,
    *,
    guided: Guided | None = None,
    explored_at: Sequence[float] | None = None,
) -> dict[str, Forwards]:
    """RL step `step`, from 1: the rollout, unless other processes do it, then the predictions of every update.

    `guided`: unless all noise levels are or none is; then as large a share of the trained terms as of the rollout's
    predictions is taken to be. `explored_at`: with it, the noise levels of the candidates of sampling.explore. Fewer if
    samples are dropped (failed rewards, `zero_std: drop`), or terms that have no gradient, more if groups are refilled.
    best_of_n is taken as its share of every update, which is exact where ranks hold whole groups and train them in one
    update.
    """
    policy, asked_at = algorithm.rollout_policy, evaluations(algorithm.plan(step))
    num_guided = sum(map(guided or guided_by(recipe), asked_at))
    share = num_guided / len(asked_at)
    rollout = sampled(recipe, "rollout", derived.samples_per_rank, len(asked_at), num_guided)
    if (explore := recipe.sampling.explore) is not None:
        levels = [1.0] * explore.steps if explored_at is None else explored_at
        guided_levels = sum(map(guided or guided_by(recipe), levels))
        candidates = sampled(recipe, "rollout", derived.candidates_per_rank, explore.steps, guided_levels)
        rollout = candidates + rollout if explore.regenerate else candidates
    rollout = seen_by(policy, rollout)
    if recipe.rl.rollout.merge_lora:
        rollout = dataclasses.replace(rollout, without_adapters=rollout.samples)
    terms = num_terms(recipe, derived)
    divided, size = algorithm.settings.num_divided(terms), recipe.engine.micro_batch_size
    sizes = [*map(len, chunks(range(terms - divided), size)), *map(len, chunks(range(divided), size))]
    calls, of_data = len(sizes), math.ceil(divided / size)  # a term and its data share a forward, unless divided
    trained = Forwards(calls + of_data, terms + algorithm.settings.num_data(terms))
    compared = Forwards(folded_calls(sizes, recipe.engine.max_forward_batch), terms)

    parts = [] if recipe.is_async else [{"rollout": rollout}]
    current = equal_policies(algorithm, derived, step)
    for update in range(derived.updates_per_step):
        recalled = {"old"} if algorithm.recalls_old and update == 0 else set()
        asked = [p for p in algorithm.references if p not in current | recalled]
        velocities = {"policy": trained, **{p: seen_by(p, compared) for p in asked}}
        if algorithm.surveys:
            velocities["survey"] = Forwards(calls, terms)
        if "old" in velocities and algorithm.recalls_old:
            velocities["old"] = Forwards(calls, terms)  # in the batches of training
        parts.append(velocities)
        parts.append({"uncond": sum((part_of(f, share) for f in velocities.values()), NONE)})
        current = set()
    return added(*parts)


def equal_policies(algorithm: RlAlgorithm, derived: Derived, step: int) -> set[str]:
    """Policies whose weights are the trained ones when RL step `step` begins: their predictions need no forward."""
    if step == 1:
        return {algorithm.rollout_policy}
    moves = algorithm.moves(step - 1, (step - 1) * derived.updates_per_step)
    return {policy for policy, decay in moves.items() if decay == 0}


def num_terms(recipe: Recipe, derived: Derived) -> int:
    """Terms of one optimizer step on one rank."""
    algorithm, rollout = recipe.rl.algorithm, recipe.rl.rollout
    kept = algorithm.best_of_n or rollout.group_size
    return math.ceil(derived.terms_per_rank * kept / rollout.group_size)


def evaluations(plan: Plan) -> list[float]:
    """The noise levels at which a rollout of this plan asks for predictions: it is run, on a single number and without
    a denoiser."""
    asked: list[float] = []

    def predict(latents: Tensor, sigma: float) -> Tensor:
        asked.append(sigma)
        return torch.zeros_like(latents)

    plan.run(predict, torch.zeros(1, 1, 1, 1), [0])
    return asked


def folded_calls(sizes: Iterable[int], most: int) -> int:
    """Forwards of predictions without gradient, by the sizes of the micro-batches: whole ones share a forward while
    they have at most `most` terms."""
    calls, room = 0, 0
    for size in sizes:
        if size > room:
            calls, room = calls + 1, most
        room -= size
    return calls


def seen_by(policy: str, forwards: Forwards) -> Forwards:
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
    """One evaluation: the samples of this many prompts, and in SFT, which shows but does not score them, the validation
    loss on this many images or pairs. `guided_steps`: of sampling.eval_steps, unless all of them are or none is.
    `rollout`: the noise levels at which a rollout asks for predictions, if validation.rollout_correlation makes some;
    `guided` as of rl_step."""
    chosen = min(num_prompts, recipe.validation.num_prompts) * len(recipe.validation.seeds)
    if not recipe.is_rl:
        chosen = min(chosen, recipe.logging.num_samples)
    steps = recipe.sampling.eval_steps
    if guided_steps is None:
        guided_steps = steps if guided_by(recipe)(1.0) else 0
    share = math.ceil(chosen / num_replicas)
    drawn = sampled(recipe, "validation", share, steps, guided_steps)
    drawn += sampled(recipe, "validation", share, len(rollout), sum(map(guided or guided_by(recipe), rollout)))
    return {"validation": drawn + (NONE if recipe.is_rl else measured(recipe, num_replicas, num_images))}


def measured(recipe: Recipe, num_replicas: int, num_images: int) -> Forwards:
    """The validation loss on this many held-out samples, under the evaluation weights and each reference."""
    settings, size = recipe.supervised, recipe.engine.max_forward_batch
    terms = math.ceil(num_images * NUM_BUCKETS / num_replicas)
    asked = Forwards(math.ceil(terms / max(1, size // settings.num_media)), terms * settings.num_media)
    return sum((seen_by(policy, asked) for policy in settings.references), asked)


def sampled(recipe: Recipe, purpose: str, samples: int, steps: int, guided_steps: int) -> Forwards:
    """Denoise these samples in batches of engine.max_forward_batch; at guided steps each half has a forward, unless
    both share one."""
    most = recipe.joint_rows.get(purpose, 0)
    sizes = [len(part) for part in chunks(range(samples), recipe.engine.max_forward_batch)]
    calls = sum(steps + (guided_steps if 2 * size > most else 0) for size in sizes)
    return Forwards(calls, samples * (steps + guided_steps))


def guided_by(recipe: Recipe, expert_of: Callable[[float], int] = lambda sigma: 0) -> Guided:
    """Tell by noise level if the recipe's guidance runs. `expert_of`: DiffusionModel.expert_of."""
    return lambda sigma: recipe.sampling.is_guided(expert_of(sigma))


def part_of(forwards: Forwards, share: float) -> Forwards:
    return Forwards(*(math.ceil(number * share) for number in dataclasses.astuple(forwards)))
