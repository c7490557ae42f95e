"""The forwards that a recipe is predicted to run, beside those that a run of it counted."""

import json

import torch

from wfm_ds.algorithms import build_rl
from wfm_ds.models import registry
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.derived import derive
from wfm_ds.training.forwards import added, evaluation, evaluations, guided_by, rl_step, sft_step

CALLS, SAMPLES = "perf/forwards_", "perf/forwarded_"
MANY = 1000  # prompts or images, more than a recipe shows


def counted(folder):
    """By step of the recipe in `folder`: forwards of rank 0 by purpose, and the samples in them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    purposes = [[tag.removeprefix(CALLS) for tag in line if tag.startswith(CALLS)] for line in lines]
    return [
        {name: (line[CALLS + name], line[SAMPLES + name]) for name in names}
        for line, names in zip(lines, purposes, strict=True)
        if names
    ]


def predicted(folder, world_size, *, num_images=0):
    """The same of the recipe that the run in `folder` resolved."""
    recipe = recipe_file.load(folder / "recipe.yaml")
    derived, size = derive(recipe, world_size), recipe.sampling
    model = registry.load(recipe.model.path, dtype=torch.float32, device="cpu", guardrail=recipe.model.guardrail)
    guided, shape = guided_by(recipe, model.expert_of), model.latent_shape(size.height, size.width, size.num_frames)
    guided_steps = sum(guided(float(sigma)) for sigma in model.sigmas(size.eval_steps, shape)[:-1])
    if recipe.is_rl:
        algorithm = build_rl(recipe, model.rollout_sigmas(size))
        cheap = size.of_candidates
        explored_at = None if cheap is None else model.rollout_sigmas(cheap)[:-1].tolist()
    compared = evaluations(algorithm.plan(1)) if recipe.validation.rollout_correlation else []
    every, steps = recipe.validation.every, []
    for step in range(1, recipe.run.steps + 1):
        trained = (
            rl_step(recipe, derived, algorithm, step, guided=guided, explored_at=explored_at)
            if recipe.is_rl
            else sft_step(recipe, derived)
        )
        replicas = derived.num_replicas
        validated = evaluation(
            recipe,
            replicas,
            num_prompts=MANY,
            num_images=num_images,
            guided_steps=guided_steps,
            rollout=compared,
            guided=guided,
        )
        forwards = added(trained, validated if every and step % every == 0 else {})
        steps.append({purpose: (f.calls, f.samples) for purpose, f in forwards.items()})
    return steps
