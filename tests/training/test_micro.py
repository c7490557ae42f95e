"""Batching of loss terms into forwards: equal work on every rank, one expert per batch, no term lost."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wfm_ds.algorithms.base import LossTerm, LossTermBatch
from wfm_ds.training.micro_batches import (
    MicroBatch,
    MicroBatches,
    group_micro_batches,
    num_bytes,
    pad_across_ranks,
    split_into_micro_batches,
)
from wfm_ds.types import ConditioningFrames

HIGH, LOW = 0.95, 0.3  # noise levels of two experts, with a boundary of 0.875
terms_of_a_rank = st.lists(st.tuples(st.sampled_from([HIGH, LOW]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=9)


def one_expert(sigma):
    return 0


def two_experts(sigma):
    return int(sigma < 0.875)


def ranks_of(drawn):
    return [[LossTerm(row=row, sigma=s, weight=w) for row, (s, w) in enumerate(rank)] for rank in drawn]


def padded_terms(ranks, expert_of, num_experts, has_gradient=lambda term: True):
    """Return the padded terms of each rank; the maxima over ranks are computed here instead of by a collective."""
    return [update.terms for update in updates_of(ranks, expert_of, num_experts, has_gradient)]


def updates_of(ranks, expert_of, num_experts, has_gradient):
    passed = []

    def record(values):
        passed.append(values)
        return values

    for rank in ranks:
        pad_across_ranks(rank, expert_of, num_experts, record, has_gradient)
    most = {name: max(values[name] for values in passed) for name in passed[0]}
    return [pad_across_ranks(rank, expert_of, num_experts, lambda _: most, has_gradient) for rank in ranks]


@given(st.lists(terms_of_a_rank, min_size=1, max_size=3))
@settings(deadline=None)
def test_all_ranks_get_equally_many_terms_of_each_expert_and_lose_none(drawn):
    ranks = ranks_of(drawn)
    after = padded_terms(ranks, two_experts, 2)
    counts = {tuple(sum(two_experts(t.sigma) == s for t in terms) for s in (0, 1)) for terms in after}
    assert len(counts) == 1
    for before, terms in zip(ranks, after, strict=True):
        for expert in (0, 1):
            live = [t for t in before if t.weight and two_experts(t.sigma) == expert]
            assert [t for t in terms if t.weight and two_experts(t.sigma) == expert] == live
        assert {t.row for t in terms} <= {t.row for t in before}
    needed = max(sum(t.weight > 0 for t in rank) for rank in ranks)
    assert len(after[0]) <= 2 * needed


def test_terms_of_different_teachers_have_separate_padded_forwards():
    ranks = [[0, 0, 2], [2, 2, 2], [1, 0, 0]]
    ranks = [[LossTerm(row=row, sigma=LOW, weight=1.0, teacher=t) for row, t in enumerate(rank)] for rank in ranks]
    passed = []
    for rank in ranks:
        pad_across_ranks(rank, one_expert, 1, lambda v: passed.append(v) or v, num_teachers=4)
    most = {name: max(values[name] for values in passed) for name in passed[0]}
    after = [pad_across_ranks(rank, one_expert, 1, lambda _: most, num_teachers=4).terms for rank in ranks]
    for before, terms in zip(ranks, after, strict=True):
        assert [t.teacher for t in terms] == [0, 0, 1, 2, 2, 2]
        assert sorted(t.row for t in terms if t.weight) == [t.row for t in before]
        batches = split_into_micro_batches(terms, 2, one_expert)
        assert [[t.teacher for t in batch] for batch, _ in batches] == [[0, 0], [1], [2, 2], [2]]


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=6, max_size=6), min_size=1, max_size=3))
@settings(deadline=None)
def test_with_one_expert_all_ranks_are_padded_to_the_longest(weights):
    ranks = ranks_of([[(LOW, w) for w in rank] for rank in weights])
    most = int(max(sum(rank) for rank in weights))
    for before, after in zip(ranks, padded_terms(ranks, one_expert, 1), strict=True):
        assert len(after) == most
        if all(t.weight for t in before):
            assert after == before


def test_a_rank_without_terms_of_an_expert_pads_with_another_ranks_noise_level():
    ranks = ranks_of([[(HIGH, 1.0)], [(LOW, 1.0)]])
    first, second = padded_terms(ranks, two_experts, 2)
    assert [(t.sigma, t.weight) for t in first] == [(HIGH, 1.0), (LOW, 0.0)]
    assert [(t.sigma, t.weight) for t in second] == [(HIGH, 0.0), (LOW, 1.0)]


@given(st.lists(terms_of_a_rank, min_size=1, max_size=3), st.sets(st.integers(0, 8)))
@settings(deadline=None)
def test_terms_without_a_gradient_are_left_out_and_counted(drawn, silent):
    ranks = ranks_of(drawn)
    updates = updates_of(ranks, two_experts, 2, lambda term: term.row not in silent)
    counted = [sum(t.weight for t in rank) for rank in ranks]
    assert [update.total_weight for update in updates] == counted
    kept = [[t for t in rank if t.weight and t.row not in silent] for rank in ranks]
    for update, terms in zip(updates, kept, strict=True):
        assert sorted(t.row for t in update.terms if t.weight) == sorted(t.row for t in terms)
    lengths = {len(update.terms) for update in updates}
    assert len(lengths) == 1
    if not any(counted):
        assert lengths == {0}  # no optimizer step
    elif not any(kept):
        assert lengths == {1}  # a step without a gradient: weight decay and momentum still change the weights
    else:
        assert lengths <= set(range(max(map(len, kept)), sum(map(len, kept)) + 1))


@given(terms_of_a_rank, st.integers(1, 4))
@settings(deadline=None)
def test_each_micro_batch_has_one_expert_and_each_term_is_in_one(drawn, size):
    [terms] = ranks_of([drawn])
    parts = split_into_micro_batches(terms, size, two_experts)
    assert sorted(t.row for part, _ in parts for t in part) == [t.row for t in terms]
    assert all(1 <= len(part) <= size and {two_experts(t.sigma) for t in part} == {s} for part, s in parts)
    assert [s for _, s in parts] == sorted(s for _, s in parts)


@given(st.lists(st.tuples(terms_of_a_rank, terms_of_a_rank), min_size=1, max_size=3), st.integers(1, 4))
@settings(deadline=None)
def test_all_ranks_run_equally_many_backwards_of_terms_with_one_part_and_with_two(drawn, size):
    def terms_of(num_parts, rank):
        return [LossTerm(row=row, sigma=s, weight=w, num_parts=num_parts) for row, (s, w) in enumerate(rank)]

    ranks = [[*terms_of(1, whole), *terms_of(2, divided)] for whole, divided in drawn]
    cuts = [split_into_micro_batches(terms, size, two_experts) for terms in padded_terms(ranks, two_experts, 2)]
    kinds = [[(len(part), expert, part[0].num_parts) for part, expert in of_rank] for of_rank in cuts]
    assert all(of_rank == kinds[0] for of_rank in kinds)
    assert all(len({(two_experts(t.sigma), t.num_parts) for t in part}) == 1 for of_rank in cuts for part, _ in of_rank)
    for before, of_rank in zip(ranks, cuts, strict=True):
        live = [t for t in before if t.weight]
        assert {t for part, _ in of_rank for t in part if t.weight} == set(live)
        assert MicroBatches(of_rank, list).num_backwards == sum(num_parts for _, _, num_parts in kinds[0])


def batch(first, count, expert):
    numbers = torch.arange(first, first + count, dtype=torch.float32)
    inputs = LossTermBatch(
        latents=numbers.view(-1, 1, 1, 1),
        sigma=numbers,
        weight=numbers,
        prompts=[f"p{i}" for i in range(first, first + count)],
    )
    return MicroBatch(inputs, expert)


def test_neighbouring_micro_batches_of_an_expert_share_forwards_without_gradient():
    micros = [batch(0, 3, 0), batch(3, 3, 0), batch(6, 2, 0), batch(8, 3, 1), batch(11, 9, 1)]
    groups = list(group_micro_batches(micros, 6))
    assert [[len(m.batch.sigma) for m in group] for group in groups] == [[3, 3], [2], [3], [9]]
    whole = MicroBatch.concat(groups[0])
    assert whole.batch.sigma.tolist() == whole.batch.latents.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert whole.batch.prompts == ["p0", "p1", "p2", "p3", "p4", "p5"]
    assert [m for group in group_micro_batches(micros, 1) for m in group] == micros


def numbered(assembled):
    """Return an `assemble` that builds batches of 4 + 4 + 4 bytes per term and records the terms."""

    def assemble(terms):
        assembled.append([term.row for term in terms])
        return batch(terms[0].row, len(terms), 0).batch

    return assemble


def test_batches_that_fit_into_the_cache_are_assembled_once_for_all_passes():
    [terms] = ranks_of([[(LOW, 1.0)] * 7])
    assembled = []
    micros = MicroBatches(
        split_into_micro_batches(terms, 2, one_expert), numbered(assembled), cache_bytes=2 * 2 * 12 + 12
    )
    for _ in range(2):
        assert [m.batch.sigma.tolist() for m in micros.iterate(release=False)] == [[0, 1], [2, 3], [4, 5], [6]]
    # The cache holds two batches of two terms and the smaller last one.
    assert assembled == [[0, 1], [2, 3], [4, 5], [6], [4, 5]]
    assembled.clear()
    assert [m.batch.sigma.tolist() for m in micros.iterate(release=True)] == [[0, 1], [2, 3], [4, 5], [6]]
    assert assembled == [[4, 5]]
    assert len(list(micros.iterate(release=True))) == 4, "the last pass empties the cache"
    assert assembled == [[4, 5], [0, 1], [2, 3], [4, 5], [6]]


def test_bytes_of_a_batch_are_those_of_all_its_tensors():
    of_one = batch(0, 3, 0).batch
    assert num_bytes(of_one) == 3 * 12
    frames = ConditioningFrames(torch.zeros(3, 1, 2, 1, 1), torch.zeros(3, dtype=torch.int64))
    assert num_bytes(dataclasses.replace(of_one, conditioning_frames=frames)) == 3 * (12 + 8 + 8)
