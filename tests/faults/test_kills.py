"""Kill all ranks of whole runs at random times: a small run of benchmarks.kills."""

import subprocess
import sys

import pytest

KILLS = 2  # kills per case; there are nine cases, and docs/reliability.md reports a larger study
EARLY = 6  # kills within the first two steps


@pytest.mark.long
def test_killing_ranks_at_any_time_does_not_change_the_result(root):
    words = ["--kills", str(KILLS), "--early", str(EARLY), "--seed", "8", "--no-write"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.kills", *words], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-10_000:]
    cases = [row.strip("| ").split(" | ") for row in done.stdout.splitlines()[2:]]
    assert len(cases) == 11
    assert cases[-1][:3] == ["all", "", str(9 * KILLS + EARLY)]
