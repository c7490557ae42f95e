"""Kill all ranks of whole runs at random times: a small run of benchmarks.kills."""

import subprocess
import sys

import pytest

KILLS = 2  # per case, of nine cases; docs/reliability.md reports a larger run
EARLY = 6  # kills within the first two steps


@pytest.mark.long
def test_a_run_whose_ranks_are_killed_at_any_instant_ends_as_if_it_had_been_left_alone(root):
    words = ["--kills", str(KILLS), "--early", str(EARLY), "--seed", "8", "--no-write"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.kills", *words], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-10_000:]
    cases = [row.strip("| ").split(" | ") for row in done.stdout.splitlines()[2:]]
    assert len(cases) == 11
    assert cases[-1][:3] == ["all", "", str(9 * KILLS + EARLY)]
