"""Tensors on their way between the ranks of a group, and their gradients on the way back.

Shares need not be equal: rank r holds `shares(count, ranks)[r]` of the tokens, and in attention of the heads. Every
function is a collective of its group, in the forward and, where a gradient is asked for, in the backward pass.
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


def shares(count: int, num_ranks: int, what: str) -> list[int]:
    """Number of the `count` things that each rank gets: equally many, or one more on the first ranks.

    Raises UserError, naming the things (`what`, plural), where a rank would get none.
    """
    if count < num_ranks:
        raise UserError(
            f"engine.sequence_parallel = {num_ranks} exceeds the number of {what}, {count}; set it to {count} or less"
        )
    return [count // num_ranks + (rank < count % num_ranks) for rank in range(num_ranks)]


def own(x: Tensor, dim: int, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """A view of this rank's share of a tensor that is whole on every rank."""
    rank = dist.get_rank(group)
    if sum(lengths) != x.shape[dim]:
        raise ValueError(f"{list(x.shape)} has {x.shape[dim]} along dimension {dim}, {lengths} are shared")
    return x.narrow(dim, sum(lengths[:rank]), lengths[rank])


def exchange(
    tensors: Tensors, cut_dim: int, cut: Sequence[int], join_dim: int, join: Sequence[int], group: ProcessGroup
) -> Tensors:
    """One all-to-all for several tensors of one shape and dtype. Knows no gradient: `reshard` does.

    Of each tensor, piece j of the lengths `cut` along cut_dim goes to rank j. What comes, join[j] long along join_dim
    from rank j, is joined there. What a rank cuts for another is what that one expects of it, and either all ranks pass
    equal lengths or none does.
    """
    if len(set(cut)) == len(set(join)) == 1:
        return exchange_equal(tensors, cut_dim, join_dim, group)
    first, count, rank = tensors[0], len(tensors), dist.get_rank(group)
    sent = [resized(first, {cut_dim: n}) for n in cut]
    received = [resized(first, {cut_dim: cut[rank], join_dim: n}) for n in join]
    sent_sizes, received_sizes = ([count * shape.numel() for shape in shapes] for shapes in (sent, received))
    outbox, inbox = first.new_empty(sum(sent_sizes)), first.new_empty(sum(received_sizes))
    pieces = zip(*(x.split_with_sizes(list(cut), cut_dim) for x in tensors), strict=True)
    for block, shape, of_rank in zip(outbox.split_with_sizes(sent_sizes), sent, pieces, strict=True):
        for place, piece in zip(block.view(count, *shape), of_rank, strict=True):
            place.copy_(piece)  # not stack(out=): compiled, it takes its output for one laid out like its inputs
    dist.all_to_all_single(inbox, outbox, received_sizes, sent_sizes, group=group)
    blocks = [b.view(count, *shape) for b, shape in zip(inbox.split_with_sizes(received_sizes), received, strict=True)]
    return tuple(torch.cat([block[i] for block in blocks], join_dim) for i in range(count))


def exchange_equal(tensors: Tensors, cut_dim: int, join_dim: int, group: ProcessGroup) -> Tensors:
    """`exchange` where all lengths are equal: a copy on each side, or none for a single sample's sequence."""
    num_ranks = dist.get_world_size(group)
    by_rank = (num_ranks, tensors[0].shape[cut_dim] // num_ranks)
    pieces = [torch.unflatten(x, cut_dim, by_rank).movedim(cut_dim, 0) for x in tensors]
    outbox = torch.stack(pieces, 1) if len(pieces) > 1 else pieces[0].unsqueeze(1).contiguous()
    inbox = torch.empty_like(outbox)  # [ranks, tensors, ...]
    dist.all_to_all_single(inbox, outbox, group=group)
    return tuple(inbox[:, i].movedim(0, join_dim).flatten(join_dim, join_dim + 1) for i in range(len(tensors)))


def resized(x: Tensor, lengths: dict[int, int]) -> torch.Size:
    """The shape of x with other lengths along some dimensions."""
    return torch.Size(lengths.get(dim, n) for dim, n in enumerate(x.shape))


class Between(torch.autograd.Function):
    """A linear map between ranks; its backward pass is the adjoint."""

    @staticmethod
    def forward(
        ctx: Any, there: Callable[[Tensors], Tensors], back: Callable[[Tensors], Tensors], *tensors: Tensor
    ) -> Tensors:
        ctx.back = back
        return there(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *ctx.back(gradients))


def between(there: Callable[[Tensors], Tensors], back: Callable[[Tensors], Tensors], *tensors: Tensor) -> Tensors:
    outputs: Tensors = Between.apply(there, back, *tensors)  # type: ignore[no-untyped-call]
    return outputs


def reshard(
    tensors: Tensors, cut_dim: int, cut: Sequence[int], join_dim: int, join: Sequence[int], group: ProcessGroup
) -> Tensors:
    """`exchange` with its gradient: the way back."""
    return between(
        lambda xs: exchange(xs, cut_dim, cut, join_dim, join, group),
        lambda gs: exchange(gs, join_dim, join, cut_dim, cut, group),
        *tensors,
    )


def gather(x: Tensor, dim: int, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """Every rank's share along dim, on every rank. Backward: the own slice of the gradient of the whole, which must be
    the same on every rank."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def give_all(xs: Tensors) -> Tensors:
        copies = torch.cat([*xs] * num_ranks, dim)
        return exchange((copies,), dim, [lengths[rank]] * num_ranks, dim, lengths, group)

    return between(give_all, lambda gs: (own(gs[0], dim, lengths, group).contiguous(),), x)[0]


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """An all-reduce, in both directions: each rank's part of the loss depends on every rank's summand."""

    def total(xs: Tensors) -> Tensors:
        summed = xs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return (summed,)

    return between(total, total, x)[0]


def halo(x: Tensor, group: ProcessGroup) -> Tensor:
    """[B,C,n,W] -> [B,C,n+2,W]: a line of the rank before in front, one of the rank after behind, zeros at the ends."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    before, after = rank > 0, rank < num_ranks - 1
    near = [int(abs(other - rank) == 1) for other in range(num_ranks)]

    def traded(lines: Tensor) -> tuple[Tensor, Tensor]:
        """The first line goes to the rank before, the last to the one after; what these two sent, or zeros."""
        outer = [lines[:, :, :1]] * before + [lines[:, :, -1:]] * after
        zeros = torch.zeros_like(lines[:, :, :1])
        if not outer:
            return zeros, zeros
        came = exchange((torch.cat(outer, 2),), 2, near, 2, near, group)[0]
        return (came[:, :, :1] if before else zeros), (came[:, :, -1:] if after else zeros)

    def widened(xs: Tensors) -> Tensors:
        above, below = traded(xs[0])
        return (torch.cat([above, xs[0], below], 2),)

    def folded(gs: Tensors) -> Tensors:
        """Return what the neighbours computed with this rank's lines to it."""
        above, below = traded(gs[0])
        gradient = gs[0][:, :, 1:-1].clone()
        gradient[:, :, :1] += above
        gradient[:, :, -1:] += below
        return (gradient,)

    return between(widened, folded, x)[0]
