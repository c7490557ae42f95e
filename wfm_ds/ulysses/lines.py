"""Families that share whole lines of tokens: attention sums a state over ranks, a convolution trades border lines.

Neither exchange grows with the number of tokens of a rank, and the number of heads is no limit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from wfm_ds.ulysses.base import SharedTokens
from wfm_ds.ulysses.hooks import change_arguments, trade_lines

EPS = 1e-15  # of the stock processors of linear attention


class SharedLines(SharedTokens):
    exchanges_heads = False
    refused: ClassVar[Mapping[str, str]] = {
        "attention_mask": "masks of self-attention",
        "controlnet_block_samples": "ControlNet residuals",
    }
    stock_attention: ClassVar[type]
    attention: ClassVar[type]  # the processor in its place, made of the group
    convolution: ClassVar[str]  # of a block's feed-forward, across the lines

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
        """Change a block's arguments from those of all lines to those of this rank's."""

    @classmethod
    def num_units(cls, grid: Sequence[int]) -> int:
        return grid[0]
