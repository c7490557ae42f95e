"""Compare the fused kernels with the plain formulas: `python -m benchmarks.kernels`.

On a CPU: count launches, bytes and host synchronizations. On a GPU: check correctness first, then measure microseconds,
interleaved. If an operator is wrong, the exit code is 1, and nothing is timed or written.
"""

from __future__ import annotations

import os
import sys

if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import report, timing
from benchmarks.cases import CASES, PLAIN, SHAPES, Backend, OperatorCase, OperatorInputs, make_inputs, relative_errors
from wfm_kernels import sde_log_prob, sde_step

COUNTED_SHAPE = "sd35_512_b9"
BACKENDS: tuple[Backend, ...] = ("triton", "torch")
CPU = torch.device("cpu")
Row = dict[str, Any]


def check_operators(shape: tuple[int, ...], device: torch.device) -> list[Row]:
    """Check every operator with both backends against float64, and results that rollout and training must compute
    bit-identically."""
    i, rows = make_inputs(shape, device, seed=0), []
    for case in CASES:
        for backend in BACKENDS:
            rows.append(_check_row(case, backend, i, case.ours(i, backend), case.tolerances))
        if not case.draws:
            rows.append(_check_row(case, "plain formulas", i, case.plain(i), (PLAIN,) * len(case.tolerances)))
    step = sde_step(i.velocity, i.x, i.rows, seeds=i.seeds, backend="triton")
    again = sde_log_prob(i.velocity, i.x, step.next_latents, i.rows, backend="triton")
    one = sde_step(i.velocity[-1:], i.x[-1:], i.rows[-1:], seeds=i.seeds[-1:], backend="triton")
    alone = torch.equal(one.next_latents[0], step.next_latents[-1]) and torch.equal(one.log_prob[0], step.log_prob[-1])
    rows.append(
        {"operator": "log_prob of rollout == of training, bit for bit", "correct": torch.equal(again, step.log_prob)}
    )
    rows.append({"operator": "a sample alone == in its batch, bit for bit", "correct": alone})
    return rows


def _check_row(
    case: OperatorCase, variant: str, i: OperatorInputs, outputs: list[Tensor], tolerances: tuple[float, ...]
) -> Row:
    errors = relative_errors(case, i, outputs)
    fine = all(error <= tolerance for error, tolerance in zip(errors, tolerances, strict=True))  # False for NaN
    shown = ", ".join(f"{error:.1e}" for error in errors)
    return {"operator": case.name, "variant": variant, "relative errors": shown, "correct": fine}


def count_rows(shape_name: str) -> list[Row]:
    """Return one row for each operator and variant (kernels, plain formulas), counted on a CPU."""
    from benchmarks.counting import count_launches

    shape, rows = SHAPES[shape_name], []
    i = make_inputs(shape, CPU, seed=0)
    for case in CASES:
        kernels, formulas = partial(case.ours, i, "triton"), partial(case.plain, i)
        for label, run in (("kernels", kernels), ("plain formulas", formulas)):
            counted = count_launches(run, i.x.numel())
            rows.append(
                {
                    "operator": case.name,
                    "variant": label,
                    "shape": shape_name,
                    "launches": counted.launches,
                    "of these on small tensors": counted.small_launches,
                    "host syncs": counted.syncs,
                    "bytes per element": round(counted.num_bytes / i.x.numel(), 1),
                }
            )
    return rows


def time_operators(shape_name: str, ceiling: float) -> list[Row]:
    """Return the rows of every operator at one shape on this GPU."""
    device, shape = torch.device("cuda"), SHAPES[shape_name]
    one = make_inputs(shape, device, seed=0)
    # With bfloat16 velocities and float32 latents, every operator accesses at least 10 bytes for each element.
    sets = [one, *[make_inputs(shape, device, seed=k) for k in range(1, timing.num_sets(10 * one.x.numel()))]]
    return [row for case in CASES for row in _time_operator(case, shape_name, sets, ceiling)]


def _time_operator(case: OperatorCase, shape_name: str, sets: list[OperatorInputs], ceiling: float) -> list[Row]:
    compiled = torch.compile(case.maths, fullgraph=False)
    runs: dict[str, Callable[[int], list[Tensor]]] = {
        "kernels": lambda k: case.ours(sets[k], "triton"),
        "torch backend": lambda k: case.ours(sets[k], "torch"),
        "formulas": lambda k: case.maths(sets[k]),
        "formulas, compiled": lambda k: compiled(sets[k]),
    }
    for run in runs.values():
        run(0)
    torch.cuda.set_sync_debug_mode("error")  # our operators never wait for the device
    runs["kernels"](0)
    torch.cuda.set_sync_debug_mode("default")
    calls = {name: timing.eager_loop(run, len(sets)) for name, run in runs.items()}
    calls["formulas, step looked up"] = timing.eager_loop(lambda k: case.plain(sets[k]), len(sets))
    graphs = {name: timing.capture_graph(run, len(sets)) for name, run in runs.items()}
    num_bytes = count_moved_bytes(case, sets[0])
    rows: list[Row] = []
    for mode, variants in (("graph replay", graphs), ("eager call", calls)):
        times = timing.time_interleaved(variants, len(sets))
        for name, time in times.items():
            row: Row = {"operator": case.name, "shape": shape_name, "mode": mode, "variant": name, "us": time}
            row["x kernels"] = time["median"] / times["kernels"]["median"]
            if name == "kernels":
                gbps = num_bytes / (time["median"] * 1000)
                row |= {"GB/s": gbps, "% of copy": 100 * gbps / ceiling}
            rows.append(row)
    return rows


def count_moved_bytes(case: OperatorCase, i: OperatorInputs) -> int:
    """Return the bytes that the kernels of one call read and write, counted at their launches."""
    from benchmarks.counting import count_launches

    return count_launches(lambda: case.ours(i, "triton"), i.x.numel()).num_bytes


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n")[0])
    made.add_argument("--shapes", default=",".join(SHAPES), help=f"for a GPU; from {', '.join(SHAPES)}")
    made.add_argument("--no-write", action="store_true", help="print only")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        sys.stderr.write("error: Triton is not installed; pip install triton\n")
        return 2
    on_gpu = torch.cuda.is_available()
    small = (3, 4, 7, 5)
    checks = check_operators(small, torch.device("cuda" if on_gpu else "cpu"))
    if on_gpu:
        checks += check_operators(SHAPES[COUNTED_SHAPE], torch.device("cuda"))
    sys.stdout.write(report.format_table(checks) + "\n\n")
    if not all(check["correct"] for check in checks):
        sys.stderr.write("error: an operator is wrong; nothing was measured\n")
        return 1
    about = report.describe_machine()
    if on_gpu:
        ceiling = timing.copy_gbps()
        about["copy GB/s"] = round(ceiling)
        rows = [row for name in options.shapes.split(",") for row in time_operators(name, ceiling)]
    else:
        rows = count_rows(COUNTED_SHAPE)
    sys.stdout.write(report.format_table(rows) + "\n")
    if not options.no_write:
        sys.stdout.write(f"\nwritten to {report.write_results('kernels', about, rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
