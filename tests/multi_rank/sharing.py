"""Compare transformers of all families under sequence parallelism with one process, for sizes that do not divide."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import peft
import torch
import torch.distributed as dist

from pages import code
from wfm_ds.models.cosmos3_towers import GenerationTower
from wfm_ds.models.cosmos25 import provide_torchvision_resize
from wfm_ds.models.cosmos25_action_network import CosmosActionTransformer3DModel
from wfm_ds.models.tiny import sizes as tiny_sizes
from wfm_ds.ulysses.install import install_ulysses

TINIEST = 1e-6  # relative to the largest gradient; the key projection's bias has gradient 0 in exact arithmetic


@dataclass(frozen=True, kw_only=True)
class Case:
    """A transformer and its inputs."""

    build: Callable[[int], Any]  # number of self-attention heads -> transformer
    inputs: Callable[..., dict[str, Any]]  # (generator, *size) -> arguments of forward
    sizes: tuple[tuple[int, ...], ...]  # no sharded dimension is divisible by 2 or 3
    even: tuple[int, ...]  # a size with all sharded dimensions divisible by 2 and 3
    options: dict[str, Any] = field(default_factory=lambda: {"return_dict": False})  # more arguments of forward
    lora: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "proj_out")


def sd3_transformer(heads):
    config = {**tiny_sizes.SD3, "num_attention_heads": heads, "caption_projection_dim": 8 * heads}
    return diffusers.SD3Transformer2DModel(**config)


def sd3_inputs(draw, height, width, text):
    return {
        "hidden_states": torch.randn(2, 4, 2 * height, 2 * width, generator=draw),
        "encoder_hidden_states": torch.randn(2, text, 64, generator=draw),
        "pooled_projections": torch.randn(2, 64, generator=draw),
        "timestep": 1000 * torch.rand(2, generator=draw),
    }


def wan_transformer(heads, **options):
    config = {**tiny_sizes.WAN, "num_attention_heads": heads, "cross_attn_norm": True, **options}
    return diffusers.WanTransformer3DModel(**config)


def wan_inputs(draw, frames, height, width):
    return {
        "hidden_states": torch.randn(2, 4, frames, 2 * height, 2 * width, generator=draw),
        "encoder_hidden_states": torch.randn(2, 5, 32, generator=draw),
        "timestep": 1000 * torch.rand(2, generator=draw),
    }


def wan_token_times(draw, frames, height, width):
    """Return inputs with one timestep per token, as Wan TI2V expects."""
    inputs = wan_inputs(draw, frames, height, width)
    return {**inputs, "timestep": 1000 * torch.rand(2, frames * height * width, generator=draw)}


def wan_image_inputs(draw, frames, height, width):
    """Return inputs with image embeddings in front of the text. The transformer assumes 512 text tokens."""
    return {
        **wan_inputs(draw, frames, height, width),
        "encoder_hidden_states": torch.randn(2, 512, 32, generator=draw),
        "encoder_hidden_states_image": torch.randn(2, 3, 24, generator=draw),
    }


def cosmos_transformer(heads, **options):
    provide_torchvision_resize()
    return diffusers.CosmosTransformer3DModel(**{**tiny_sizes.COSMOS25, "num_attention_heads": heads, **options})


def cosmos_inputs(draw, frames, height, width):
    """Return inputs with one timestep per frame."""
    size = 2, 1, frames, 2 * height, 2 * width
    return {
        "hidden_states": torch.randn(2, 4, *size[2:], generator=draw),
        "condition_mask": torch.rand(size, generator=draw).round(),
        "encoder_hidden_states": torch.randn(2, 5, 64, generator=draw),
        "timestep": torch.rand(2, 1, frames, 1, 1, generator=draw),
        "padding_mask": torch.zeros(1, 1, *size[3:]),
    }


def cosmos_image_inputs(draw, frames, height, width):
    """Return inputs with one timestep per video, a text, and image embeddings."""
    inputs = cosmos_inputs(draw, frames, height, width)
    image = torch.randn(2, 3, 16, generator=draw)
    return {
        **inputs,
        "encoder_hidden_states": (inputs["encoder_hidden_states"], image),
        "timestep": torch.rand(2, generator=draw),
    }


def cosmos_action_transformer(heads):
    provide_torchvision_resize()
    return CosmosActionTransformer3DModel(**{**tiny_sizes.COSMOS25_ACTIONS, "num_attention_heads": heads})


def cosmos_action_inputs(draw, frames, height, width):
    """Return inputs with one timestep per frame, and actions."""
    actions = torch.randn(2, 4 * (frames - 1), 3, generator=draw)
    return {**cosmos_inputs(draw, frames, height, width), "actions": actions}


def cosmos3_transformer(heads):
    """Return a tower with `heads` key/value heads and twice that number of query heads. It uses `heads` text heads."""
    config = {**tiny_sizes.COSMOS3, "num_key_value_heads": heads, "num_attention_heads": 2 * heads}
    tower = GenerationTower(**config)

    def some_heads(_, args, arguments):
        return args, arguments | {name: arguments[name][..., :heads, :] for name in ("text_keys", "text_values")}

    tower.register_forward_pre_hook(some_heads, with_kwargs=True)
    return tower


def cosmos3_inputs(draw, frames, height, width):
    """Return inputs with texts of unequal length, a conditioning frame, and actions."""
    free, mask = torch.ones(2, frames), torch.ones(2, 6, dtype=torch.int64)
    free[1, 0], mask[1, 4:] = 0, 0
    keys, values = torch.randn(2, 2, 6, 2, 6, 16, generator=draw)
    return {
        "latents": torch.randn(2, 4, frames, 2 * height, 2 * width, generator=draw),
        "time": 1000 * torch.rand(2, generator=draw),
        "free": free,
        "text_keys": keys,
        "text_values": values,
        "text_mask": mask,
        "actions": torch.randn(2, 4 * frames, 16, generator=draw),
        "domain": torch.tensor([3, 1]),
    }


def sana_transformer(heads, **options):
    config = {**tiny_sizes.SANA, "num_attention_heads": heads, "cross_attention_dim": 16 * heads, **options}
    return diffusers.SanaTransformer2DModel(**config)


def text_with_mask(draw):
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, 4:] = 0
    return {"encoder_hidden_states": torch.randn(2, 6, 32, generator=draw), "encoder_attention_mask": mask}


def sana_inputs(draw, height, width):
    return {
        "hidden_states": torch.randn(2, 4, height, width, generator=draw),
        "timestep": 1000 * torch.rand(2, generator=draw),
        **text_with_mask(draw),
    }


def sana_video_transformer(heads):
    config = {**tiny_sizes.SANA_VIDEO, "num_attention_heads": heads, "cross_attention_dim": 16 * heads}
    return diffusers.SanaVideoTransformer3DModel(**config)


def sana_video_inputs(draw, frames, height, width):
    return {
        "hidden_states": torch.randn(2, 4, frames, 2 * height, 2 * width, generator=draw),
        "timestep": 1000 * torch.rand(2, generator=draw),
        **text_with_mask(draw),
    }


def sana_video_token_times(draw, frames, height, width):
    times = 1000 * torch.rand(2, 1, frames, height, width, generator=draw)
    return {**sana_video_inputs(draw, frames, height, width), "timestep": times}


_my_ltx = {"__name__": "my_ltx"}
exec(code("own_model.md", "my_ltx.py"), _my_ltx)  # the user's class of the docs, found as a subclass


def ltx_transformer(heads):
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=heads,
        attention_head_dim=12,
        cross_attention_dim=12 * heads,
        num_layers=2,
        caption_channels=32,
    )


def ltx_inputs(draw, *size):
    tokens = math.prod(size)
    return {
        "hidden_states": torch.randn(2, tokens, 4, generator=draw),
        "timestep": 1000 * torch.rand(2, generator=draw),
        "video_coords": torch.randn(2, 3, tokens, generator=draw),
        **text_with_mask(draw),
    }


def ltx_token_times(draw, *size):
    return {**ltx_inputs(draw, *size), "timestep": 1000 * torch.rand(2, math.prod(size), generator=draw)}


VIDEO = {"sizes": ((5, 1, 5), (7, 5, 1)), "even": (6, 2, 3)}
CASES = {
    "sd3": Case(
        build=sd3_transformer,
        inputs=sd3_inputs,
        sizes=((5, 5, 7), (1, 7, 11)),
        even=(4, 6, 12),
        lora=("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "proj_out"),
    ),
    "wan": Case(build=wan_transformer, inputs=wan_inputs, **VIDEO),
    "wan, times of tokens": Case(build=wan_transformer, inputs=wan_token_times, **VIDEO),
    "wan, image embeddings": Case(
        build=lambda heads: wan_transformer(heads, image_dim=24, added_kv_proj_dim=16 * heads),
        inputs=wan_image_inputs,
        **VIDEO,
    ),
    "cosmos25": Case(build=cosmos_transformer, inputs=cosmos_inputs, **VIDEO),
    "cosmos25, actions": Case(build=cosmos_action_transformer, inputs=cosmos_action_inputs, **VIDEO),
    "cosmos25, image embeddings, learnt positions": Case(
        build=lambda heads: cosmos_transformer(
            heads,
            extra_pos_embed_type="learnable",
            img_context_dim_in=16,
            img_context_dim_out=16 * heads,
        ),
        inputs=cosmos_image_inputs,
        **VIDEO,
    ),
    "cosmos3": Case(
        build=cosmos3_transformer,
        inputs=cosmos3_inputs,
        options={},
        lora=("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "proj_out"),
        **VIDEO,
    ),
    "sana": Case(build=sana_transformer, inputs=sana_inputs, sizes=((5, 3), (7, 1)), even=(6, 4)),
    "sana, normed queries, patches of two": Case(
        build=lambda heads: sana_transformer(heads, qk_norm="rms_norm_across_heads", patch_size=2),
        inputs=lambda draw, height, width: sana_inputs(draw, 2 * height, 2 * width),
        sizes=((5, 3), (7, 1)),
        even=(6, 4),
        lora=("to_q", "to_out.0", "ff.conv_inverted", "proj_out"),
    ),
    "sana_video": Case(build=sana_video_transformer, inputs=sana_video_inputs, **VIDEO),
    "sana_video, times of tokens": Case(
        build=sana_video_transformer,
        inputs=sana_video_token_times,
        lora=("to_q", "to_out.0", "ff.conv_temp", "proj_out"),
        **VIDEO,
    ),
    "ltx, class of the docs": Case(build=ltx_transformer, inputs=ltx_inputs, **VIDEO),
    "ltx, times of tokens": Case(build=ltx_transformer, inputs=ltx_token_times, **VIDEO),
}


def built(case, *, heads=5, lora=False, checkpointing=False, seed=0):
    """Return the case's transformer, with noise added so that no weight is 0. With `lora` only the adapter trains."""
    torch.manual_seed(seed)
    transformer = case.build(heads)
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


