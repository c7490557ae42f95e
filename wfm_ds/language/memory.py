"""Estimate the memory of a vision-language training run: model and optimizer states, activations and logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wfm_ds.engine.live_bytes import LiveByteCounter, emulate_gpu_attention
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.language import attention
from wfm_ds.language.data import LanguageData
from wfm_ds.language.model import LanguageModel, checkpoint_blocks, score_logits
from wfm_ds.language.packed_sequences import ConversationSize
from wfm_ds.language.sequence_source import PackingOrder
from wfm_ds.memory.activations import discard_gradients
from wfm_ds.memory.engine import EngineMemory
from wfm_ds.memory.estimate import MemoryEstimate
from wfm_ds.recipe.schema import Recipe

PROBE_SIDES = (4, 8)  # merged patches per side of the two probe images
META_DEVICE = torch.device("meta")


def estimate_language_memory(
    recipe: Recipe,
    model: LanguageModel,
    meta_network: nn.Module,
    row_size: ConversationSize,
    world_size: int,
    *,
    device: str = "cuda",
) -> MemoryEstimate:
    """Estimate the memory of each rank.

    meta_network: the network on the meta device, with its adapters and requires_grad flags. row_size: token counts of
    one forward pass.
    """
    sums = EngineMemory(recipe, meta_network, world_size, device)
    persistent = sums.state_parts()
    decoder, logits = decoder_bytes(recipe, meta_network, row_size)
    training = {"activations": decoder + tower_bytes(recipe, model, meta_network, row_size.media), "logits": logits}
    training |= {"gradients": sums.gradient_bytes, "DeepSpeed": sums.reduction_bytes()} | sums.gather_memory(
        training=True
    )
    phases = {"train": persistent | training, "optimizer": persistent | sums.optimizer_step_parts()}
    return MemoryEstimate.from_engine(sums, phases, model.num_parameters)


def largest_row_size(recipe: Recipe, data: LanguageData, order: PackingOrder) -> ConversationSize:
    """Return upper bounds of the token counts of a forward pass.

    A bound is the micro-batch size * the largest count of a packed sequence in the first epoch. With data.pack, each
    sequence is assumed to have data.max_tokens tokens.
    """
    num_rows = next(k for k in range(len(data.training.sizes) + 1) if order.locate(k)[0] > 0)
    rows = [[data.training.sizes[i] for i in order.conversations(place)] for place in range(num_rows)]
    maxima = [max(sum(size[part] for size in row) for row in rows) for part in range(3)]
    tokens = recipe.data.max_tokens if recipe.data.pack else maxima[0]
    micro = recipe.engine.micro_batch_size
    return ConversationSize(tokens * micro, maxima[1] * micro, maxima[2] * micro)


def decoder_bytes(recipe: Recipe, meta_network: nn.Module, row_size: ConversationSize) -> tuple[int, int]:
    """Return (bytes of the layers, bytes of the logits, losses and their gradients).

    Their sum is the decoder's peak memory in a forward and backward pass.
    """
    module: Any = meta_network
    decoder, dtype = module.model.language_model, DTYPES[recipe.model.dtype]
    attention.register_attention()
    decoder.config._attn_implementation = attention.ATTENTION_NAME
    if recipe.model.gradient_checkpointing:
        checkpoint_blocks(module)
    tokens = -(-row_size.tokens // recipe.engine.sequence_parallel)
    with discard_gradients(meta_network), LiveByteCounter("meta") as live, emulate_gpu_attention():
        embedded = torch.empty(
            1, tokens, decoder.config.hidden_size, dtype=dtype, device=META_DEVICE, requires_grad=True
        )
        position_ids = torch.empty(4, 1, tokens, dtype=torch.long, device=META_DEVICE)
        hidden = decoder(inputs_embeds=embedded, position_ids=position_ids, use_cache=False, segments=[tokens])[0]
        after_forward = live.current
        torch.autograd.backward(hidden, torch.empty_like(hidden))
        layer_peak = live.peak
    with discard_gradients(meta_network), LiveByteCounter("meta") as live:
        labelled_hidden = torch.empty(
            row_size.labelled, decoder.config.hidden_size, dtype=dtype, device=META_DEVICE, requires_grad=True
        )
        losses = score_logits(
            module.lm_head(labelled_hidden), torch.empty(row_size.labelled, dtype=torch.long, device=META_DEVICE)
        ).losses
        torch.autograd.backward(losses.sum())
    # The logits are already freed when the backward pass reaches the layers.
    return max(int(after_forward), int(layer_peak) - int(live.peak)), int(live.peak)


def tower_bytes(recipe: Recipe, model: LanguageModel, meta_network: nn.Module, media: int) -> int:
    """Return the bytes of the image and video patches and of the vision tower's activations.

    media: number of image and video tokens in the decoder. A frozen tower stores no activations.
    """
    tower: Any = model.network.get_submodule("model.visual")
    trains = [p.requires_grad for p in meta_network.get_submodule("model.visual").parameters()]
    processor = model.image_processor
    merge, size = int(processor.merge_size), 3 * int(processor.temporal_patch_size) * int(processor.patch_size) ** 2
    pixels = media * merge**2 * size * torch.float32.itemsize
    if not any(trains):
        return pixels
    original_flags = [p.requires_grad for p in tower.parameters()]
    for parameter, flag in zip(tower.parameters(), trains, strict=False):
        parameter.requires_grad_(flag)
    if recipe.model.gradient_checkpointing:
        checkpoint_blocks(model.network)
    dtype, counts = next(tower.parameters()).dtype, list[int]()
    for side in PROBE_SIDES:
        patches = torch.zeros((side * merge) ** 2, size, dtype=dtype)
        grid = torch.tensor([[1, side * merge, side * merge]])
        with LiveByteCounter("cpu") as live:
            output = tower(patches, grid_thw=grid)
            counts.append(live.current)
        del output
    if recipe.model.gradient_checkpointing:
        model.network.gradient_checkpointing_disable()  # type: ignore[operator]
    for parameter, flag in zip(tower.parameters(), original_flags, strict=True):
        parameter.requires_grad_(flag)
    slope = (counts[1] - counts[0]) / (PROBE_SIDES[1] ** 2 - PROBE_SIDES[0] ** 2)
    return pixels + int(media * slope * DTYPES[recipe.model.dtype].itemsize / dtype.itemsize)
