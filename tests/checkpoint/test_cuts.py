import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from wfm_ds.checkpoint.sharded_states import ShardedStates, flat_name, layout_to_json, rank_file_name
from wfm_ds.engine.policies import ShardSlice
from wfm_ds.errors import UserError

NUMBER = torch.tensor(7.0)


def whole(sizes):
    """Distinct values of every parameter's weight and moment."""
    flat = torch.arange(sum(sizes), dtype=torch.float32)
    parts = dict(zip((f"p{i}" for i in range(len(sizes))), flat.split(sizes), strict=True))
    return {"train": parts, "optimizer.exp_avg": {name: -part for name, part in parts.items()}}


def by_partition(sizes, num_ranks, padding):
    """As ZeRO-1 and 2 cut: one row of all parameters, broken into equal shares wherever that falls."""
    share = -(-sum(sizes) // num_ranks) + padding
    layouts = []
    for rank in range(num_ranks):
        layout, offset = {}, 0
        for i, size in enumerate(sizes):
            first, last = max(offset, rank * share), min(offset + size, (rank + 1) * share)
            first_here = max(0, first - rank * share)
            layout[f"p{i}"] = ShardSlice(0, first_here, max(0, first - offset), max(0, last - first))
            offset += size
        layouts.append((layout, [share]))
    return layouts


def by_parameter(sizes, num_ranks, padding):
    """As ZeRO-3 cuts: every parameter into equal shares, here in two groups."""
    layouts = []
    for rank in range(num_ranks):
        layout, ends = {}, [0, 0]
        for i, size in enumerate(sizes):
            share = -(-size // num_ranks) + padding
            start = rank * share
            layout[f"p{i}"] = ShardSlice(i % 2, ends[i % 2], start, max(0, min(share, size - start)))
            ends[i % 2] += share
        layouts.append((layout, ends))
    return layouts


def cut(states, layout, lengths):
    flats = {state: [torch.full((length,), float("nan")) for length in lengths] for state in states}
    for state, parts in states.items():
        for name, piece in layout.items():
            flat = flats[state][piece.group]
            flat[piece.flat_start : piece.flat_start + piece.numel] = parts[name][
                piece.parameter_start : piece.parameter_start + piece.numel
            ]
    return flats


def write(folder, states, layouts):
    for rank, (layout, lengths) in enumerate(layouts):
        flats = cut(states, layout, lengths)
        tensors = {flat_name(state, g): flat for state, groups in flats.items() for g, flat in enumerate(groups)}
        tensors |= {flat_name("optimizer.step", g): NUMBER.clone() for g in range(len(lengths))}
        metadata = {"layout": json.dumps(layout_to_json(layout))}
        save_file(tensors, folder / rank_file_name(rank), metadata=metadata)


CUTS = st.tuples(st.sampled_from([by_partition, by_parameter]), st.integers(1, 4), st.integers(0, 2))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), there=CUTS, here=CUTS)
def test_every_cut_can_be_made_of_every_other(tmp_path_factory, sizes, there, here):
    folder, states = tmp_path_factory.mktemp("cut"), whole(sizes)
    write(folder, states, there[0](sizes, *there[1:]))
    for rank, (layout, lengths) in enumerate(here[0](sizes, *here[1:])):
        with ShardedStates(folder, there[1]) as cuts:
            got = cuts.gather_states(layout, lengths, min(rank, there[1] - 1))
        assert all(number.equal(NUMBER) for number in got.pop("optimizer.step"))
        assert got.keys() == states.keys()
        for state, groups in cut(states, layout, lengths).items():
            for flat, expected in zip(got[state], groups, strict=True):
                assert flat.equal(expected.nan_to_num(0.0))


def test_states_of_other_parameters_and_sizes_are_refused(tmp_path):
    write(tmp_path, whole([4, 6]), by_parameter([4, 6], 2, 0))
    with ShardedStates(tmp_path, 2) as cuts:
        assert cuts.parameter_sizes() == {"p0": 4, "p1": 6}
        with pytest.raises(UserError, match="other trained weights"):
            cuts.gather_states({"p0": ShardSlice(0, 0, 0, 4)}, [4], 0)
        with pytest.raises(UserError, match="6 of 8 values of p1"):
            cuts.gather_states({"p0": ShardSlice(0, 0, 0, 4), "p1": ShardSlice(0, 4, 0, 8)}, [12], 0)


def test_a_whole_parameter_is_read_and_no_file_stays_mapped(tmp_path):
    """What was read of a mapped file would count as this process's memory."""
    states = whole([4, 6])
    write(tmp_path, states, by_partition([4, 6], 2, 0))
    with ShardedStates(tmp_path, 2) as cuts:
        for name, value in states["train"].items():
            assert cuts.read_parameter("train", name, value.shape).equal(value)
            assert str(tmp_path) not in Path("/proc/self/maps").read_text()
