"""A rollout worker's base: what it is kept in is part of what trainer and worker must have in common."""

import pytest
import torch

from wfm_ds.engine.fp8_linear import Fp8Linear
from wfm_ds.errors import RecipeError
from wfm_ds.models import registry
from wfm_ds.recipe import file as recipe_file
from wfm_ds.rollout.remote.generator import ChunkGenerator
from wfm_ds.rollout.remote.identity import compute_identity
from wfm_ds.rollout.remote.worker import build_generator


@pytest.fixture
def asked(root):
    def load(*overrides):
        return recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft_async.yaml", list(overrides))

    return load


def of_trainer(recipe):
    return compute_identity(recipe, registry.load_model("tiny:sd3", dtype=torch.bfloat16, device="cpu"))


@pytest.mark.parametrize(
    ("trainer", "worker", "named"),
    [
        (["model.base_precision=fp8"], [], r"model, rollout\.base_precision differ"),
        ([], ["rollout.base_precision=fp8"], r"worker's rollout\.base_precision differ"),
        (["rollout.base_precision=fp8"], [], r"worker's rollout\.base_precision differ"),
    ],
)
def test_a_worker_with_another_base_than_the_trainer_expects_is_refused(trainer, worker, named, asked):
    with pytest.raises(RecipeError, match=named):
        build_generator(asked(*worker), "cpu", None, of_trainer(asked(*trainer)))


def test_a_worker_keeps_the_base_as_the_recipe_says(asked):
    recipe = asked("rollout.base_precision=fp8", "run.output_dir=unused")
    generator = build_generator(recipe, "cpu", None, of_trainer(recipe))
    assert isinstance(generator, ChunkGenerator)
    denoiser = generator.sampler.model.denoiser
    assert [part for part in denoiser.modules() if isinstance(part, Fp8Linear)]
    assert {parameter.dtype for parameter in denoiser.parameters()} == {generator.sampler.model.dtype}
