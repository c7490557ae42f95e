"""Recipes and rollouts for tests of RL algorithms."""

from types import SimpleNamespace

from wfm_ds.recipe.schema import Recipe
from wfm_ds.types import Prompt, Rollout


def rl_recipe(algorithm, **sections):
    """Return a recipe with the given algorithm settings.

    `sections` maps a section name to keys that are merged into it, or to a value that replaces it.
    """
    recipe = {
        "run": {"output_dir": "out", "steps": 3},
        "model": {"path": "tiny:sd3"},
        "data": {"kind": "prompts", "path": "p"},
        "sampling": {"height": 32, "width": 32, "steps": 5},
        "algorithm": algorithm,
        "rollout": {"prompts_per_step": 2, "group_size": 2},
        "reward": {"functions": [{"name": "color"}]},
    }
    for name, keys in sections.items():
        recipe[name] = {**recipe.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return Recipe.model_validate(recipe)


def make_rollout(i, clean_latents, **fields):
    known = {"sample_id": f"s{i}", "group_id": "g", "prompt": Prompt(id="p", text="p")}
    return Rollout(**known | {"seed": 100 + i, "noise_seed": 100 + i, "clean_latents": clean_latents} | fields)


def on_one_rank(rollouts):
    """Return the batch of a single rank that holds all samples."""
    return SimpleNamespace(local_rollouts=rollouts, first_index=0)
