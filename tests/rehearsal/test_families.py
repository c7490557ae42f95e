"""Families on pretended GPUs, through all that a run does: no tensor on a wrong device, and no wait where work is only
to be queued. `python -m benchmarks.rehearsal --families` has the others."""

import pytest

from benchmarks.rehearsal.__main__ import elsewhere

DONE = {"training", "evaluation", "ode", "flow_sde", "edm_2ab", "encoding of media", "export", "checkpoint"}
# Family, ranks, run of families.RUNS, and the waits in the step's micro-steps: DeepSpeed's own, one for each backward.
CASES = [
    pytest.param("sd3", 2, 7, 12, id="DDRL of adapters beside shards of frozen weights"),
    pytest.param("cosmos25", 2, 0, 0, id="SFT whose captions are encoded as they come", marks=pytest.mark.long),
    pytest.param("wan21", 2, 8, 0, id="NFT of a video with shared tokens"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ranks", "run", "waits"), CASES)
def test_a_family_goes_through_all_of_a_run(family, ranks, run, waits):
    (row,) = elsewhere("family", family, str(ranks), str(run))["rows"]
    assert set(row["rehearsed"].split(", ")) >= DONE
    assert row["waits between micro-steps"] == waits
    assert row["waits in the denoise loop"] == 0
    assert row["blocking copies in the denoise loop"] == row["blocking copies between micro-steps"] == 0
