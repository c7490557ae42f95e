"""Training algorithms and their losses. This package uses only torch and numpy: no DeepSpeed, sockets or files."""

from typing import Any, TypeAlias

from torch import Tensor

from wfm_ds.algorithms import base
from wfm_ds.algorithms.supervised import SupervisedAlgorithm
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms.base import ModelProperties
from wfm_ds.recipe.schema import Recipe
from wfm_ds.user_class import import_class

RlAlgorithm: TypeAlias = base.RlAlgorithm[Any, Any]


def build_rl_algorithm(recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> RlAlgorithm:
    """Build the recipe's RL algorithm.

    sigmas: [N+1] float64, the noise levels of the N rollout steps and a final 0. model: properties of the model to
    train; None if rollouts are only planned. Raises RecipeError if the algorithm does not support these noise levels,
    or uses a policy that the engine does not provide.
    """
    settings = recipe.rl.algorithm
    path = settings.implementation or settings.name
    algorithm_class: type[RlAlgorithm] = import_class(path, base.RlAlgorithm, key="algorithm.name", error=RecipeError)
    algorithm = algorithm_class(recipe, sigmas, model)
    if algorithm.rollout_policy == "ema":
        raise RecipeError(f"algorithm.name {path}: rollout_policy cannot be ema: set it to train, old or ref")
    provided = engine_policy_copies(recipe) | {"train", *settings.extra_adapters, *settings.list_lora_teachers()}
    provided |= {"old"} if algorithm.uses_old_predictions else set()
    policies = {algorithm.reference_weights.get(name, name) for name in algorithm.references}
    if "ema" in policies and recipe.ema is None:
        raise RecipeError(f"algorithm.name {path}: references names ema: add the section `ema` to the recipe")
    if missing := sorted({*policies, algorithm.rollout_policy} - provided):
        raise RecipeError(
            f"algorithm.name {path}: references or rollout_policy names {' and '.join(missing)}, but list_policies of "
            "the settings does not return it: add it there"
        )
    return algorithm


def build_supervised_algorithm(recipe: Recipe) -> SupervisedAlgorithm:
    settings = recipe.supervised_settings
    path = settings.implementation
    algorithm: type[SupervisedAlgorithm] = import_class(
        path, SupervisedAlgorithm, key="algorithm.name", error=RecipeError
    )
    return algorithm(settings)


def engine_policy_copies(recipe: Recipe) -> frozenset[str]:
    """Return the names of all policy copies of a run, including `ema`."""
    if recipe.is_rl:
        policies = recipe.rl.algorithm.list_policies(recipe.rl.rollout)
    else:
        policies = frozenset(recipe.algorithm.reference_policies)
    return policies | ({"ema"} if recipe.ema is not None else set())
