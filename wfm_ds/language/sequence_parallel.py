"""Sequence parallelism in the language model (DeepSpeed-Ulysses): the tokens are sharded over the ranks of a replica.

Every rank embeds the whole packed sequence. In the decoder, each rank has a shard of the tokens. In attention, each
rank has all tokens for a shard of the heads. After the backward pass, each rank has a partial gradient of every
parameter, so gradients must be summed over the ranks of a replica.
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
from wfm_ds.language.attention import has_windows, segment_attention
from wfm_ds.ulysses.base import change_arguments
from wfm_ds.ulysses.exchange import local_shard, reshard

ATTENTION_NAME = "wfm_ds_ulysses"  # in transformers' attention registry


@dataclass(frozen=True, slots=True)
class SequenceShards:
    """The shards of one packed sequence on the ranks of a replica."""

    lengths: list[int]  # number of tokens of each rank
    segments: list[int]  # number of tokens of each conversation
    group: ProcessGroup


def check_sequence_parallel(network: Any, num_ranks: int) -> None:
    """Raise UserError if the model's attention cannot be sharded over this many ranks."""
    config = network.config.get_text_config()
    if config.num_attention_heads % num_ranks:
        raise UserError(
            f"engine.sequence_parallel = {num_ranks} does not divide the {config.num_attention_heads} attention heads "
            "of the model; use a divisor of both the heads and the ranks"
        )
    if has_windows(network):
        raise UserError(
            "the model has sliding-window layers, which do not support sequence parallelism; set "
            "engine.sequence_parallel to 1"
        )


def install_sequence_parallel(network: nn.Module, group: ProcessGroup) -> None:
    """Enable sequence parallelism in a model, in place. Raises UserError like `check_sequence_parallel`.

    All ranks of `group` must then call forward with the same sequence. Each rank receives the logits of its token
    shard. `logits_to_keep` counts from the first token of the shard.
    """
    check_sequence_parallel(network, dist.get_world_size(group))
    unwrapped: Any = network
    decoder = unwrapped.model.language_model
    AttentionInterface.register(ATTENTION_NAME, ulysses_attention_forward)
    decoder.config._attn_implementation = ATTENTION_NAME  # transformers builds masks only for its own names
    change_arguments(decoder, lambda arguments: shard_arguments(arguments, group))


def tokens_per_rank(count: int, num_ranks: int) -> list[int]:
    """Return the number of tokens of each rank, at least 1. Sequences shorter than num_ranks need `pad_tokens`."""
    count = max(count, num_ranks)
    return [count // num_ranks + (rank < count % num_ranks) for rank in range(num_ranks)]


def labels_per_rank(label_positions: Tensor, count: int, num_ranks: int) -> list[int]:
    """Return the number of labels in the token shard of each rank.

    label_positions: ascending positions in a sequence of `count` tokens.
    """
    ends = torch.tensor(tokens_per_rank(count, num_ranks)).cumsum(0)
    label_ends = torch.searchsorted(label_positions, ends.to(label_positions.device)).tolist()
    return [end - start for start, end in itertools.pairwise([0, *label_ends])]


def local_labels(
    label_positions: Tensor, targets: Tensor, count: int, group: ProcessGroup
) -> tuple[Tensor, Tensor, list[int]]:
    """Return the label positions in this rank's shard, their targets, and the number of labels of each rank.

    Positions count from the first token of the shard. targets: already shifted by one token.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    lengths = labels_per_rank(label_positions, count, num_ranks)
    first = sum(tokens_per_rank(count, num_ranks)[:rank])
    return local_shard(label_positions, 0, lengths, group) - first, local_shard(targets, 0, lengths, group), lengths


def shard_arguments(arguments: dict[str, Any], group: ProcessGroup) -> None:
    lengths = tokens_per_rank(arguments["inputs_embeds"].shape[1], dist.get_world_size(group))
    embeddings, positions, mask = (
        None if arguments.get(name) is None else pad_tokens(arguments[name], dim, sum(lengths))
        for name, dim in (("inputs_embeds", 1), ("position_ids", 2), ("visual_pos_masks", 1))
    )
    assert embeddings is not None
    assert positions is not None
    arguments["inputs_embeds"] = local_shard(embeddings, 1, lengths, group)
    arguments["position_ids"] = local_shard(positions, 2, lengths, group)
    arguments["row"] = SequenceShards(lengths, segment_lengths(positions[0, 0]), group)
    if mask is not None:
        media_per_rank = [int(part.sum()) for part in mask.split_with_sizes(lengths, 1)]
        arguments["visual_pos_masks"] = local_shard(mask, 1, lengths, group)
        features = arguments["deepstack_visual_embeds"]
        arguments["deepstack_visual_embeds"] = [local_shard(feature, 0, media_per_rank, group) for feature in features]


def pad_tokens(x: Tensor, dim: int, count: int) -> Tensor:
    """Pad dimension `dim` with zeros to length `count`. Each padding token forms a separate conversation."""
    num_missing = count - x.shape[dim]
    if num_missing == 0:
        return x
    return torch.cat([x, x.new_zeros([num_missing if d == dim else n for d, n in enumerate(x.shape)])], dim)


def segment_lengths(positions: Tensor) -> list[int]:
    """Return the number of tokens of each conversation.

    positions: [L], position of each token within its conversation, starting at 0.
    """
    starts = [*torch.nonzero(positions == 0)[:, 0].tolist(), len(positions)]
    return [end - start for start, end in itertools.pairwise(starts)]


def kv_head_repeats(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """Return how many copies of each key and value head are needed so that every rank gets the same number of heads."""
    return next(
        factor
        for factor in range(1, num_heads // num_kv_heads + 1)
        if num_kv_heads * factor % num_ranks == 0 and num_heads % (num_kv_heads * factor) == 0
    )


def ulysses_attention_forward(
    module: nn.Module,
    query_BHnD: Tensor,
    key_BKnD: Tensor,
    value_BKnD: Tensor,
    attention_mask: None,
    *,
    row: SequenceShards,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each conversation, with the interface of transformers. Return [B,n,H,D].

    There are B sequences, n tokens on this rank, H query heads, K key and value heads, and D channels per head. All
    ranks of the group must call this.
    """
    num_ranks, num_heads, num_kv_heads = dist.get_world_size(row.group), query_BHnD.shape[1], key_BKnD.shape[1]
    num_repeats = kv_head_repeats(num_heads, num_kv_heads, num_ranks)
    if num_repeats > 1:
        key_BKnD, value_BKnD = (x.repeat_interleave(num_repeats, dim=1) for x in (key_BKnD, value_BKnD))
    heads, kv_heads = ([count // num_ranks] * num_ranks for count in (num_heads, num_kv_heads * num_repeats))
    (query,) = reshard((query_BHnD,), 1, heads, 2, row.lengths, row.group)  # [B,h,S,D]
    key, value = reshard((key_BKnD, value_BKnD), 1, kv_heads, 2, row.lengths, row.group)
    output = segment_attention(query, key, value, row.segments, scaling=scaling, dropout=dropout)
    (local_output,) = reshard((output,), 2, row.lengths, 1, heads, row.group)
    return local_output.transpose(1, 2).contiguous(), None
