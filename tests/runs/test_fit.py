"""Memory estimate of a recipe compared with the memory of a GPU, and the advised keys."""

import dataclasses
import re

import pytest
import torch

from each_case import check_each
from wfm_ds.memory.advice import (
    fits_memory,
    memory_verdict,
    smallest_gpu,
    suggest_keys,
    suggest_keys_after_oom,
    suggest_part_keys,
)
from wfm_ds.memory.estimate import MemoryEstimate, estimate_memory, format_memory_table
from wfm_ds.models import registry
from wfm_ds.recipe import file as recipe_file

GB = 10**9


def found(**phases):
    return MemoryEstimate(
        phases=phases,
        world_size=8,
        num_parameters=1000,
        num_trained=10,
        zero_stage=2,
        checkpoint_bytes=0,
        export_bytes=0,
    )


@pytest.fixture
def recipe(root):
    return recipe_file.load_recipe(root / "recipes" / "sd3_nft.yaml", [])


def test_the_peak_is_the_largest_phase():
    sizes = found(sampling={"weights": 4 * GB, "activations": 30 * GB}, train={"weights": 4 * GB, "activations": GB})
    assert (sizes.peak_phase, sizes.peak_bytes) == ("sampling", 34 * GB)
    table = format_memory_table(sizes)
    assert "31.66 GiB peak, in the phase sampling (ZeRO stage 2, 8 ranks)" in table[1]
    assert [line.split()[0] for line in table[2:]] == ["GiB", "weights", "activations", "all"]


@check_each(("needed", "size"), [(20, 24), (23, 32), (70, 80), (74, 141), (500, None)])
def test_the_smallest_gpu_with_enough_memory_is_named(needed, size):
    assert smallest_gpu(needed * GB) == size
    assert fits_memory(70 * GB, 80 * GB)
    assert not fits_memory(75 * GB, 80 * GB)


def test_the_largest_part_names_the_first_key(recipe):
    train = found(train={"weights": 5 * GB, "activations": 90 * GB})
    assert suggest_keys(recipe, train)[:2] == ["model.gradient_checkpointing: true", "engine.micro_batch_size below 9"]
    sampling = found(sampling={"weights": 5 * GB, "text encoders": 6 * GB, "activations": 90 * GB})
    assert suggest_keys(recipe, sampling)[0] == "engine.max_forward_batch below 18"
    assert "data.cache_text: auto" in suggest_keys(recipe, sampling)
    heavy = found(train={"weights": 95 * GB, "activations": GB})
    assert suggest_keys(recipe, heavy)[:2] == ["engine.deepspeed: zero3", "model.base_precision: fp8"]


@check_each(("family", "can_shard"), [("sd3", True), ("wan22", True), ("flux2", False), ("z_image", False)])
def test_sequence_parallelism_is_advised_where_the_network_supports_it(root, family, can_shard):
    recipe = recipe_file.load_recipe(root / "recipes" / "sd3_nft.yaml", [f"model.path=tiny:{family}"])
    for keys in (
        suggest_keys_after_oom(recipe, "train", num_ranks=8),
        suggest_keys(recipe, found(sampling={"activations": 90 * GB})),
    ):
        assert ("engine.sequence_parallel above 1" in keys) is can_shard


def test_the_verdict_names_the_gpu_or_the_keys(recipe):
    small = found(train={"weights": 5 * GB})
    assert memory_verdict(recipe, small, None) == "  fits a GPU of 24 GB"
    assert memory_verdict(recipe, small, 80 * GB) == "  fits the 75 GiB of this GPU"
    large = dataclasses.replace(small, phases={"train": {"activations": 400 * GB}})
    for memory in (None, 80 * GB):
        assert "change model.gradient_checkpointing: true, engine.micro_batch_size" in memory_verdict(
            recipe, large, memory
        )


