"""The Triton code that torch.compile generates for an SD3.5 block, without a GPU."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.long
def test_sums_of_compiled_blocks_have_the_same_order_with_and_without_gradient(root, tmp_path):
    """Otherwise policies with equal weights have different log-probabilities. torch's default options are the
    counterexample: a benchmark at run time chooses the order of the sums over the channels of a head."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rehearsal.compiled_code"],
        env=environment | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{root}:{root / 'kernels'}"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    (plain, training), (same_plain, same_training) = (
        [found[f"{same_sums=}, {with_gradient=}"] for with_gradient in (False, True)] for same_sums in (False, True)
    )
    assert same_plain == same_training
    assert all(num_configs == 1 for _, _, num_configs, _, _ in same_plain)
    assert all(layouts for *_, layouts in same_plain)
    assert plain != training
    assert {num_configs for _, _, num_configs, _, _ in plain} == {1, 3}
