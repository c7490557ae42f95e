"""Samples pass through the broker and the reward service while processes are killed: a small run of benchmarks.soak."""

import subprocess
import sys

import pytest

from benchmarks.soak.memory import find_growth

SAMPLES = 800


def test_every_sample_comes_once_and_is_right_whoever_is_killed(root):
    words = ["--samples", str(SAMPLES), "--kill-every", "2", "--seconds", "0.05", "--seed", "3"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.soak", *words], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-10_000:]
    cells = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    figures = {line[0]: line[1] for line in cells if len(line) == 2}
    assert figures["samples, each once and right"] == str(SAMPLES)
    assert int(figures["faults"]) >= 3
    assert any(name.endswith(" to a reward service") for name in figures)
    for role, at_first in (("reward service", 1), ("reward worker", 4), ("rollout worker", 3)):
        assert int(figures[f"{role}s started"]) >= at_first


@pytest.mark.unit
def test_what_grows_is_named():
    flat = {"process": "hub", "MiB, first third": 50.0, "MiB, last third": 54.0}
    flat |= {"descriptors, first third": 30, "descriptors, last third": 38}
    assert find_growth([flat]) == []
    leaky = [flat | {"MiB, last third": 54.5}, flat | {"process": "client", "descriptors, last third": 39}]
    assert find_growth(leaky) == [
        "hub grew by 4.5 MiB; the limit is 4",
        "client has 9 more descriptors; the limit is 8",
    ]
