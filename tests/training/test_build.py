"""The noise levels and sampling plans that an RL algorithm takes from the model."""

from pathlib import Path

import pytest
import torch

from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.recipe import file as recipe_file
from wfm_ds.training.diffusion_builder import make_rl_algorithm

TINY = Path(__file__).parents[1] / "recipes"


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")


def test_rollouts_take_the_recipe_s_grid_and_validation_the_pipeline_s(model):
    stock, even = (
        recipe_file.load_recipe(TINY / "sd3_nft.yaml", [f"sampling.grid={grid}"]) for grid in ("stock", "even")
    )
    levels = [[step.sigma for step in make_rl_algorithm(recipe, model).plan(1).steps] for recipe in (stock, even)]
    assert levels[0] == model.sigmas(4, (4, 16, 16))[:-1].tolist()
    assert levels[1] == pytest.approx([1, 0.9, 0.75, 0.5])  # 3 q / (1 + 2 q) at 1, 3/4, 1/2, 1/4
    plans = [
        Sampler(
            model=model, text_cache=TextCache(model), settings=recipe.sampling, forward=CountingForward(model.denoise)
        ).evaluation_plan()
        for recipe in (stock, even)
    ]
    assert plans[0].steps == plans[1].steps


def test_stratified_levels_are_shifted_as_the_model_s_scheduler_shifts(model):
    words = ["algorithm.levels=stratified", "algorithm.num_levels=2", "algorithm.timestep_fraction=0.99"]
    shifts = [
        make_rl_algorithm(recipe_file.load_recipe(TINY / "sd3_nft.yaml", [*words, *more]), model).shift
        for more in ([], ["algorithm.flow_shift=2"])
    ]
    assert shifts == [3.0, 2.0]
