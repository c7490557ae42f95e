"""Compilation of all kernels for sm_90 without a GPU, in a subprocess because this process interprets them."""

import os
import subprocess
import sys

import pytest

from wfm_kernels import compile_check
from wfm_kernels.compile_check import CompileReport, compare_sum_layouts


def test_all_kernels_compile_for_sm_90_without_spills_and_with_wide_accesses(root):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(root / "kernels")
    done = subprocess.run(
        [sys.executable, "-m", "wfm_kernels.compile_check"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 1 + len(compile_check.kernel_variants())


def report(variant, **changes):
    reads, writes = variant.wide_accesses(variant.reads), variant.wide_accesses(variant.writes)
    fine = {"registers": 40, "wide_reads": 2 * reads, "wide_writes": 2 * writes, "layout": "#blocked"}
    return CompileReport(variant=variant, **fine | {"fma": compile_check.NUM_NOISE_FMA * variant.draws_noise} | changes)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"spill_bytes": 8}, "8 bytes of spills"),
        ({"registers": 81}, "81 registers"),
        ({"stack_bytes": 16}, "a stack of 16 bytes"),
        ({"wide_reads": 9}, "9 loads of 16 bytes"),
        ({"wide_reads": 0}, "0 loads of 16 bytes"),
        ({"wide_writes": 1}, "1 stores of 16 bytes"),
        ({"fma": 3}, "3 fused multiply-adds"),
    ],
)
def test_the_gate_fails_on_each_problem(changes, fault):
    variant = next(v for v in compile_check.kernel_variants() if v.label.startswith("noise v bf16 x fp32"))
    judged = report(variant, **changes)
    compile_check._check_report(judged)
    assert (judged.faults == []) if fault is None else any(fault in f for f in judged.faults)


def test_the_gate_fails_if_rollout_and_training_sum_in_different_orders():
    pair = [v for v in compile_check.kernel_variants() if v.kernel == "sde_kernel"][:2]
    reports = [report(pair[0]), report(pair[1], layout="#other")]
    compare_sum_layouts(reports)
    assert [len(r.faults) for r in reports] == [0, 1]
