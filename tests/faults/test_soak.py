"""Samples pass through the broker and the reward service while processes are killed: a small run of benchmarks.soak."""

import subprocess
import sys

import pytest

from benchmarks.soak.processes import find_growth

SAMPLES = 800


def test_every_sample_is_scored_once_and_correctly_despite_kills(root):
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
def test_growing_resources_are_named():
    def life(mib, descriptors):
        return [(7, 50.0, 30)] * 20 + [(7, mib, descriptors)] * 10 + [(8, 99.0, 99)] * 5

    assert find_growth("broker", life(54.0, 38)) == []
    assert find_growth("broker", life(54.5, 39)) == [
        "broker grew by 4.5 MiB; the limit is 4",
        "broker has 9 more descriptors; the limit is 8",
    ]
