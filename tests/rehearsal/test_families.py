"""Every operation of a run on simulated GPUs: no tensor is on a wrong device, and no queued work waits for a GPU.

`python -m benchmarks.rehearsal [FAMILY ...]` runs the other families.
"""

import pytest

from benchmarks.rehearsal.__main__ import rehearse_in_subprocess

SOLVERS = {"ode", "flow_sde", "edm_2ab"}
DONE = SOLVERS | {"training", "evaluation", "encoding of media", "export", "publication", "checkpoint"}
# Family, ranks, run of families.RUNS, and the waits in the step's micro-steps: DeepSpeed's own, one for each backward.
CASES = [
    pytest.param("sd3", 2, 7, 12, id="DDRL of a LoRA with sharded frozen weights"),
    pytest.param("cosmos25", 2, 0, 0, id="SFT that encodes captions during training"),
    pytest.param("wan21", 2, 8, 0, id="NFT of a video with sequence parallelism"),
]


@pytest.mark.long  # every night
@pytest.mark.parametrize(("family", "ranks", "run", "waits"), CASES)
def test_a_family_completes_all_operations_of_a_run(family, ranks, run, waits):
    (row,) = rehearse_in_subprocess(family, ranks, [run])
    assert set(row["rehearsed"].split(", ")) >= DONE
    assert row["waits between micro-steps"] == waits
    assert row["waits in the denoise loop"] == 0
    assert row["blocking copies in the denoise loop"] == row["blocking copies between micro-steps"] == 0
