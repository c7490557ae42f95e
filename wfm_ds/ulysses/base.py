"""The common part of the families: where a forward's tokens are split, and where its output is made whole again."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from wfm_ds.errors import UserError
from wfm_ds.ulysses.exchange import gather, own, shares
from wfm_ds.ulysses.hooks import change_arguments


class SharedTokens(ABC):
    """One transformer whose tokens the ranks of a group share. The constructor changes it in place, by hooks and
    attention processors; parameters and their names stay as they are.

    A family is a subclass in a file of its own in this folder; `install` finds it. From the patch embedding on a rank
    has its tokens only; what is the same for all tokens (text, times) is whole on every rank unless the family says
    otherwise; the output of `proj_out` is gathered. No parameter is used after that, or its gradient would not be a
    partial sum.

    A block learns all it needs from its arguments, never from the fields here: under gradient checkpointing it runs
    again in the backward pass, when a forward of another shape may have come between.
    """

    transformer: ClassVar[type[nn.Module]]
    patch_embedding: ClassVar[str]  # the module whose output is split
    exchanges_heads: ClassVar[bool] = True  # whether attention gives each rank some heads
    unit: ClassVar[str] = "tokens"  # what a rank gets a whole number of, in words
    refused: ClassVar[Mapping[str, str]] = {}  # arguments of forward that would need a share of their own, in words

    def __init__(self, transformer: Any, group: ProcessGroup) -> None:
        """Raises UserError for a transformer that cannot be shared as it is."""
        self.config = transformer.config
        self.group = group
        self.num_ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.lengths: list[int] = []  # tokens of each rank in the running forward
        for name, part in transformer.named_modules():
            if getattr(part, "fused_projections", False):
                raise self.cannot(f"{name} has fused projections; call unfuse_qkv_projections() first")
        self.check(transformer.config, self.num_ranks)
        self.share_blocks(transformer)
        change_arguments(transformer, self._enter)
        getattr(transformer, self.patch_embedding).register_forward_hook(self._split)
        transformer.proj_out.register_forward_hook(self._gather)

    @abstractmethod
    def share_blocks(self, transformer: Any) -> None:
        """Change what tokens do to each other. Raises UserError before the first change."""

    @abstractmethod
    def token_shares(self, arguments: dict[str, Any]) -> list[int]:
        """The tokens of each rank for a forward with these arguments, which may be changed: they are what the
        transformer gets. UserError if a rank would get nothing."""

    def split(self, embedded: Tensor) -> Tensor:
        """This rank's share of the patch embedding's output, [B,S,C] unless a family says otherwise."""
        return self.own(embedded, 1)

    def own(self, x: Tensor, dim: int, lengths: Sequence[int] | None = None) -> Tensor:
        """This rank's share of all tokens (or of what has these lengths), in memory of its own: a view would keep the
        whole."""
        share = own(x, dim, self.lengths if lengths is None else lengths, self.group)
        return share.clone(memory_format=torch.contiguous_format)

    @classmethod
    def check(cls, config: Any, num_ranks: int) -> None:
        """UserError for a transformer that this many ranks cannot share whatever its inputs."""
        if cls.exchanges_heads:
            shares(config.num_attention_heads, num_ranks, f"attention heads of {cls.transformer.__name__}")

    @classmethod
    def num_units(cls, grid: Sequence[int]) -> int:
        """Number of `unit`s that a grid of tokens has."""
        return math.prod(grid)

    @classmethod
    def check_shape(cls, config: Any, num_ranks: int, shape: Sequence[int]) -> None:
        """UserError for latents of this shape, [C,h,w] or [C,T,h,w], that leave a rank without a share."""
        size = config.patch_size if isinstance(config.patch_size, Sequence) else [config.patch_size] * 2
        shares(cls.num_units(patches(shape[1:], size)), num_ranks, cls.unit)

    def take_processor(self, attention: Any, stock: type) -> Any:
        """The stock processor that a family replaces; UserError if it is another one."""
        if type(attention.processor) is not stock:
            raise self.cannot(f"its attention runs {type(attention.processor).__name__}, not {stock.__name__}")
        if getattr(attention.processor, "_parallel_config", None) is not None:
            raise self.cannot("diffusers' own context parallelism is on already")
        return attention.processor

    def cannot(self, why: str) -> UserError:
        return UserError(f"{self.transformer.__name__} cannot share its tokens among ranks: {why}")

    def _enter(self, arguments: dict[str, Any]) -> None:
        for name, words in self.refused.items():
            if arguments.get(name) is not None:
                raise self.cannot(f"{words} ({name}) are not supported")
        self.lengths = self.token_shares(arguments)

    def _split(self, _: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        return self.split(embedded)

    def _gather(self, _: nn.Module, args: Any, projected: Tensor) -> Tensor:
        return gather(projected, 1, self.lengths, self.group)


def patches(shape: Sequence[int], patch_size: Sequence[int]) -> list[int]:
    """The grid of tokens, rows last but one: of latents whose shape ends in [h,w] or [T,h,w]."""
    return [count // side for count, side in zip(shape, patch_size, strict=True)]
