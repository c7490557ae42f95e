"""What is optimised: pure functions and classes without deepspeed, sockets or files."""

from typing import Any, TypeAlias

from torch import Tensor

from wfm_ds.algorithms import base
from wfm_ds.algorithms.ddrl import Ddrl
from wfm_ds.algorithms.diffusion_nft import DiffusionNft
from wfm_ds.algorithms.flow_grpo import FlowGrpo
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe

RlAlgorithm: TypeAlias = base.RlAlgorithm[Any, Any]
RL_ALGORITHMS: dict[str, type[RlAlgorithm]] = {"diffusion_nft": DiffusionNft, "flow_grpo": FlowGrpo, "ddrl": Ddrl}


def build_rl(recipe: Recipe, sigmas: Tensor) -> RlAlgorithm:
    """The algorithm that the recipe names, for this rollout grid [N+1] float64. RecipeError if it cannot work on it."""
    return _named(recipe)(recipe, sigmas)


def rl_policies(recipe: Recipe) -> frozenset[str]:
    """Copies of the weights that the recipe's algorithm compares or rolls out with."""
    return _named(recipe).policies(recipe)


def _named(recipe: Recipe) -> type[RlAlgorithm]:
    if recipe.algorithm.name not in RL_ALGORITHMS:
        raise RecipeError(f"algorithm.name {recipe.algorithm.name} is not a reinforcement learning algorithm")
    return RL_ALGORITHMS[recipe.algorithm.name]


def engine_policies(recipe: Recipe) -> frozenset[str]:
    """The copies of the weights that the engine keeps for this recipe."""
    algorithm = rl_policies(recipe) if recipe.is_rl else frozenset[str]()
    return algorithm | ({"ema"} if recipe.ema is not None else set())
