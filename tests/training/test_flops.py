import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.forward_counts import ForwardCount, ForwardFlops, count_flops, flops_by_purpose
from each_case import check_each
from wfm_ds.engine.flop_counter import Flops, copy_to_meta, make_flop_counter
from wfm_ds.engine.policies import add_adapters
from wfm_ds.models import registry
from wfm_ds.recipe.sections import LoraRecipe

SHAPE = (4, 16, 16)


@pytest.fixture
def model(tiny_pipelines):
    model = registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")
    model.unwrapped_denoiser.requires_grad_(True)
    return model


def multiply_adds(module, run):
    """Return {name: (multiply-adds, input requires a gradient)} of linear and convolution layers in a real forward."""
    seen = {}

    def hook(name):
        def record(layer, inputs, output):
            assert name not in seen
            seen[name] = (output.numel() * layer.weight[0].numel(), inputs[0].requires_grad)

        return record

    layers = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    run()
    for handle in handles:
        handle.remove()
    return seen


def one_sample(model):
    return lambda: model.denoise(torch.randn(1, *SHAPE), torch.tensor([0.5]), model.encode_text(["a"]))


def attention_flops(model):
    """Return 4 * queries * keys * width: all blocks attend to image and text, dual blocks also to the image alone."""
    config, image = model.config, model.num_tokens(SHAPE)
    joint = image + model.encode_text(["a"])["prompt_embeds"].shape[1]
    width = config.num_attention_heads * config.attention_head_dim
    return 4 * width * (config.num_layers * joint**2 + len(config.dual_attention_layers) * image**2)


def test_forward_flops_are_two_per_multiply_add_of_a_real_forward(model):
    linear = 2 * sum(n for n, _ in multiply_adds(model.unwrapped_denoiser, one_sample(model)).values())
    flops = count_flops(model, SHAPE, model.encode_text(["a"]))
    assert flops.forward == linear + attention_flops(model) == flops.forward_without_adapters
    assert flops.recompute == 0


@pytest.mark.slow
def test_backward_flops_are_two_forwards_minus_unneeded_input_gradients(model):
    by_layer = multiply_adds(model.unwrapped_denoiser, one_sample(model))
    first = [name for name, (_, passes_on) in by_layer.items() if not passes_on]
    assert "context_embedder" in first
    flops = count_flops(model, SHAPE, model.encode_text(["a"]), checkpointing=True)
    assert flops.backward == 2 * flops.forward - 2 * sum(by_layer[name][0] for name in first)
    outside_blocks = 2 * sum(n for name, (n, _) in by_layer.items() if "transformer_blocks" not in name)
    assert flops.recompute == flops.forward - outside_blocks
    kept = count_flops(model, SHAPE, model.encode_text(["a"]), checkpointing="attention")
    assert kept == dataclasses.replace(flops, recompute=flops.recompute - attention_flops(model))


def test_frozen_layers_pass_gradients_on_and_adapters_get_them_too(model):
    base = count_flops(model, SHAPE, model.encode_text(["a"]))
    add_adapters(model.unwrapped_denoiser, LoraRecipe(rank=3, alpha=6), model.default_lora_targets, ["old"], seed=0)
    flops = count_flops(model, SHAPE, model.encode_text(["a"]))
    by_layer = multiply_adds(model.unwrapped_denoiser, one_sample(model))
    adapters = 2 * sum(n for name, (n, _) in by_layer.items() if "lora" in name)
    assert flops.forward_without_adapters == base.forward
    assert flops.forward == base.forward + adapters
    assert not any(".old." in name for name in by_layer)
    passed_on = 2 * sum(n for n, passes_on in by_layer.values() if passes_on)
    assert flops.backward == passed_on + adapters + 2 * attention_flops(model)


@check_each("groups", [1, 6])
@check_each("transposed", [False, True])
def test_gradients_of_a_convolution_cost_as_much_as_it_does_each(groups, transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(6, 12, 3, stride=2, groups=groups, device="meta")
    with make_flop_counter() as counter:
        out = layer(torch.empty(5, 6, 9, 7, device="meta", requires_grad=True))
        forward = counter.get_total_flops()
        out.sum().backward()
    places = 9 * 7 if transposed else out.shape[2] * out.shape[3]
    assert forward == 2 * 5 * places * 9 * 6 * 12 // groups
    assert counter.get_total_flops() == 3 * forward


def test_counting_leaves_the_model_alone_and_takes_no_memory(model):
    before = {name: p.clone() for name, p in model.unwrapped_denoiser.named_parameters()}
    shadow = copy_to_meta(model.unwrapped_denoiser)
    assert {t.device.type for t in [*shadow.parameters(), *shadow.buffers()]} == {"meta"}
    count_flops(model, SHAPE, model.encode_text(["a"]), checkpointing=True)
    assert model.denoiser is model.unwrapped_denoiser
    for name, parameter in model.unwrapped_denoiser.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    assert not model.unwrapped_denoiser.is_gradient_checkpointing


def test_a_forward_runs_one_of_two_experts(tiny_pipelines):
    counts = []
    for family in ("wan21", "wan22"):
        model = registry.load_model(tiny_pipelines(family), dtype=torch.float32, device="cpu")
        shape = model.latent_shape(32, 32, 5)
        counts.append(count_flops(model, shape, model.encode_text(["a red circle"]), checkpointing=True))
    assert counts[0] == counts[1]


def test_flops_include_adapters_backward_and_recomputation():
    forwards = {"policy": ForwardCount(2, 10), "ref": ForwardCount(1, 10, 10), "uncond": ForwardCount(3, 20, 10)}
    flops = Flops(forward=110, backward=200, recompute=90, forward_without_adapters=100)
    assert flops_by_purpose(forwards, flops) == {
        "policy": ForwardFlops(1100, 2000, 900),
        "ref": ForwardFlops(1000),
        "uncond": ForwardFlops(2100),
    }
    assert flops_by_purpose(forwards, flops)["policy"].total == 4000
    assert flops_by_purpose({"fake_policy": forwards["policy"]}, flops)["fake_policy"].total == 4000
