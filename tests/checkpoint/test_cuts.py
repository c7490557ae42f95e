import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from wfm_ds.checkpoint.sharded_states import ShardedStates, flat_name, layout_to_json, rank_file_name
from wfm_ds.engine.shards import ShardSlice
from wfm_ds.errors import UserError

NUMBER = torch.tensor(7.0)


def whole(sizes):
    """Return distinct values for the weight and the moment of every parameter."""
    flat = torch.arange(sum(sizes), dtype=torch.float32)
    parts = dict(zip((f"p{i}" for i in range(len(sizes))), flat.split(sizes), strict=True))
    return {"train": parts, "optimizer.exp_avg": {name: -part for name, part in parts.items()}}


def by_partition(sizes, num_ranks, padding):
    """ZeRO-1 and ZeRO-2 layout: all parameters are concatenated and split into equal shards."""
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
    """ZeRO-3 layout: each parameter is split into equal shards, here in two groups."""
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


def write(folder, states, layouts, step_of_rank=lambda rank: 3, **changes):
    for rank, (layout, lengths) in enumerate(layouts):
        flats = cut(states, layout, lengths)
        tensors = {flat_name(state, g): flat for state, groups in flats.items() for g, flat in enumerate(groups)}
        tensors |= {flat_name("optimizer.step", g): NUMBER.clone() for g in range(len(lengths))}
        step = step_of_rank(rank)
        values = {"layout": layout_to_json(layout), "engine": {"updates": step}, "loop": {"step": step}} | changes
        metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        save_file(tensors, folder / rank_file_name(rank), metadata=metadata)


CUTS = st.tuples(st.sampled_from([by_partition, by_parameter]), st.integers(1, 4), st.integers(0, 2))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), there=CUTS, here=CUTS)
def test_every_layout_can_be_read_from_every_other(tmp_path_factory, sizes, there, here):
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


def test_states_of_an_extra_adapter_are_read_separately(tmp_path):
    """The extra adapter has other parameters, another layout, another step count and a state that `default` lacks."""
    own, extra = whole([4, 6]), {"train": {"f0": torch.arange(10.0, 17.0)}}
    for rank, (layout, lengths) in enumerate(by_partition([4, 6], 2, 0)):
        fake_layout = {"f0": ShardSlice(0, 0, 4 * rank, 4 - rank)}
        tensors = {flat_name(state, g): f for state, fs in cut(own, layout, lengths).items() for g, f in enumerate(fs)}
        fake = cut(extra, fake_layout, [4])["train"][0]
        tensors |= {"optimizer.step.0": NUMBER, "adapter.fake.train.0": fake}
        tensors |= {"adapter.fake.optimizer.step.0": NUMBER + rank, "adapter.fake.optimizer.exp_avg.0": -fake}
        values = {"layout": layout_to_json(layout), "adapter_layouts": {"fake": layout_to_json(fake_layout)}}
        metadata = {name: json.dumps(value) for name, value in (values | {"engine": {}, "loop": {}}).items()}
        save_file(tensors, tmp_path / rank_file_name(rank), metadata=metadata)
    with ShardedStates(tmp_path, 2) as cuts:
        assert cuts.state_names() == ["optimizer.exp_avg", "optimizer.step", "train"]
        assert cuts.state_names("fake") == ["optimizer.exp_avg", "optimizer.step", "train"]
        got = cuts.gather_states({"f0": ShardSlice(0, 1, 0, 7)}, [9], 0, "fake")
        assert got["train"][0].tolist() == [0, *range(10, 17), 0]
        assert got["optimizer.exp_avg"][0].equal(-got["train"][0])
        assert got["optimizer.step"][0] == NUMBER
        with pytest.raises(UserError, match="other trained weights"):
            cuts.gather_states({"p0": ShardSlice(0, 0, 0, 4)}, [4], 0, "fake")
        assert cuts.gather_states({"p0": ShardSlice(0, 0, 0, 4), "p1": ShardSlice(0, 4, 0, 6)}, [10], 0)["train"][
            0
        ].equal(torch.arange(10.0))


def test_states_of_other_parameters_and_sizes_are_refused(tmp_path):
    write(tmp_path, whole([4, 6]), by_parameter([4, 6], 2, 0))
    with ShardedStates(tmp_path, 2) as cuts:
        with pytest.raises(UserError, match="other trained weights"):
            cuts.gather_states({"p0": ShardSlice(0, 0, 0, 4)}, [4], 0)
        with pytest.raises(UserError, match="6 of 8 values of p1"):
            cuts.gather_states({"p0": ShardSlice(0, 0, 0, 4), "p1": ShardSlice(0, 4, 0, 8)}, [12], 0)


def test_a_whole_parameter_is_read_and_no_file_stays_mapped(tmp_path):
    """Pages of a mapped file would count as memory of this process."""
    states = whole([4, 6])
    write(tmp_path, states, by_partition([4, 6], 2, 0))
    with ShardedStates(tmp_path, 2) as cuts:
        for name, value in states["train"].items():
            assert cuts.read_parameter("train", name, value.shape).equal(value)
            assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_files_of_different_steps_are_refused(tmp_path):
    states = whole([4, 6])
    write(tmp_path, states, by_partition([4, 6], 2, 0), step_of_rank=lambda rank: 3 + rank)
    with (
        ShardedStates(tmp_path, 2) as cuts,
        pytest.raises(UserError, match=r"rank00001.* from step 4, .*rank00000.* 3:"),
    ):
        cuts.read_parameter("train", "p1", [6])
    layout, lengths = by_partition([4, 6], 2, 0)[1]  # a resumed rank reads only its own file
    with ShardedStates(tmp_path, 2) as cuts, pytest.raises(UserError, match="from step 4"):
        cuts.gather_states(layout, lengths, 1)


DAMAGED_METADATA = {
    "layout": [[], 3, {"p0": 3}, {"p0": [0, 0, 0]}, {"p0": [0, 0, 0, -1]}, {"p0": [0, 0, 0, 10**30]}, {"p0": "0123"}],
    "engine": [[], {"updates": "3"}, "{", "[" * 100_000],
    "loop": [None, 3, []],
    "export": [3, [], {"base": 3}, {"parts": "transformer"}, {"call": []}, {"dtype": "load"}, {"lora": [1]}],
}


def test_metadata_of_another_type_is_one_short_line(tmp_path):
    for name, values in DAMAGED_METADATA.items():
        for value in values:
            write(tmp_path, whole([4]), by_partition([4], 1, 0), **{name: value})
            with (
                ShardedStates(tmp_path, 1) as cuts,
                pytest.raises(UserError, match=r"rank00000.* cannot be read") as error,
            ):
                cuts.read_parameter("train", "p0", [4])
            assert "\n" not in str(error.value)
            assert len(str(error.value)) < 1000
