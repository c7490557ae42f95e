"""Base classes for sequence parallelism."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from wfm_ds.errors import UserError
from wfm_ds.ulysses.exchange import exchange_halo, gather_shards, local_shard, shard_sizes


class UlyssesTransformer(ABC):
    """Shards the tokens of a diffusers transformer. Each model family has a subclass in this package.

    After the patch embedding, a rank has only its local tokens, but all text and timesteps, unless the family shards
    them. Every rank gathers the output of `proj_out`. The transformer must not use parameters after `proj_out`, because
    each rank would compute their full gradient, not a partial sum.

    Hooks inside a block must read only the block's arguments, not attributes of this object: gradient checkpointing
    runs the block again in the backward pass, when the attributes may belong to another forward pass.
    """

    transformer_class: ClassVar[type[nn.Module]]
    patch_embedding: ClassVar[str]  # name of the module that outputs the tokens to shard
    shards_heads: ClassVar[bool] = True  # whether attention shards the heads
    shard_unit: ClassVar[str] = "tokens"  # plural name of the smallest possible shard, for messages
    # {argument of forward that is not supported: its description for messages}
    unsupported_arguments: ClassVar[Mapping[str, str]] = {}

    def __init__(self, transformer: Any, group: ProcessGroup) -> None:
        """Shard the transformer. Raises UserError if it cannot be sharded."""
        self.config = transformer.config
        self.group = group
        self.num_ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.lengths: list[int] = []  # number of tokens of each rank in the current forward pass
        for name, part in transformer.named_modules():
            if getattr(part, "fused_projections", False):
                raise self.sharding_error(f"{name} has fused projections; call unfuse_qkv_projections() first")
        self.check_config(transformer.config, self.num_ranks)
        self.shard_blocks(transformer)
        change_arguments(transformer, self._prepare_forward)
        embedding = getattr(transformer, self.patch_embedding)
        embedding.register_forward_hook(lambda module, args, embedded: self.shard_embedding(embedded))
        transformer.proj_out.register_forward_hook(
            lambda module, args, projected: gather_shards(projected, 1, self.lengths, self.group)
        )

    @abstractmethod
    def shard_blocks(self, transformer: Any) -> None:
        """Replace all operations in the transformer blocks that combine several tokens, such as attention.

        Raises UserError, and changes nothing, if an operation is not supported.
        """

    @abstractmethod
    def token_shard_sizes(self, arguments: dict[str, Any]) -> list[int]:
        """Return the number of tokens of each rank for a forward pass with these arguments.

        Subclasses may also change `arguments` in place. Raises UserError if a rank would have no tokens.
        """

    def shard_embedding(self, embedded: Tensor) -> Tensor:
        """Return the local tokens of the patch embedding's output [batch, tokens, channels]."""
        return self.copy_local_shard(embedded, 1)

    def copy_local_shard(self, x: Tensor, dim: int, lengths: Sequence[int] | None = None) -> Tensor:
        """Return a copy of this rank's shard of x along dim. A view would keep all of x in memory.

        lengths: shard size of each rank. Default: each rank's number of tokens in the current forward pass.
        """
        shard = local_shard(x, dim, self.lengths if lengths is None else lengths, self.group)
        return shard.clone(memory_format=torch.contiguous_format)

    @classmethod
    def check_config(cls, config: Any, num_ranks: int) -> None:
        """Raise UserError if a transformer with this config cannot be sharded over this many ranks."""
        if cls.shards_heads:
            shard_sizes(config.num_attention_heads, num_ranks, f"attention heads of {cls.transformer_class.__name__}")

    @classmethod
    def num_units(cls, grid: Sequence[int]) -> int:
        """Return the size of a token grid in units of `shard_unit` (tokens, rows or frames)."""
        return math.prod(grid)

    @classmethod
    def check_shape(cls, config: Any, num_ranks: int, shape: Sequence[int]) -> None:
        """Raise UserError if latents are too small for this many ranks.

        shape: (channels, h, w) or (channels, latent frames, h, w).
        """
        shard_sizes(cls.num_units(patch_grid(config, shape[1:])), num_ranks, cls.shard_unit)

    def require_processor(self, attention: Any, expected: type) -> Any:
        """Return the attention's processor. Raises UserError unless it has the `expected` type."""
        if type(attention.processor) is not expected:
            raise self.sharding_error(
                f"its attention uses {type(attention.processor).__name__}, not {expected.__name__}"
            )
        if getattr(attention.processor, "_parallel_config", None) is not None:
            raise self.sharding_error("diffusers' context parallelism is already enabled")
        return attention.processor

    def replace_processors(self, attentions: Sequence[Any], expected: type, replacement: Callable[[Any], Any]) -> None:
        """Replace the processors of attention layers by `replacement(self.group)`, with the same attention kernels.

        Raises UserError, and changes nothing, if a processor does not have the `expected` type.
        """
        processors = [self.require_processor(attention, expected) for attention in attentions]
        for attention, processor in zip(attentions, processors, strict=True):
            attention.set_processor(replacement(self.group))
            if hasattr(processor, "_attention_backend"):
                attention.processor._attention_backend = processor._attention_backend

    def sharding_error(self, why: str) -> UserError:
        return UserError(f"{self.transformer_class.__name__} does not support sequence parallelism: {why}")

    def _prepare_forward(self, arguments: dict[str, Any]) -> None:
        for name, description in self.unsupported_arguments.items():
            if arguments.get(name) is not None:
                raise self.sharding_error(f"{description} ({name}) are not supported")
        self.lengths = self.token_shard_sizes(arguments)


