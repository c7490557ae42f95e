"""Number of frames read from conditioning clips; tests/multi_rank/test_given_frames.py tests whole runs."""

from pathlib import Path

import pytest
import torch

from each_case import check_each
from wfm_ds.data.datasets import build_buckets
from wfm_ds.models import registry
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.recipe import file as recipe_file

TINY = Path(__file__).parent.parent / "recipes"
EDM = ["sampling.num_frames=13", "sampling.height=32", "sampling.width=32"]


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return registry.load_model(tiny_pipelines("cosmos25"), dtype=torch.float32, device="cpu", guardrail="off")


@check_each(
    ("name", "overrides", "frames"),
    [
        ("cosmos25_i2v_nft", [], 1),
        ("cosmos25_i2v_nft", ["algorithm.max_num_conditional_frames=2"], 5),
        ("cosmos25_ddrl", ["algorithm.max_num_conditional_frames=2", "algorithm.data_beta=0"], 5),
        ("cosmos25_ddrl", ["algorithm.max_num_conditional_frames=2"], 13),  # the data loss needs the whole clip
        ("cosmos25_sft", ["algorithm.max_num_conditional_frames=1"], 13),
        ("cosmos25_ddrl", ["algorithm.data_beta=0"], 13),
    ],
)
def test_rollouts_read_only_the_conditioning_frames(model, name, overrides, frames):
    recipe = recipe_file.load_recipe(TINY / f"{name}.yaml", [*EDM, *overrides])
    assert {framing.num_frames for framing in build_buckets(recipe, model).framings} == {frames}


def test_frames_without_conditioning_are_zero():
    latents = torch.randn(3, 2, 4, 5)
    whole = pad_num_frames(latents, 6)
    assert whole.shape == (3, 6, 4, 5)
    assert torch.equal(whole[:, :2], latents)
    assert not whole[:, 2:].any()
    assert torch.equal(pad_num_frames(latents, 2), latents)
