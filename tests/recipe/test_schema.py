"""What a recipe says of itself: its views and what its algorithm states."""

import pytest

from wfm_ds.recipe.schema import Recipe

BASE = {
    "run": {"output_dir": "out", "steps": 3},
    "model": {"path": "tiny:sd3"},
    "sampling": {"height": 32, "width": 32},
}
RL = {
    **BASE,
    "data": {"kind": "prompts", "path": "p"},
    "algorithm": {"name": "diffusion_nft"},
    "rollout": {"group_size": 4},
    "reward": {"functions": [{"name": "color"}]},
}
SFT = {**BASE, "data": {"kind": "paired", "path": "p"}, "algorithm": {"name": "sft"}}


def test_the_view_of_reinforcement_learning_holds_its_three_sections():
    recipe = Recipe.model_validate(RL)
    assert recipe.is_rl
    assert recipe.rl.algorithm is recipe.algorithm
    assert recipe.rl.rollout is recipe.rollout
    assert recipe.rl.reward is recipe.reward
    with pytest.raises(AttributeError):
        recipe.rl.rollout = None
    with pytest.raises(TypeError, match="diffusion_nft is not sft"):
        recipe.sft  # noqa: B018


def test_supervised_fine_tuning_has_no_such_view():
    recipe = Recipe.model_validate(SFT)
    assert not recipe.is_rl
    assert recipe.sft is recipe.algorithm
    with pytest.raises(TypeError, match="sft has neither rollouts nor rewards"):
        recipe.rl  # noqa: B018
