"""Predicted forward counts of a recipe, and the counts that a run of it recorded."""

import json

import torch

from benchmarks.forward_counts import (
    count_evaluation,
    count_rl_step,
    count_sft_step,
    denoiser_sigmas,
    guidance_counter,
    sum_forwards,
)
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.models import registry
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes

CALLS, SAMPLES = "perf/forwards_", "perf/forward_samples_"
MANY = 1000  # more prompts or images than any recipe evaluates


def counted(folder):
    """Return, for each step of the run in `folder`, rank 0's (forwards, samples) by purpose."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    purposes = [[tag.removeprefix(CALLS) for tag in line if tag.startswith(CALLS)] for line in lines]
    return [
        {name: (line[CALLS + name], line[SAMPLES + name]) for name in names}
        for line, names in zip(lines, purposes, strict=True)
        if names
    ]


def predicted(folder, world_size, *, num_images=0):
    """Return the same numbers, predicted from the resolved recipe of the run in `folder`."""
    recipe = recipe_file.load_recipe(folder / "recipe.yaml")
    derived, size = derive_run_sizes(recipe, world_size), recipe.sampling
    model = registry.load_model(recipe.model.path, dtype=torch.float32, device="cpu", guardrail=recipe.model.guardrail)
    others = list(map(guidance_counter(recipe, model), model.evaluation_sigmas(size)[:-1].tolist()))
    if recipe.is_rl:
        algorithm = build_rl_algorithm(recipe, model.rollout_sigmas(size))
        cheap = size.candidate_sampling
        explored_at = None if cheap is None else model.rollout_sigmas(cheap)[:-1].tolist()
    compared = denoiser_sigmas(algorithm.plan(1)) if recipe.validation.rollout_correlation else []
    every, steps = recipe.validation.every, []
    for step in range(1, recipe.run.steps + 1):
        trained = (
            count_rl_step(recipe, derived, algorithm, step, model=model, exploration_sigmas=explored_at)
            if recipe.is_rl
            else count_sft_step(recipe, derived)
        )
        replicas = derived.num_replicas
        validated = count_evaluation(
            recipe,
            replicas,
            num_prompts=MANY,
            num_images=num_images,
            others=others,
            rollout_sigmas=compared,
            model=model,
        )
        forwards = sum_forwards(trained, validated if every and step % every == 0 else {})
        steps.append({purpose: (f.calls, f.samples) for purpose, f in forwards.items()})
    return steps
