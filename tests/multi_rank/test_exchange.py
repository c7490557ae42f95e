"""Exchanges between ranks: the received tensors, and the backward pass as the adjoint, <f(x), y> = <x, f*(y)>."""

import torch
import torch.distributed as dist

from wfm_ds.ulysses.exchange import exchange_halo, gather_shards, local_shard, reshard, shard_sizes, sum_over_ranks

TOKENS, HEADS = (6, 7, 11), (6, 5, 4)


def draws(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def require_adjoint(f, x, seed):
    """Assert that <f(x), y> equals <x, f*(y)>, summed over all ranks. Each rank has a different y."""
    x = x.clone().requires_grad_()
    outputs = f(x)
    against = [draws(seed + 100 * i + dist.get_rank(), *output.shape) for i, output in enumerate(outputs)]
    there = sum((output * y).sum() for output, y in zip(outputs, against, strict=True))
    there.backward()
    products = torch.stack([there.detach(), (x.detach() * x.grad).sum()])
    dist.all_reduce(products)
    torch.testing.assert_close(products[0], products[1], rtol=1e-12, atol=1e-12)


def reshard_on_rank(num_tokens, num_heads):
    group, ranks = dist.group.WORLD, dist.get_world_size()
    tokens, heads = shard_sizes(num_tokens, ranks, "tokens"), shard_sizes(num_heads, ranks, "heads")
    whole = [draws(seed, 2, num_tokens, num_heads, 3) for seed in range(3)]
    local = tuple(local_shard(x, 1, tokens, group) for x in whole)
    there = reshard(local, 2, heads, 1, tokens, group)
    back = reshard(there, 1, tokens, 2, heads, group)
    assert all(torch.equal(got, local_shard(x, 2, heads, group)) for got, x in zip(there, whole, strict=True))
    assert all(map(torch.equal, back, local))
    require_adjoint(lambda x: reshard((x, 2 * x), 2, heads, 1, tokens, group), local[0], 7)


def neighbours_on_rank(num_lines):
    group, ranks = dist.group.WORLD, dist.get_world_size()
    lines = shard_sizes(num_lines, ranks, "lines")
    whole = draws(0, 2, 3, num_lines, 4)
    start = sum(lines[: dist.get_rank()])
    padded = torch.nn.functional.pad(whole, (0, 0, 1, 1))
    local = local_shard(whole, 2, lines, group)
    assert torch.equal(exchange_halo(local, group), padded[:, :, start : start + local.shape[2] + 2])
    require_adjoint(lambda x: (exchange_halo(x, group),), local, 5)


def whole_on_rank(length):
    group, ranks = dist.group.WORLD, dist.get_world_size()
    lengths = shard_sizes(length, ranks, "tokens")
    whole = draws(0, 2, length, 3)
    local = local_shard(whole, 1, lengths, group).clone().requires_grad_()
    gathered = gather_shards(local, 1, lengths, group)
    assert torch.equal(gathered, whole)
    gathered.backward(gradient := draws(1, 2, length, 3))  # equal on all ranks, as for one common loss
    assert torch.equal(local.grad, local_shard(gradient, 1, lengths, group))
    summand = draws(dist.get_rank(), 2, 3)
    total = sum_over_ranks(summand, group)
    torch.testing.assert_close(total, sum(draws(rank, 2, 3) for rank in range(ranks)))
    require_adjoint(lambda x: (sum_over_ranks(x, group),), summand, 3)


def everything_on_rank():
    for num_tokens in TOKENS:
        for num_heads in HEADS:
            reshard_on_rank(num_tokens, num_heads)
        neighbours_on_rank(num_tokens)
        whole_on_rank(num_tokens)
    return True


def test_two_ranks(two_ranks):
    assert two_ranks.run(everything_on_rank) == [True] * 2


def test_one_rank_exchanges_with_itself(one_rank):
    assert one_rank.run(everything_on_rank) == [True]


def test_three_ranks(three_ranks):
    assert three_ranks.run(everything_on_rank) == [True] * 3