class UlyssesLineTransformer(UlyssesTransformer):
    """Base class for families that shard whole lines. A line is a row of an image or a frame of a video.

    Heads are not sharded, so there may be more ranks than heads.
    """

    shards_heads = False
    unsupported_arguments: ClassVar[Mapping[str, str]] = {
        "attention_mask": "masks of self-attention",
        "controlnet_block_samples": "ControlNet residuals",
    }
    original_processor: ClassVar[type]
    sharded_processor: ClassVar[type]  # replaces original_processor; its constructor receives the group
    convolution_name: ClassVar[str]  # attribute of a block's feed-forward: the convolution across lines

    def shard_blocks(self, transformer: Any) -> None:
        blocks = transformer.transformer_blocks
        self.replace_processors([block.attn1 for block in blocks], self.original_processor, self.sharded_processor)
        for block in blocks:
            change_arguments(block, self.shard_block_arguments)
            install_halo_exchange(getattr(block.ff, self.convolution_name), self.group)

    @abstractmethod
    def shard_block_arguments(self, arguments: dict[str, Any]) -> None:
        """Change a block's arguments in place: replace sizes and rotary tables by those of this rank's tokens."""

    @classmethod
    def num_units(cls, grid: Sequence[int]) -> int:
        return grid[0]


def patch_grid(config: Any, shape: Sequence[int]) -> list[int]:
    """Return the number of patches along each axis. shape: size of the latents, (h, w) or (frames, h, w)."""
    sides = config.patch_size
    if not isinstance(sides, Sequence):
        sides = [getattr(config, "patch_size_t", None) or 1, sides, sides][-len(shape) :]
    return [count // side for count, side in zip(shape, sides, strict=True)]


def change_arguments(module: nn.Module, change: Callable[[dict[str, Any]], None]) -> None:
    """Before each forward pass of a module, call `change` with {name: argument}. `change` modifies this dict."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    def edit_call(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional = names[: len(args)]  # DeepSpeed's hooks handle only positional arguments
        arguments = dict(zip(positional, args, strict=True)) | kwargs
        change(arguments)
        return tuple(arguments.pop(name) for name in positional), arguments

    module.register_forward_pre_hook(edit_call, with_kwargs=True)


def install_halo_exchange(convolution: nn.Module, group: ProcessGroup) -> None:
    """Make a convolution over sharded lines read the border lines of the neighbouring ranks instead of zero padding.

    A line is a row of an image or a frame of a video. The convolution must pad its inputs [batch, channels, local
    lines, line length] by one line on each side. Zero padding remains at the edges of the image or video.
    """
    for part in convolution.modules():  # in a LoRA layer, the base layer and lora_A pad, but lora_B does not
        if isinstance(part, nn.Conv2d) and part.padding[0]:
            assert part.padding[0] == 1, part
            part.padding = (0, int(part.padding[1]))

    def add_halo(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (exchange_halo(args[0], group),)

    convolution.register_forward_pre_hook(add_halo)