# A recipe that uses every kind of memory, on two ranks.
HEAVY = (
    *("model.dtype=float32", "model.vae_dtype=float32", "engine.deepspeed=zero2", "engine.micro_batch_size=2"),
    *("engine.max_forward_batch=8", "lora.rank=8", "sampling.guidance_scale=2", "sampling.guidance_batch=joint"),
    *("rollout.merge_lora=true", "rollout.cuda_graph=true", "rollout.prompts_per_step=2", "rollout.group_size=4"),
    *("sampling.height=64", "sampling.width=64"),
)
# The value to set for an advised key if the advice says only "lower" or "raise".
LOWER = {
    "engine.micro_batch_size below 2": "engine.micro_batch_size=1",
    "engine.max_forward_batch below 8": "engine.max_forward_batch=1",
    "lora.rank below 8": "lora.rank=1",
    "sampling.height, width or num_frames": "sampling.height=32",
    "engine.sequence_parallel above 1": "engine.sequence_parallel=2 rollout.cuda_graph=false",
    "no ema section": "ema=null",
}


@pytest.fixture(scope="module")
def sized(root, tiny_pipelines):
    """`sized(*overrides)`: return the heavy recipe and its estimated bytes by phase and part on a GPU."""
    folder = tiny_pipelines("sd3")

    def sizes(*overrides):
        heavy = recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft.yaml", [*HEAVY, *overrides])
        model = registry.load_model(folder, dtype=getattr(torch, heavy.model.dtype), device="cpu")
        return heavy, estimate_memory(heavy, model, 2, device="cuda").phases

    return sizes


PHASES = ("sampling", "decode", "references", "train", "optimizer")


@pytest.mark.slow
def test_each_advised_key_lowers_its_part_of_the_memory(sized):
    heavy, before = sized()
    asked: dict[str, set[tuple[str, str]]] = {}
    for phase in PHASES:
        for part in before[phase]:
            for key in suggest_part_keys(part, phase, heavy):
                asked.setdefault(key, set()).add((phase, part))
    not_estimated = {"rollout.cuda_graph: false"}  # the estimate does not include CUDA graph memory
    not_keys = {key for key in asked.keys() - LOWER.keys() if not re.match(r"[a-z]+\.[a-z_]+", key)}
    assert not_keys == {"reduce_bucket_size and stage3_max_reuse_distance of the DeepSpeed JSON", "more ranks"}
    assert {
        "model.vae_dtype: bfloat16",
        "sampling.guidance_batch: separate",
        "rollout.merge_lora: false",
    } < asked.keys()
    useless = []
    for key in asked.keys() - not_keys - not_estimated - {"rollout.prompts_per_step, or more ranks"}:
        _, after = sized(*LOWER.get(key, key.replace(": ", "=")).split())
        useless += [
            (key, phase, part) for phase, part in asked[key] if after[phase].get(part, 0) >= before[phase][part]
        ]
    assert useless == []


def test_keys_at_their_minimum_are_not_advised(root):
    light = ["model.dtype=bfloat16", "model.vae_dtype=bfloat16", "lora.rank=1", "sampling.guidance_scale=2"]
    light += ["model.gradient_checkpointing=true", "engine.micro_batch_size=1", "engine.deepspeed=zero3_offload"]
    recipe = recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft.yaml", light)
    told = {key for phase in PHASES for key in suggest_keys_after_oom(recipe, phase, num_ranks=1)}
    least = ("dtype", "lora", "joint", "guidance", "graph", "checkpointing", "micro_batch", "zero3", "parallel")
    assert not [key for key in told if any(word in key for word in least)]


def test_an_ema_that_copies_all_weights_is_named(root):
    full = recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_sft.yaml", ["ema.decay=0.9"])
    assert suggest_part_keys("optimizer states", "train", full)[:2] == ["a lora section", "optimizer.name: adamw8bit"]
    assert suggest_part_keys("policies", "train", full)[:2] == ["a lora section", "no ema section"]
    assert "engine.micro_batch_size below 4" in suggest_part_keys("activations", "encode", full)
