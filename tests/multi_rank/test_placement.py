"""Ranks shard weights directly from memory-mapped files. Weights and a forward equal a plain load bit for bit."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import CASES as FAMILIES
from multi_rank.training import small_recipe
from wfm_ds.distributed.world import World
from wfm_ds.models import registry
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.training.diffusion_builder import build_diffusion_engine, mark_frozen_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# family, DeepSpeed config, LoRA, dtype of training, dtype of the files
CASES = [
    ("sd3", "zero3", False, "bfloat16", "float32"),
    ("sd3", "zero3", True, "float32", "bfloat16"),
    ("sd3", "zero2", False, "bfloat16", "float32"),
    ("wan22", "zero3", True, "bfloat16", "float32"),  # loading for inference keeps some weights in float32
    ("cosmos25", "zero3", True, "bfloat16", "float32"),  # moves its text projection out of the denoiser before sharding
]


def load(folder, dtype, family, **options):
    return registry.load_model(folder, dtype=DTYPES[dtype], device="cpu", **FAMILIES[family].load_options, **options)


def recipe_of(config, lora, dtype):
    return small_recipe(config, lora=lora, model={"dtype": dtype}, ema={"every": 1})


def first_forward(model, family):
    """Return the predicted velocity of one fixed sample."""
    shape = model.latent_shape(*FAMILIES[family].size)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.denoise(latents, torch.tensor([0.95]), model.encode_text(["a red cube"]), 0)


def build_on_rank(folder, family, config, lora, dtype):
    """Build the engine. Return its first forward, all gathered base weights, and the dtypes of the loaded weights."""
    import deepspeed

    world, recipe = World.join(), recipe_of(config, lora, dtype)
    model = load(folder, dtype, family, mapped=True)
    stored = sorted({str(parameter.dtype) for parameter in model.denoiser.parameters()})
    engine = build_diffusion_engine(model, recipe, derive_run_sizes(recipe, world.size), world, frozenset())
    forward = first_forward(model, family)
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            if "lora_" not in name:
                weights[name.replace(".base_layer", "")] = parameter.detach().clone()
    return {"forward": forward, "weights": weights, "stored": stored}


def restored(folder, target, dtype):
    """Copy a pipeline folder and convert its denoiser weights to `dtype`."""
    shutil.copytree(folder, target)
    for file in target.glob("transformer*/*.safetensors"):
        tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in load_file(file).items()}
        file.unlink()  # it may be a link to the original file
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def name_case(case):
    family, config, lora, dtype, _ = case
    return pytest.param(case, id=f"{family}-{config}-{'lora' if lora else 'full'}-{dtype}")


@pytest.mark.parametrize("case", [name_case(case) for case in CASES])
def test_shards_of_mapped_files_equal_a_plain_load(case, two_ranks, tiny_pipelines, tmp_path):
    family, config, lora, dtype, stored = case
    folder = restored(tiny_pipelines(family), tmp_path / "base", stored)
    model = load(folder, dtype, family)
    mark_frozen_layers(model, recipe_of(config, lora, dtype))
    for parameter in model.denoiser.parameters():  # in training, all weights have the same dtype
        parameter.data = parameter.data.to(DTYPES[dtype])
    weights, forward = dict(model.denoiser.named_parameters()), first_forward(model, family)
    for rank in two_ranks.run(build_on_rank, folder=str(folder), family=family, config=config, lora=lora, dtype=dtype):
        assert rank["stored"] == [f"torch.{stored}"]
        assert rank["weights"].keys() == weights.keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in rank["weights"].items())
        assert torch.equal(rank["forward"], forward)
