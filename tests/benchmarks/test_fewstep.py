"""The study of few-step distillation: its recipes are valid, and its distance compares means and covariances."""

import numpy as np
import pytest

from benchmarks.learning.fewstep import FROM_SFT, FROM_TEACHER, TEACHER, VARIANTS, frechet_distance
from wfm_ds.recipe import file as recipe_file


def test_each_run_has_a_valid_recipe_and_generates_in_the_steps_that_its_row_names():
    assert set(VARIANTS) == {TEACHER, *FROM_TEACHER, *FROM_SFT}
    for name, variant in VARIANTS.items():
        start = ["lora.init_from=teacher/lora"] if name in FROM_TEACHER else []
        recipe = recipe_file.load_recipe(variant.recipe, [*variant.overrides, *start])
        steps = 1 if name == "dmd2_one_step" else 12 if name in (TEACHER, "guided") else 4
        assert recipe.sampling.eval_steps == steps, name
        assert (recipe.sampling.guidance_scale == 1) == (name != "guided"), name


def test_the_frechet_distance_is_that_of_normal_distributions():
    images = np.random.default_rng(0).integers(100, 150, (2000, 2, 2)).astype(np.uint8)
    assert frechet_distance(images, images) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(images, images + 51) == pytest.approx(4 * 0.2**2, rel=1e-4)
    wider = (2.0 * (images - 125.0) + 125).astype(np.uint8)  # twice the standard deviation
    variance = np.trace(np.cov(images.reshape(-1, 4).T / 255))
    shift = ((wider.reshape(-1, 4).mean(0) - images.reshape(-1, 4).mean(0)) / 255) ** 2
    assert frechet_distance(images, wider) == pytest.approx(variance + shift.sum(), rel=0.02)
