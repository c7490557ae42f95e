"""Transformers of all families in sizes that do not divide, whole in one process against shared by ranks."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.distributed as dist

from wfm_ds.models.tiny import sd3
from wfm_ds.ulysses.install import install

TINIEST = 1e-6  # of the largest gradient: a key's bias has none in exact arithmetic


@dataclass(frozen=True, kw_only=True)
class Case:
    """A transformer and what it is called with."""

    build: Callable[[], Any]
    inputs: Callable[..., dict[str, Any]]  # (a generator, a size) -> arguments of forward
    sizes: tuple[Any, ...]  # of which no axis that is shared divides by two ranks, or by three
    even: Any  # a size of which each does
    lora: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")


def sd3_transformer(heads=5):
    config = {**sd3.TRANSFORMER, "num_attention_heads": heads, "caption_projection_dim": 8 * heads}
    return sd3.SD3Transformer2DModel(**config)


def sd3_inputs(draw, size):
    (height, width), text = size
    return {
        "hidden_states": torch.randn(2, 4, 2 * height, 2 * width, generator=draw),
        "encoder_hidden_states": torch.randn(2, text, 64, generator=draw),
        "pooled_projections": torch.randn(2, 64, generator=draw),
        "timestep": 1000 * torch.rand(2, generator=draw),
    }


CASES = {
    "sd3": Case(
        build=sd3_transformer,
        inputs=sd3_inputs,
        sizes=(((5, 5), 7), ((1, 7), 11)),
        even=((4, 6), 6),
        lora=("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "proj_out"),
    ),
}


def built(case, *, lora=False, checkpointing=False, seed=0):
    """The case's transformer, no weight at its initial zero; of one with an adapter that alone trains."""
    torch.manual_seed(seed)
    transformer = case.build()
    transformer.requires_grad_(not lora)
    if lora:
        config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=list(case.lora), init_lora_weights=False)
        transformer.add_adapter(config)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    return transformer


def run(transformer, case, sizes, seed=1):
    """Outputs, and the gradient of a random sum of them, after the forwards of all sizes: the way of a backward pass
    that comes after a forward of another shape."""
    draw = torch.Generator().manual_seed(seed)
    outputs, loss = [], torch.zeros(())
    for size in sizes:
        outputs.append(transformer(**case.inputs(draw, size), return_dict=False)[0])
        loss = loss + (outputs[-1] * torch.randn(outputs[-1].shape, generator=draw)).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}
    return [output.detach() for output in outputs], gradients


def errors(name, sizes, group=None, **options):
    """What sharing changes: the largest absolute error of outputs, the largest error of a parameter's gradient over
    that gradient's own maximum."""
    case, group = CASES[name], group or dist.group.WORLD
    whole = built(case, **options)
    shared = copy.deepcopy(whole)
    install(shared, group)
    want, want_gradients = run(whole, case, sizes)
    outputs, gradients = run(shared, case, sizes)
    assert gradients.keys() == want_gradients.keys()
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
    largest = max(float(gradient.abs().max()) for gradient in want_gradients.values())
    relative = {
        parameter: float((gradients[parameter] - gradient).abs().max() / gradient.abs().max())
        for parameter, gradient in want_gradients.items()
        if gradient.abs().max() > TINIEST * largest
    }
    return {
        "forward": max(float((a - b).abs().max()) for a, b in zip(outputs, want, strict=True)),
        "gradient": max(relative.values()),
        "worst": max(relative, key=relative.get),
        "compared": len(relative),
    }
