"""A memory estimate of a run that trains a language model: the engine's part as for all runs, and that of its rows.

The decoder's activations and the logits of a forward and its backward pass are counted on the meta device, for rows of
`data.max_tokens` tokens and as many labelled tokens and media as the fullest row of the data has; the vision tower's on
the CPU for two small images, from which they go on in proportion to the patches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wfm_ds.engine.live import LiveBytes, attention_as_on_a_gpu
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.language import attention
from wfm_ds.language.data import LanguageData
from wfm_ds.language.lengths import Size
from wfm_ds.language.model import LanguageModel, checkpoint_blocks, scored
from wfm_ds.language.packing import RowOrder
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.engine_sums import EngineSums
from wfm_ds.run.estimate import Estimate

PROBES = (4, 8)  # merged patches on each side of an image
META = torch.device("meta")


def language_estimate(
    recipe: Recipe, model: LanguageModel, shadow: nn.Module, row: Size, world_size: int, *, device: str = "cuda"
) -> Estimate:
    """Estimate the memory of each rank. shadow: the network on the meta device with its adapters and flags of what
    trains; row: of one forward."""
    sums = EngineSums(recipe, shadow, world_size, device)
    staying = sums.states()
    decoder, logits = decoder_bytes(recipe, shadow, row)
    training = {"activations": decoder + tower_bytes(recipe, model, shadow, row.media), "logits": logits}
    training |= {"gradients": sums.gradients, "DeepSpeed": sums.reducing()} | sums.gathered(training=True)
    return Estimate(
        phases={"train": staying | training, "optimizer": staying | sums.stepping()},
        world_size=world_size,
        total=model.num_parameters,
        trained=sums.trained,
        stage=sums.zero["stage"],
        checkpoint_bytes=sums.state_bytes(),
        export_bytes=sums.export_bytes(),
    )


def fullest_row(recipe: Recipe, data: LanguageData, order: RowOrder) -> Size:
    """The size of the largest forward: of as many rows of the first epoch as a micro-batch has, the fullest each."""
    num_rows = next(k for k in range(len(data.training.sizes) + 1) if order.place(k)[0] > 0)
    rows = [[data.training.sizes[i] for i in order.row(place)] for place in range(num_rows)]
    most = [max(sum(size[part] for size in row) for row in rows) for part in range(3)]
    tokens = recipe.data.max_tokens if recipe.data.pack else most[0]
    micro = recipe.engine.micro_batch_size
    return Size(tokens * micro, most[1] * micro, most[2] * micro)


def decoder_bytes(recipe: Recipe, shadow: nn.Module, row: Size) -> tuple[int, int]:
    """Live bytes of the layers' forward and backward pass, and of the logits with their losses and gradients."""
    module: Any = shadow
    decoder, dtype = module.model.language_model, DTYPES[recipe.model.dtype]
    attention.register()
    decoder.config._attn_implementation = attention.NAME
    if recipe.model.gradient_checkpointing:
        checkpoint_blocks(module)
    tokens = -(-row.tokens // recipe.engine.sequence_parallel)
    bare: list[Any] = list(shadow.parameters())
    handles = [trained.register_post_accumulate_grad_hook(_forget) for trained in bare if trained.requires_grad]
    with LiveBytes("meta") as live, attention_as_on_a_gpu():
        embedded = torch.empty(1, tokens, decoder.config.hidden_size, dtype=dtype, device=META, requires_grad=True)
        places = torch.empty(4, 1, tokens, dtype=torch.long, device=META)
        hidden = decoder(inputs_embeds=embedded, position_ids=places, use_cache=False, segments=[tokens])[0]
        waiting = live.now
        torch.autograd.backward(hidden, torch.empty_like(hidden))
        layers = live.peak
    with LiveBytes("meta") as live:
        kept = torch.empty(row.labelled, decoder.config.hidden_size, dtype=dtype, device=META, requires_grad=True)
        losses = scored(module.lm_head(kept), torch.empty(row.labelled, dtype=torch.long, device=META)).losses
        torch.autograd.backward(losses.sum())
    for handle in handles:
        handle.remove()
    # The logits are gone when the backward pass is among the layers.
    return max(int(waiting), int(layers) - int(live.peak)), int(live.peak)


def _forget(parameter: torch.Tensor) -> None:
    """The engine reduces a gradient when it is there: it lies in a bucket then, which is counted elsewhere."""
    parameter.grad = None


def tower_bytes(recipe: Recipe, model: LanguageModel, shadow: nn.Module, media: int) -> int:
    """Bytes of the patches of this number of media tokens, and of what the vision tower keeps of them for its backward
    pass; a frozen one keeps nothing."""
    tower: Any = model.network.get_submodule("model.visual")
    trains = [p.requires_grad for p in shadow.get_submodule("model.visual").parameters()]
    merge, size = int(model.image_processor.merge_size), patch_size(model)
    pixels = media * merge**2 * size * torch.float32.itemsize
    if not any(trains):
        return pixels
    held = [p.requires_grad for p in tower.parameters()]
    for parameter, flag in zip(tower.parameters(), trains, strict=False):
        parameter.requires_grad_(flag)
    if recipe.model.gradient_checkpointing:
        checkpoint_blocks(model.network)
    stored, counts = next(tower.parameters()).dtype, list[int]()
    for side in PROBES:
        patches, grid = (
            torch.zeros((side * merge) ** 2, size, dtype=stored),
            torch.tensor([[1, side * merge, side * merge]]),
        )
        with LiveBytes("cpu") as live:
            kept = tower(patches, grid_thw=grid)
            counts.append(live.now)
        del kept
    if recipe.model.gradient_checkpointing:
        model.network.gradient_checkpointing_disable()  # type: ignore[operator]
    for parameter, flag in zip(tower.parameters(), held, strict=True):
        parameter.requires_grad_(flag)
    slope = (counts[1] - counts[0]) / (PROBES[1] ** 2 - PROBES[0] ** 2)
    return pixels + int(media * slope * DTYPES[recipe.model.dtype].itemsize / stored.itemsize)


def patch_size(model: LanguageModel) -> int:
    """Numbers of a patch."""
    processor = model.image_processor
    return 3 * int(processor.temporal_patch_size) * int(processor.patch_size) ** 2
