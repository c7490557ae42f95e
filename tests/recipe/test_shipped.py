"""Rules for all full-size recipes of a kind, each with its reason."""

from itertools import chain

import pytest
import torch

from benchmarks.released import RELEASED
from each_case import check_each
from shipped import SHIPPED

RECIPES = {f"{name}.yaml": recipe for name, recipe in SHIPPED.items()}
GIB = 2**30


def names(algorithm, *, full_size=True):
    found = [name for name, recipe in RECIPES.items() if recipe.algorithm.name == algorithm]
    return [name for name in found if "/" not in name] if full_size else found


@check_each("name", names("flow_grpo", full_size=False))
def test_log_probabilities_that_are_compared_come_from_batches_of_one_size(name):
    """Another batch size uses other kernels. In bfloat16 this changes log-probabilities by about the published clip
    range; in float32, which the small recipes use, by about a thousandth of their clip range."""
    recipe = RECIPES[name]
    equal_batches = recipe.engine.max_forward_batch == recipe.engine.micro_batch_size
    compares_with_rollout = recipe.algorithm.old_log_prob == "rollout" or (
        recipe.algorithm.old_log_prob == "auto" and recipe.algorithm.updates_per_rollout > 1
    )
    if recipe.model.dtype == "float32":
        by_divergence = recipe.algorithm.trust_region == "divergence"
        assert (recipe.algorithm.divergence if by_divergence else recipe.algorithm.clip_ratio) >= 1e-3
    else:
        assert equal_batches or not compares_with_rollout


@check_each("name", [name for name in RECIPES if name.startswith("sd3_") and RECIPES[name].is_rl])
def test_prompts_of_sd3_are_as_long_as_in_the_published_runs(name):
    assert RECIPES[name].model.max_sequence_length == 128


@check_each("name", [*names("ddrl"), *(n for n in names("diffusion_nft") if n.startswith(("cp", "sana")))])
def test_recipes_of_cosmos_rl_divide_by_its_standard_deviation(name):
    assert RECIPES[name].algorithm.std_unbiased
    assert RECIPES[name].algorithm.advantage_std == "group"


@pytest.mark.parametrize(("name", "layers", "heads"), [("cp_ddrl_2b.yaml", 28, 16), ("cp_ddrl_14b.yaml", 36, 40)])
def test_ddrl_of_all_weights_fits_gpus_of_80_gb(name, layers, heads):
    recipe, ranks = RECIPES[name], 8
    assert recipe.model.gradient_checkpointing
    assert recipe.engine.micro_batch_size == recipe.engine.max_forward_batch == 1
    assert recipe.algorithm.data_forward == "separate"
    kept, inside = activations(recipe.sampling, heads)
    shared = (layers * kept + inside) / recipe.engine.sequence_parallel  # one sample: a rollout state or data
    parameters = sum(p.numel() for p in denoiser(layers, heads).parameters())
    weights = 2 * parameters / (1 if recipe.engine.deepspeed == "zero2" else ranks)
    states = (4 + 12 + 4) * parameters / ranks  # gradients; master weights and two moments; weight average
    text_encoder = 8.3e9 * 2
    assert shared + weights + states + text_encoder < 76 * GIB


def denoiser(layers, heads):
    with torch.device("meta"):
        small = dict(num_layers=layers, num_attention_heads=heads, concat_padding_mask=False)
        return RELEASED["cosmos2b"].transformer(**small).bfloat16()


def activations(sampling, heads):
    """Return bytes of one sample: kept per checkpointed block, and inside a block during recomputation."""
    frames, height, width = 1 + (sampling.num_frames - 1) // 4, sampling.height // 8, sampling.width // 8
    tokens = frames * height * width // 4
    saved = [saved_bytes(denoiser(layers, heads), (frames, height, width), tokens) for layers in (1, 2)]
    return tokens * heads * 128 * 2, saved[1] - saved[0]


def saved_bytes(model, size, tokens):
    """Return the bytes saved for the backward pass. GPUs do not save attention weights [tokens, tokens]."""
    own = {p.untyped_storage()._cdata for p in chain(model.parameters(), model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own and tensor.numel() < tokens**2:
            kept[storage._cdata] = tensor
        return tensor

    def empty(*shape):
        return torch.empty(1, *shape, device="meta", dtype=torch.bfloat16)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(empty(16, *size), empty(1, size[0], 1, 1), empty(512, 100352), fps=16, condition_mask=empty(1, *size))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
