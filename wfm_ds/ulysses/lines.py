"""Base class of families that shard whole lines of tokens.

Linear attention sums a state over the ranks; a convolution exchanges the lines at the shard borders. The size of both
exchanges is independent of the number of local tokens, and the number of heads does not limit the number of ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from wfm_ds.ulysses.base import SharedTokens
from wfm_ds.ulysses.hooks import change_arguments, trade_lines

EPS = 1e-15  # as in diffusers' processors of linear attention


class SharedLines(SharedTokens):
    exchanges_heads = False
    refused: ClassVar[Mapping[str, str]] = {
        "attention_mask": "masks of self-attention",
        "controlnet_block_samples": "ControlNet residuals",
    }
    stock_attention: ClassVar[type]
    attention: ClassVar[type]  # its replacement; constructed with the group
    convolution: ClassVar[str]  # attribute of a block's feed-forward: the convolution across lines

    def share_blocks(self, transformer: Any) -> None:
        blocks = transformer.transformer_blocks
        for block in blocks:
            self.take_processor(block.attn1, self.stock_attention)
        for block in blocks:
            block.attn1.set_processor(self.attention(self.group))
            change_arguments(block, self.share_lines)
            trade_lines(getattr(block.ff, self.convolution), self.group)

    @abstractmethod
    def share_lines(self, arguments: dict[str, Any]) -> None:
        """Replace the arguments of a block for all lines by those for the local lines."""

    @classmethod
    def num_units(cls, grid: Sequence[int]) -> int:
        return grid[0]
