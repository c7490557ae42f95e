"""Differentiable exchange of tensors between the ranks of a group.

All ranks of the group must call these functions and run their backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from wfm_ds.errors import UserError

Tensors = tuple[Tensor, ...]


def shard_sizes(count: int, num_ranks: int, what: str) -> list[int]:
    """Return each rank's number of items if `count` items are sharded. Sizes differ by at most one, largest first.

    Raises UserError if a shard would be empty. what: plural noun for the items in the error message.
    """
    if count < num_ranks:
        raise UserError(
            f"engine.sequence_parallel = {num_ranks} exceeds the number of {what}, {count}; set it to {count} or less"
        )
    return [count // num_ranks + (rank < count % num_ranks) for rank in range(num_ranks)]


def local_shard(x: Tensor, dim: int, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return a view of this rank's shard of x, which is complete on every rank."""
    rank = dist.get_rank(group)
    if sum(lengths) != x.shape[dim]:
        raise ValueError(f"shard sizes {lengths} do not sum to dimension {dim} of {list(x.shape)}")
    return x.narrow(dim, sum(lengths[:rank]), lengths[rank])


def all_to_all(
    tensors: Tensors,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: ProcessGroup,
) -> Tensors:
    """Run one all-to-all for several tensors of equal shape and dtype. `reshard` is the differentiable version.

    Each tensor is split along split_dim, and the piece of size split_sizes[j] is sent to rank j. The received pieces
    are concatenated along concat_dim, where the piece from rank j has size concat_sizes[j].
    If all split_sizes are equal and all concat_sizes are equal on one rank, this must be so on all ranks.
    """
    if len(set(split_sizes)) == len(set(concat_sizes)) == 1:
        return all_to_all_equal(tensors, split_dim, concat_dim, group)
    first, count, rank = tensors[0], len(tensors), dist.get_rank(group)
    sent = [resize_shape(first, {split_dim: n}) for n in split_sizes]
    received = [resize_shape(first, {split_dim: split_sizes[rank], concat_dim: n}) for n in concat_sizes]
    sent_sizes, received_sizes = ([count * shape.numel() for shape in shapes] for shapes in (sent, received))
    outbox, inbox = first.new_empty(sum(sent_sizes)), first.new_empty(sum(received_sizes))
    pieces_by_rank = zip(*(x.split_with_sizes(list(split_sizes), split_dim) for x in tensors), strict=True)
    for block, shape, pieces in zip(outbox.split_with_sizes(sent_sizes), sent, pieces_by_rank, strict=True):
        for target, piece in zip(block.view(count, *shape), pieces, strict=True):
            # torch.stack(out=) would fail when compiled: it assumes the same memory layout for output and inputs.
            target.copy_(piece)
    dist.all_to_all_single(inbox, outbox, received_sizes, sent_sizes, group=group)
    blocks = [b.view(count, *shape) for b, shape in zip(inbox.split_with_sizes(received_sizes), received, strict=True)]
    return tuple(torch.cat([block[i] for block in blocks], concat_dim) for i in range(count))


def all_to_all_equal(tensors: Tensors, split_dim: int, concat_dim: int, group: ProcessGroup) -> Tensors:
    num_ranks = dist.get_world_size(group)
    by_rank = (num_ranks, tensors[0].shape[split_dim] // num_ranks)
    pieces = [torch.unflatten(x, split_dim, by_rank).movedim(split_dim, 0) for x in tensors]
    outbox = torch.stack(pieces, 1) if len(pieces) > 1 else pieces[0].unsqueeze(1).contiguous()
    inbox = torch.empty_like(outbox)  # [ranks, tensors, ...]
    dist.all_to_all_single(inbox, outbox, group=group)
    return tuple(inbox[:, i].movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1) for i in range(len(tensors)))


def resize_shape(x: Tensor, lengths: dict[int, int]) -> torch.Size:
    return torch.Size(lengths.get(dim, n) for dim, n in enumerate(x.shape))


class RankMap(torch.autograd.Function):
    """A linear map that all ranks apply together. The backward pass applies the adjoint map to the gradients."""

    @staticmethod
    def forward(
        ctx: Any, there: Callable[[Tensors], Tensors], back: Callable[[Tensors], Tensors], *tensors: Tensor
    ) -> Tensors:
        ctx.back = back
        return there(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *ctx.back(gradients))


def apply_rank_map(
    forward_map: Callable[[Tensors], Tensors], adjoint_map: Callable[[Tensors], Tensors], *tensors: Tensor
) -> Tensors:
    outputs: Tensors = RankMap.apply(forward_map, adjoint_map, *tensors)  # type: ignore[no-untyped-call]
    return outputs


def reshard(
    tensors: Tensors,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: ProcessGroup,
) -> Tensors:
    """Differentiable `all_to_all`. The backward pass runs the inverse exchange."""
    return apply_rank_map(
        lambda xs: all_to_all(xs, split_dim, split_sizes, concat_dim, concat_sizes, group),
        lambda gs: all_to_all(gs, concat_dim, concat_sizes, split_dim, split_sizes, group),
        *tensors,
    )


def gather_shards(x: Tensor, dim: int, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """Concatenate the shards of all ranks along dim. All ranks must pass the same gradient to the backward pass."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(xs: Tensors) -> Tensors:
        copies = torch.cat([*xs] * num_ranks, dim)
        return all_to_all((copies,), dim, [lengths[rank]] * num_ranks, dim, lengths, group)

    return apply_rank_map(all_gather, lambda gs: (local_shard(gs[0], dim, lengths, group).contiguous(),), x)[0]


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks. The backward pass sums the gradients over the ranks."""

    def all_reduce(xs: Tensors) -> Tensors:
        total = xs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return (total,)

    return apply_rank_map(all_reduce, all_reduce, x)[0]


def exchange_halo(x: Tensor, group: ProcessGroup) -> Tensor:
    """Prepend the last line of the previous rank to x, and append the first line of the next rank.

    A line is a row of an image or a frame of a video. x: [batch, channels, local lines, line length]. The first rank
    prepends zeros, and the last rank appends zeros.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    before, after = rank > 0, rank < num_ranks - 1
    sizes = [int(abs(other - rank) == 1) for other in range(num_ranks)]

    def exchange_lines(lines: Tensor) -> tuple[Tensor, Tensor]:
        """Return (last line of the previous rank, first line of the next rank), or zeros for absent ranks."""
        outer = [lines[:, :, :1]] * before + [lines[:, :, -1:]] * after
        zeros = torch.zeros_like(lines[:, :, :1])
        if not outer:
            return zeros, zeros
        received = all_to_all((torch.cat(outer, 2),), 2, sizes, 2, sizes, group)[0]
        return (received[:, :, :1] if before else zeros), (received[:, :, -1:] if after else zeros)

    def add_halo(xs: Tensors) -> Tensors:
        above, below = exchange_lines(xs[0])
        return (torch.cat([above, xs[0], below], 2),)

    def add_halo_gradients(gs: Tensors) -> Tensors:
        above, below = exchange_lines(gs[0])
        gradient = gs[0][:, :, 1:-1].clone()
        gradient[:, :, :1] += above
        gradient[:, :, -1:] += below
        return (gradient,)

    return apply_rank_map(add_halo, add_halo_gradients, x)[0]
