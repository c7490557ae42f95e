"""Losses and algorithms: pure functions and classes without deepspeed, sockets or files."""

from typing import Any, TypeAlias

from torch import Tensor

from wfm_ds.algorithms import base
from wfm_ds.algorithms.supervised import Supervised
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms.base import ModelFacts
from wfm_ds.recipe.schema import Recipe
from wfm_ds.user_class import import_class

RlAlgorithm: TypeAlias = base.RlAlgorithm[Any, Any]


def build_rl(recipe: Recipe, sigmas: Tensor, model: ModelFacts | None = None) -> RlAlgorithm:
    """The algorithm that the recipe names, for this rollout grid [N+1] float64, and for the model that it is to train:
    without one it can plan rollouts. RecipeError if it cannot work on the grid."""
    settings = recipe.rl.algorithm
    path = settings.implementation or settings.name
    algorithm: type[RlAlgorithm] = import_class(path, base.RlAlgorithm, key="algorithm.name", error=RecipeError)
    return algorithm(recipe, sigmas, model)


def build_supervised(recipe: Recipe) -> Supervised:
    """The supervised algorithm that the recipe names."""
    settings = recipe.supervised
    path = settings.implementation
    algorithm: type[Supervised] = import_class(path, Supervised, key="algorithm.name", error=RecipeError)
    return algorithm(settings)


def rl_policies(recipe: Recipe) -> frozenset[str]:
    """Copies of the weights that the recipe's algorithm compares or rolls out with."""
    return recipe.rl.algorithm.policies(recipe.rl.rollout)


def engine_policies(recipe: Recipe) -> frozenset[str]:
    """The copies of the weights that the engine keeps for this recipe."""
    algorithm = rl_policies(recipe) if recipe.is_rl else frozenset(recipe.algorithm.references)
    return algorithm | ({"ema"} if recipe.ema is not None else set())
