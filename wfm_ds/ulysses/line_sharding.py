"""Base class for families that shard whole lines of tokens (rows or frames).

Linear attention sums a state over the ranks. A convolution exchanges the lines at the shard borders. The amount of
exchanged data does not depend on the number of local lines. The number of heads does not limit the number of ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from wfm_ds.ulysses.base import UlyssesTransformer
from wfm_ds.ulysses.hooks import change_arguments, install_halo_exchange

EPS = 1e-15  # as in diffusers' processors of linear attention


class UlyssesLineTransformer(UlyssesTransformer):
    shards_heads = False
    unsupported_arguments: ClassVar[Mapping[str, str]] = {
        "attention_mask": "masks of self-attention",
        "controlnet_block_samples": "ControlNet residuals",
    }
    original_processor: ClassVar[type]
    sharded_processor: ClassVar[type]  # its replacement; constructed with the group
    convolution_name: ClassVar[str]  # attribute of a block's feed-forward: the convolution across lines

    def shard_blocks(self, transformer: Any) -> None:
        blocks = transformer.transformer_blocks
        for block in blocks:
            self.require_processor(block.attn1, self.original_processor)
        for block in blocks:
            block.attn1.set_processor(self.sharded_processor(self.group))
            change_arguments(block, self.shard_block_arguments)
            install_halo_exchange(getattr(block.ff, self.convolution_name), self.group)

    @abstractmethod
    def shard_block_arguments(self, arguments: dict[str, Any]) -> None:
        """Edit block arguments that describe all lines, so that they describe only the local lines."""

    @classmethod
    def num_units(cls, grid: Sequence[int]) -> int:
        return grid[0]
