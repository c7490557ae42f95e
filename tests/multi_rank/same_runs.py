"""Compare runs that split the same work differently across ranks."""

import json

import pytest
from safetensors.torch import load_file

RELATIVE = 1e-4
# Rewards score images rounded to 8 bits. With another batch split a value of a pixel may round the other way. This
# changes a reward by 1 / (255 * 3 * 32 * 32), and an advantage by that change divided by the group's reward std.
PICTURES_RELATIVE, PICTURES_ABSOLUTE = 5e-3, 5e-4
ROUNDED_REWARD = 4 / (255 * 3 * 32 * 32)
# AdamW divides by the gradient's size, so this changes weights by a fraction of the learning rate, 3e-2, that depends
# on the CPU.
PICTURES_WEIGHTS = 5e-3


def records(folder):
    """Return the lines of metrics.jsonl without times, speeds, counts of rank 0's own micro-batches, and metrics that
    only runs with rollout workers have."""
    own = ("time", "perf/", "rollout/staleness", "rollout/dropped_stale", "rollout/workers")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(own) and "seconds" not in k} for line in lines]


def exported(folder):
    """Return all denoiser tensors of the last export, by file and name."""
    last = max((folder / "safetensors").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    files = [f for f in last.rglob("*.safetensors") if f.parent.name.startswith(("lora", "transformer"))]
    return {f"{f.relative_to(last)} {name}": tensor for f in files for name, tensor in load_file(f).items()}


def assert_equal_exports(got, want):
    ours, theirs = exported(got), exported(want)
    assert ours.keys() >= theirs.keys() != set()  # a stopped run also exported at its stop
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())


def assert_bitwise_equal(got, want):
    """Assert that metrics and exported weights of two runs are equal, for example of runs with and without workers."""
    assert records(got) == records(want)
    assert_equal_exports(got, want)


def assert_same_runs(one, two):
    """Assert that metrics and exported weights of two runs are equal up to rounding. Rewards must score images."""
    lines = records(one)
    pictures = any(tag.startswith("reward/") for line in lines for tag in line)
    relative, absolute = (PICTURES_RELATIVE, PICTURES_ABSOLUTE) if pictures else (RELATIVE, 1e-5)
    rounded_advantage = 0.0
    for expected, got in zip(lines, records(two), strict=True):
        assert got.keys() == expected.keys()
        if std := expected.get("reward/total/group_std_mean"):  # only in the first update after a rollout
            rounded_advantage = ROUNDED_REWARD / std
        for tag, value in expected.items():
            extra = rounded_advantage if tag.startswith(("adv/", "loss/")) else 0.0
            allowed = pytest.approx(value, rel=relative, abs=absolute + extra)
            assert got[tag] == allowed, f"{tag} of {expected}: {got[tag]} is not {allowed}"
    expected, got = exported(one), exported(two)
    assert got.keys() >= expected.keys()  # a stopped run also exported at its stop
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() <= (PICTURES_WEIGHTS if pictures else 1e-5), name
