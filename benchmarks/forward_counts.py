"""Predicts the number and FLOPs of the denoiser's forward passes (metrics `perf/forwards_*`) without running them.

Counts are per rank and equal on all ranks. They are exact if no optimizer step is skipped, except with two experts,
with image sizes from `data.buckets`, or with several teachers that teach different numbers of samples. The purpose of a
forward pass is a name such as `rollout` or `policy`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from wfm_ds.algorithms.sft import NUM_BUCKETS
from wfm_ds.chunks import split_into_chunks
from wfm_ds.engine.flop_counter import Flops, copy_to_meta, measure_flops
from wfm_ds.models.base import DiffusionModel
from wfm_ds.types import DEFAULT_ADAPTER

if TYPE_CHECKING:
    from wfm_ds.algorithms import RlAlgorithm
    from wfm_ds.recipe.run_sizes import RunSizes
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.recipe.shared_defaults import Checkpointing
    from wfm_ds.sampling.denoise import SamplingPlan

TRAINING_PURPOSE = "policy"  # for an extra adapter, the purpose is NAME_policy


@dataclass(frozen=True, slots=True)
class ForwardCount:
    """Number of forward passes for one purpose, such as `rollout`."""

    calls: int
    samples: int  # total number of samples in all of these forward passes
    without_adapters: int = 0  # samples with adapters disabled, as for the reference policy of a LoRA run

    def __add__(self, other: ForwardCount) -> ForwardCount:
        return ForwardCount(
            self.calls + other.calls,
            self.samples + other.samples,
            self.without_adapters + other.without_adapters,
        )


NO_FORWARDS = ForwardCount(0, 0)
CountPasses: TypeAlias = Callable[[float], int]
"""Function that returns how many forward passes guidance adds to a prediction at a noise level."""


def sum_forwards(*parts: Mapping[str, ForwardCount]) -> dict[str, ForwardCount]:
    """Return the sum of counts for each purpose. Purposes without forward passes are omitted."""
    sums = {
        purpose: sum((p.get(purpose, NO_FORWARDS) for p in parts), NO_FORWARDS) for part in parts for purpose in part
    }
    return {purpose: forwards for purpose, forwards in sums.items() if forwards.calls}


def count_sft_step(recipe: Recipe, derived: RunSizes) -> dict[str, ForwardCount]:
    settings = recipe.supervised_settings
    calls = math.ceil(derived.samples_per_rank / recipe.engine.micro_batch_size)
    count = ForwardCount(calls, derived.samples_per_rank * settings.items_per_sample)
    return {"policy": count, **{policy: policy_forwards(policy, count) for policy in settings.reference_policies}}


def count_rl_step(
    recipe: Recipe,
    derived: RunSizes,
    algorithm: RlAlgorithm,
    step: int,
    *,
    model: DiffusionModel | None = None,
    exploration_sigmas: Sequence[float] | None = None,
) -> dict[str, ForwardCount]:
    """Return {purpose: number of forward passes} for RL step `step`, counted from 1.

    The count includes all optimizer steps of this RL step, and the rollout unless rollout workers generate it. model:
    required if the number of guidance passes depends on the noise level. exploration_sigmas: noise levels at which
    candidates of sampling.explore are denoised.

    The actual count is lower if samples or loss terms are dropped (failed rewards, `zero_std: drop`, no gradient), and
    higher if groups are refilled or have a history (rollout.history).
    """
    policy, sigmas = algorithm.rollout_policy, denoiser_sigmas(algorithm.plan(step))
    in_rollouts, in_training = guidance_counter(recipe, model), guidance_counter(recipe, model, training=True)
    guided_fraction = sum(map(in_training, sigmas)) / len(sigmas)
    rollout = count_sampling(recipe, "rollout", derived.samples_per_rank, list(map(in_rollouts, sigmas)))
    if (explore := recipe.sampling.explore) is not None:
        explored = [1.0] * explore.steps if exploration_sigmas is None else exploration_sigmas
        others = list(map(in_rollouts, explored))
        candidates = count_sampling(recipe, "rollout", derived.candidates_per_rank, others)
        rollout = candidates + rollout if explore.regenerate else candidates
    rollout = policy_forwards(policy, rollout)
    if recipe.rl.rollout.merge_lora:
        rollout = dataclasses.replace(rollout, without_adapters=rollout.samples)

    parts = [] if recipe.is_async else [{"rollout": rollout}]
    current = equal_policies(algorithm, recipe, derived, step)
    for update in range(derived.updates_per_step):
        counts = count_update(recipe, derived, algorithm, step, update, current)
        parts.append(counts)
        fractions = {name: float(scale != 1) for name, scale in algorithm.reference_guidance.items()}
        known = {TRAINING_PURPOSE} if algorithm.keeps_passes and update == 0 else set()
        negative = (
            scale_forwards(f, fractions.get(name, guided_fraction)) for name, f in counts.items() if name not in known
        )
        parts.append({"uncond": sum(negative, NO_FORWARDS)})
        current = set()
    return sum_forwards(*parts)


def count_update(
    recipe: Recipe, derived: RunSizes, algorithm: RlAlgorithm, step: int, update: int, equal: Set[str]
) -> dict[str, ForwardCount]:
    """Return {purpose: number of conditional forward passes} for optimizer step `update` of RL step `step`.

    equal: names of the policies that need no forward passes, because they have the trained weights. It must not contain
    `old` if the algorithm uses predictions of `old`.
    """
    adapter, terms = algorithm.choose_adapter(step, update), terms_per_update(recipe, derived)
    size = recipe.engine.micro_batch_size
    calls = math.ceil(terms / size)
    if adapter != DEFAULT_ADAPTER:  # the loss of an extra adapter uses no other policies
        return {f"{adapter}_{TRAINING_PURPOSE}": ForwardCount(calls, terms)}
    num_split = algorithm.settings.num_separate_data_terms(terms)
    sizes = [
        *map(len, split_into_chunks(range(terms - num_split), size)),
        *map(len, split_into_chunks(range(num_split), size)),
    ]
    # A loss term and its data sample share a forward pass, unless the algorithm separates them.
    calls, data_calls = len(sizes), math.ceil(num_split / size)
    passes = algorithm.settings.passes_per_term
    training = ForwardCount(passes * calls + data_calls, passes * terms + algorithm.settings.num_data_terms(terms))
    references = ForwardCount(num_grouped_calls(sizes, recipe.engine.max_forward_batch), terms)
    references = scale_forwards(references, 1 / algorithm.num_teachers)
    # `old` equals the policy in the first update.
    own_old = {"old"} if algorithm.uses_old_predictions and update == 0 else set()
    names = [name for name in algorithm.references if name not in equal | own_old]
    weights = {name: algorithm.reference_weights.get(name, name) for name in names}
    counts = {TRAINING_PURPOSE: training, **{name: policy_forwards(weights[name], references) for name in names}}
    if algorithm.uses_group_statistics:
        counts["group_statistics"] = ForwardCount(calls, terms)
    if "old" in counts and algorithm.uses_old_predictions:
        counts["old"] = ForwardCount(calls, terms)  # with the batch size of training
    return counts


def equal_policies(algorithm: RlAlgorithm, recipe: Recipe, derived: RunSizes, step: int) -> set[str]:
    """Return the policies that have the trained weights at the start of RL step `step`."""
    if step == 1:
        return algorithm.initial_equal_policies(recipe)
    decays = algorithm.policy_decays(step - 1, (step - 1) * derived.updates_per_step)
    return {policy for policy, decay in decays.items() if decay == 0}


def terms_per_update(recipe: Recipe, derived: RunSizes) -> int:
    algorithm, rollout = recipe.rl.algorithm, recipe.rl.rollout
    num_selected = algorithm.num_trained_samples(rollout.group_size)
    return math.ceil(derived.terms_per_rank * num_selected / rollout.group_size)


def denoiser_sigmas(plan: SamplingPlan) -> list[float]:
    """Return the noise levels at which a sampling plan calls the denoiser."""
    sigmas: list[float] = []

    def record_sigma(latents: Tensor, sigma: float) -> Tensor:
        sigmas.append(sigma)
        return torch.zeros_like(latents)

    plan.denoise(record_sigma, torch.zeros(1, 1, 1, 1), [0])
    return sigmas


def num_grouped_calls(sizes: Iterable[int], max_terms: int) -> int:
    """Return the number of forward passes that compute the reference predictions of consecutive micro-batches.

    sizes: number of loss terms in each micro-batch. Micro-batches share a forward pass if they have at most `max_terms`
    loss terms in total.
    """
    calls, remaining = 0, 0
    for size in sizes:
        if size > remaining:
            calls, remaining = calls + 1, max_terms
        remaining -= size
    return calls


def policy_forwards(policy: str, forwards: ForwardCount) -> ForwardCount:
    return dataclasses.replace(forwards, without_adapters=forwards.samples) if policy == "ref" else forwards


def count_evaluation(
    recipe: Recipe,
    num_replicas: int,
    *,
    num_prompts: int,
    num_images: int = 0,
    others: Sequence[int] | None = None,
    rollout_sigmas: Sequence[float] = (),
    model: DiffusionModel | None = None,
) -> dict[str, ForwardCount]:
    """Return {purpose: number of forward passes} for one evaluation.

    The count includes sampling and, in supervised training, the validation loss on `num_images` images or preference
    pairs.
    others: number of guidance passes of each denoising step. None: one in each step if the recipe enables guidance.
    rollout_sigmas: noise levels of a rollout, if validation.rollout_correlation also generates rollout samples.
    model: required if the number of guidance passes depends on the noise level.
    """
    num_samples = min(num_prompts, recipe.validation.num_prompts) * len(recipe.validation.seeds)
    if not recipe.is_rl and recipe.validation.clips == 1:
        num_samples = min(num_samples, recipe.logging.num_samples)
    count_passes = guidance_counter(recipe, model)
    if others is None:
        others = [count_passes(1.0)] * recipe.sampling.eval_steps
    shard_size = math.ceil(num_samples / num_replicas)
    count = count_sampling(recipe, "validation", shard_size, others)
    count += count_sampling(recipe, "validation", shard_size, list(map(count_passes, rollout_sigmas)))
    count = sum([count] * recipe.validation.clips, NO_FORWARDS)
    return {
        "validation": count + (NO_FORWARDS if recipe.is_rl else count_validation_loss(recipe, num_replicas, num_images))
    }


def count_validation_loss(recipe: Recipe, num_replicas: int, num_images: int) -> ForwardCount:
    """Return the number of forward passes for the validation loss on `num_images` held-out samples.

    This number includes the predictions of reference policies.
    """
    settings, size = recipe.supervised_settings, recipe.engine.max_forward_batch
    terms = math.ceil(num_images * NUM_BUCKETS / num_replicas)
    count = ForwardCount(
        math.ceil(terms / max(1, size // settings.items_per_sample)), terms * settings.items_per_sample
    )
    return sum((policy_forwards(policy, count) for policy in settings.reference_policies), count)


def count_sampling(recipe: Recipe, purpose: str, samples: int, others: Sequence[int]) -> ForwardCount:
    """Return the number of forward passes that generate `samples` samples in batches of engine.max_forward_batch.

    others: for each denoising step, the number of passes besides the conditional one. The conditional and the negative
    pass are one joint pass if the doubled batch fits.
    """
    max_joint_rows = recipe.joint_guidance_batches.get(purpose, 0)
    sizes = [len(part) for part in split_into_chunks(range(samples), recipe.engine.max_forward_batch)]
    num_passes, num_guided = len(others) + sum(others), sum(number > 0 for number in others)
    calls = sum(num_passes - (num_guided if 2 * size <= max_joint_rows else 0) for size in sizes)
    return ForwardCount(calls, samples * num_passes)


def guidance_counter(recipe: Recipe, model: DiffusionModel | None = None, *, training: bool = False) -> CountPasses:
    """Return a function that maps a noise level to the number of guidance passes of a prediction at this level.

    training: whether to count the passes of training, which runs the passes of all noise levels.
    """
    settings = recipe.sampling
    if model is None:
        return lambda sigma: int(settings.guides(0, None if training else sigma))

    def count_passes(sigma: float) -> int:
        return len(model.guidance_passes(settings, model.select_expert(sigma), None if training else sigma))

    return count_passes


def scale_forwards(forwards: ForwardCount, fraction: float) -> ForwardCount:
    return ForwardCount(*(math.ceil(number * fraction) for number in dataclasses.astuple(forwards)))


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    forward: int
    backward: int = 0
    recompute: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recompute


def count_flops(
    model: DiffusionModel,
    latent_shape: Sequence[int],
    conditioning: Mapping[str, Tensor],
    *,
    checkpointing: Checkpointing = False,
) -> Flops:
    """Return the denoiser's FLOPs for one sample, with its current adapters and requires_grad flags.

    latent_shape: latent shape of the sample, without batch dimension. conditioning: conditioning tensors of the sample,
    each [1, ...]. Only their shapes and dtypes are used. checkpointing: include the recomputation of block activations
    in the backward pass.
    """
    shadow = copy.copy(model)
    shadow.denoiser = copy_to_meta(model.unwrapped_denoiser)
    latents, sigma = torch.empty(1, *latent_shape, device="meta"), torch.empty(1, device="meta")
    inputs = {name: torch.empty_like(tensor, device="meta") for name, tensor in conditioning.items()}
    extra_shapes = model.input_shapes(latent_shape)
    inputs |= {name: torch.empty(1, *shape, device="meta") for name, shape in extra_shapes.items()}
    return measure_flops(
        shadow.denoiser,
        lambda: shadow.denoise(latents, sigma, inputs, 0),  # all experts have the same architecture
        checkpointing=checkpointing,
    )


def flops_by_purpose(forwards: Mapping[str, ForwardCount], flops: Flops) -> dict[str, ForwardFlops]:
    """Return {purpose: FLOPs} of forward passes. Only training includes backward passes. flops: FLOPs of one sample."""
    work = {}
    for purpose, f in forwards.items():
        trains = purpose == TRAINING_PURPOSE or purpose.endswith(f"_{TRAINING_PURPOSE}")  # NAME_policy: extra adapter
        with_adapters = f.samples - f.without_adapters
        forward = with_adapters * flops.forward + f.without_adapters * flops.forward_without_adapters
        num_backward = f.samples if trains else 0
        work[purpose] = ForwardFlops(forward, num_backward * flops.backward, num_backward * flops.recompute)
    return work
