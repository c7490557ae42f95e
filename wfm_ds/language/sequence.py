"""Sequence parallelism of a row: the ranks of a replica share its tokens in the language model (DeepSpeed-Ulysses).

Every rank has the whole row and embeds its text and media. From there on a rank has its tokens only, with their
positions and, in Qwen3-VL, the deepstack features of those that are of media; in attention it has all tokens for its
share of the heads. What a rank holds after the backward pass is a part of each gradient, that of the tower included,
and the parts of a replica add up.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface

from wfm_ds.errors import UserError
from wfm_ds.language.attention import has_windows, within
from wfm_ds.ulysses.exchange import own, reshard
from wfm_ds.ulysses.hooks import change_arguments

NAME = "wfm_ds_ulysses"  # the attention, among transformers' own


@dataclass(frozen=True, slots=True)
class Row:
    """The running row, as the layers' arguments carry it: under gradient checkpointing they run again when another
    row may have come between."""

    lengths: list[int]  # tokens of each rank
    segments: list[int]  # tokens of each conversation
    group: ProcessGroup


def check(network: Any, num_ranks: int) -> None:
    """Raise UserError for a model whose attention this many ranks cannot share."""
    config = network.config.get_text_config()
    if config.num_attention_heads % num_ranks:
        raise UserError(
            f"engine.sequence_parallel = {num_ranks} does not divide the {config.num_attention_heads} attention heads "
            f"of {type(network).__name__}; use a divisor of both the heads and the ranks"
        )
    if has_windows(network):
        raise UserError(
            f"{type(network).__name__} has layers with a sliding window, whose tokens cannot be shared among ranks; "
            "set engine.sequence_parallel to 1"
        )


def install(network: nn.Module, group: ProcessGroup) -> None:
    """Change a model in place: each forward, called by all ranks of `group` with equal whole rows, returns the logits
    of this rank's tokens; `logits_to_keep` counts from its first one. Raises UserError as `check` does."""
    check(network, dist.get_world_size(group))
    bare: Any = network
    decoder = bare.model.language_model
    AttentionInterface.register(NAME, attend)
    decoder.config._attn_implementation = NAME  # a name without a mask: transformers makes none

    def cut(arguments: dict[str, Any]) -> None:
        cut_arguments(arguments, group)

    change_arguments(decoder, cut)


def token_shares(count: int, num_ranks: int) -> list[int]:
    """Tokens of each rank, at least one: a row that is shorter than the replica is filled up (`filled`)."""
    count = max(count, num_ranks)
    return [count // num_ranks + (rank < count % num_ranks) for rank in range(num_ranks)]


def label_shares(kept: Tensor, count: int, num_ranks: int) -> list[int]:
    """Labelled places of each rank, of the ascending `kept` in a row of `count` tokens."""
    ends = torch.tensor(token_shares(count, num_ranks)).cumsum(0)
    passed = torch.searchsorted(kept, ends.to(kept.device)).tolist()
    return [end - begin for begin, end in itertools.pairwise([0, *passed])]


def own_labels(kept: Tensor, targets: Tensor, count: int, group: ProcessGroup) -> tuple[Tensor, Tensor, list[int]]:
    """This rank's places, counted from its first token, what they are to predict, and the number on each rank.

    A place has the token after it for its target already, so that the last token of a share has one too.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    lengths = label_shares(kept, count, num_ranks)
    first = sum(token_shares(count, num_ranks)[:rank])
    return own(kept, 0, lengths, group) - first, own(targets, 0, lengths, group), lengths


def cut_arguments(arguments: dict[str, Any], group: ProcessGroup) -> None:
    """Replace the decoder's arguments, of a row, by those of this rank's tokens."""
    lengths = token_shares(arguments["inputs_embeds"].shape[1], dist.get_world_size(group))
    embedded, positions, mask = (
        None if arguments.get(name) is None else filled(arguments[name], dim, sum(lengths))
        for name, dim in (("inputs_embeds", 1), ("position_ids", 2), ("visual_pos_masks", 1))
    )
    assert embedded is not None
    assert positions is not None
    arguments["inputs_embeds"] = own(embedded, 1, lengths, group)
    arguments["position_ids"] = own(positions, 2, lengths, group)
    arguments["row"] = Row(lengths, segment_lengths(positions[0, 0]), group)
    if mask is not None:
        of_rank = [int(part.sum()) for part in mask.split_with_sizes(lengths, 1)]
        arguments["visual_pos_masks"] = own(mask, 1, lengths, group)
        features = arguments["deepstack_visual_embeds"]
        arguments["deepstack_visual_embeds"] = [own(feature, 0, of_rank, group) for feature in features]


def filled(x: Tensor, dim: int, count: int) -> Tensor:
    """The tensor with zeros up to this length. A token at place 0, which begins a conversation, is seen by no other:
    so are those that fill up a blank row of fewer tokens than ranks."""
    lacking = count - x.shape[dim]
    if lacking == 0:
        return x
    return torch.cat([x, x.new_zeros([lacking if d == dim else n for d, n in enumerate(x.shape)])], dim)


def segment_lengths(places: Tensor) -> list[int]:
    """Tokens of each conversation in a row, from the place [L] of each token in its own, which begins at 0."""
    begins = [*torch.nonzero(places == 0)[:, 0].tolist(), len(places)]
    return [end - begin for begin, end in itertools.pairwise(begins)]


def repeats(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """Copies of each head of keys and values that the ranks, which divide the query heads, need to get whole ones."""
    return next(
        times
        for times in range(1, num_heads // num_kv_heads + 1)
        if num_kv_heads * times % num_ranks == 0 and num_heads % (num_kv_heads * times) == 0
    )


def attend(
    module: nn.Module,
    query_BHnD: Tensor,
    key_BKnD: Tensor,
    value_BKnD: Tensor,
    attention_mask: None,
    *,
    row: Row,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within each conversation of the row, [B,n,H,D], as transformers calls it. H query heads, K of keys and
    values. Three exchanges: queries, keys with values, and back; no mask, so that its memory grows with the tokens."""
    num_ranks, num_heads, num_kv_heads = dist.get_world_size(row.group), query_BHnD.shape[1], key_BKnD.shape[1]
    times = repeats(num_heads, num_kv_heads, num_ranks)
    if times > 1:
        key_BKnD, value_BKnD = (x.repeat_interleave(times, dim=1) for x in (key_BKnD, value_BKnD))
    heads, kv_heads = ([count // num_ranks] * num_ranks for count in (num_heads, num_kv_heads * times))
    (query,) = reshard((query_BHnD,), 1, heads, 2, row.lengths, row.group)  # [B,h,S,D]
    key, value = reshard((key_BKnD, value_BKnD), 1, kv_heads, 2, row.lengths, row.group)
    attended = within(query, key, value, row.segments, scaling=scaling, dropout=dropout)
    (mine,) = reshard((attended,), 2, row.lengths, 1, heads, row.group)
    return mine.transpose(1, 2).contiguous(), None
