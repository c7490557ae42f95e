"""The benchmark of language steps runs, and its counts are correct for each trainer."""

import json
import re
import subprocess
import sys

from benchmarks.language_peers import CONVERSATIONS


def test_both_trainers_take_turns_on_the_same_conversations(root):
    """Run in a subprocess, which becomes a rank. The tiny model gives no meaningful speeds, but correct counts."""
    command = [sys.executable, "-m", "benchmarks.language", "--quick", "--rounds", "6"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    head, _, *lines = [[cell.strip() for cell in re.split(r"\|", line)[1:-1]] for line in done.stdout.splitlines()]
    rows = {row["steps"]: row for row in (dict(zip(head, line, strict=True)) for line in lines)}
    alone, together = rows["ours, one by one"], rows["ours, side by side"]
    theirs, padded = rows["Trainer, one by one"], rows["Trainer, padded"]
    assert json.loads(alone["forwards a step"]) == json.loads(theirs["forwards a step"]) == CONVERSATIONS
    assert json.loads(together["forwards a step"]) == json.loads(padded["forwards a step"]) == 1
    assert alone["tokens a step"] == theirs["tokens a step"] == together["tokens a step"] == padded["tokens a step"]
    assert float(together["padding"]) == float(theirs["padding"]) == 0 < float(padded["padding"])
    assert (
        float(alone["head MFLOP a token"]) < float(theirs["head MFLOP a token"]) < float(padded["head MFLOP a token"])
    )
    assert all(float(rows[f"ours, {name}"]["ratio"]) > 0 for name in ("one by one", "side by side", "packed"))