def rows(argument, count):
    """Return the first rows of a batch, or of each batch in a tuple."""
    return tuple(part[:count] for part in argument) if isinstance(argument, tuple) else argument[:count]


def forwards(transformer, case, sizes, batch=2, seed=1):
    """Return the outputs for all sizes, and a randomly weighted sum of them."""
    draw = torch.Generator().manual_seed(seed)
    outputs, loss = [], torch.zeros(())
    for size in sizes:
        inputs = {name: rows(argument, batch) for name, argument in case.inputs(draw, *size).items()}
        outputs.append(transformer(**inputs, **case.options)[0])
        loss = loss + (outputs[-1] * torch.randn(outputs[-1].shape, generator=draw)).sum()
    return outputs, loss


def run(transformer, case, sizes, batch=2):
    """Return the outputs, and the gradients by parameter.

    All forwards precede the backward pass. Checkpointed blocks are therefore recomputed after forwards of other sizes.
    """
    outputs, loss = forwards(transformer, case, sizes, batch)
    loss.backward()
    gradients = {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}
    return [output.detach() for output in outputs], gradients


def errors(name, sizes, batch=2, **options):
    """Return the differences between sequence parallelism over all ranks and one process."""
    case = CASES[name]
    whole = built(case, **options)
    shared = copy.deepcopy(whole)
    install_ulysses(shared, dist.group.WORLD)
    return difference(run(shared, case, sizes, batch), run(whole, case, sizes, batch))


def difference(shared, whole):
    """Return the differences between two results of `run`: the largest absolute error of the outputs, and the largest
    error of a gradient relative to its maximum. `shared` holds partial gradients, which are summed over the ranks."""
    (outputs, gradients), (want, want_gradients) = shared, whole
    assert gradients.keys() == want_gradients.keys()
    for gradient in gradients.values():
        dist.all_reduce(gradient)
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
