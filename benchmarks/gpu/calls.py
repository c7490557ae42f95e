"""The plan of a day of measurements on a GPU: calls of at most ten minutes, and the lines of each call.

A line is a command in a separate process with its own time limit. The rehearsal (`tiny`) runs the same lines with tiny
pipelines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.variants import COMPARED, LEVERS

CALL_S = 540.0  # all lines of a call together
LORA = ("sd3_image_sft_lora", "sd3_nft", "sd3_flow_grpo")
# Fewer samples than in the recipes (48 x 24), so that a step takes minutes on one GPU. A rollout has two batches or
# one.
TWO_CHUNKS = ("rollout.prompts_per_step=4", "rollout.group_size=9")
ONE_CHUNK = ("rollout.prompts_per_step=2", "rollout.group_size=9")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLine:
    """One command. rows: whether it writes table rows. If False, the last line of its output is the result."""

    name: str
    command: Sequence[str]
    limit_s: float
    rows: bool = True
    makes: Path | None = None  # output that later lines need; the line is skipped if it exists on this machine


@dataclass(frozen=True, slots=True)
class Call:
    """Lines that run in one call."""

    title: str
    lines: Sequence[CallLine]


def gpu_line(name: str, *words: str | Path, limit_s: float, line: str = "", makes: Path | None = None) -> CallLine:
    command = [sys.executable, "-m", "benchmarks.gpu", name, *map(str, words)]
    return CallLine(name=line or name, command=command, limit_s=limit_s, makes=makes)


def python_line(line: str, *words: str, limit_s: float) -> CallLine:
    return CallLine(name=line, command=[sys.executable, "-m", *words], limit_s=limit_s, rows=False)


def plan_calls(models: Path, *, tiny: bool) -> list[Call]:
    """Return all calls of a day. models: folder for pipelines."""
    return [
        environment_call(tiny=tiny),
        steps_call(models, tiny=tiny),
        reference_call(models, LORA[:2], tiny=tiny),
        reference_call(models, LORA[2:], tiny=tiny),
        *(variants_call(models, name, tiny=tiny) for name in COMPARED),
        robustness_call(tiny=tiny),
        videos_call(models, tiny=tiny),
        float8_and_overlap_call(models, tiny=tiny),
    ]


def environment_call(*, tiny: bool) -> Call:
    tests = ["tests/kernels/test_coefficients.py"] if tiny else ["tests/kernels"]
    table = ["--help"] if tiny else ["--shapes", "sd35_512_b9", "--no-write"]  # counting on a CPU takes minutes
    return Call(
        "environment and kernels",
        [
            gpu_line("machine", *(["--size", "64"] if tiny else []), limit_s=90),
            python_line("kernel tests", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, limit_s=180),
            python_line("kernel table", "benchmarks.kernels", *table, limit_s=270),
        ],
    )


def pipeline_line(models: Path, name: str, *, tiny: bool) -> CallLine:
    folder = models / (f"{name}-tiny" if tiny else name)
    options = ["--tiny"] if tiny else []
    return gpu_line("pipeline", name, folder, *options, limit_s=120, line=f"pipeline {name}", makes=folder)


def recipe_path(name: str, *, tiny: bool) -> str:
    known = {"sd3_image_sft_lora": "sd3_sft_lora"}
    return f"tests/recipes/{known.get(name, name)}.yaml" if tiny else f"recipes/{name}.yaml"


def pipeline_overrides(models: Path, name: str, samples: Sequence[str] = (), *, tiny: bool) -> list[str]:
    """Return overrides to use this pipeline in a recipe. samples: overrides for the number of samples in a step."""
    changes = [f"model.path={models / (f'{name}-tiny' if tiny else name)}"]
    if tiny:
        changes += ["model.max_sequence_length=16"]
    return [*changes, *(() if tiny else samples)]


def sample_overrides(name: str, chunks: Sequence[str]) -> Sequence[str]:
    return () if "sft" in name else chunks


def step_arguments(steps: int = 3, *, tiny: bool) -> list[str]:
    """Return arguments for the number of steps. A rehearsal on a CPU also needs a peak rate."""
    return ["--steps", "1", "--peak-tflops", "0.1"] if tiny else ["--steps", str(steps)]


def steps_call(models: Path, *, tiny: bool) -> Call:
    """Shipped recipes: phases, rates, memory, launches, waits."""
    lines = [pipeline_line(models, "sd35m", tiny=tiny)]
    for name in LORA:
        changes = pipeline_overrides(models, "sd35m", sample_overrides(name, TWO_CHUNKS), tiny=tiny)
        words = [recipe_path(name, tiny=tiny), *step_arguments(tiny=tiny), "--set", *changes]
        lines.append(gpu_line("steps", *words, limit_s=150, line=f"steps {name}"))
    return Call("steps of SD3.5 medium", lines)


def reference_call(models: Path, names: Sequence[str], *, tiny: bool) -> Call:
    """Compare with the published loops, as shipped and with all optimizations."""
    counts = ["--rounds", "1"] if tiny else ["--rounds", "3"]
    lines = [pipeline_line(models, "sd35m", tiny=tiny)]
    for name in names:
        changes = pipeline_overrides(models, "sd35m", sample_overrides(name, ONE_CHUNK), tiny=tiny)
        # A rehearsal tests compilation in `variants_call`, and does not compile here, to save time.
        compared = "as shipped" if tiny else f"as shipped,{LEVERS[name]}"
        words = [recipe_path(name, tiny=tiny), "--variants", compared, *counts, "--set", *changes]
        lines.append(gpu_line("against", *words, limit_s=240 if len(names) > 1 else 400, line=f"against {name}"))
    return Call(f"compared with the published loops: {', '.join(names)}", lines)


def variants_call(models: Path, name: str, *, tiny: bool) -> Call:
    """One optimization at a time. Each row is written at once, so the time limit loses only unfinished variants."""
    lines = [pipeline_line(models, "sd35m", tiny=tiny)]
    changes = pipeline_overrides(models, "sd35m", ONE_CHUNK, tiny=tiny)
    for number, names in enumerate(COMPARED[name], 1):
        words = [
            recipe_path(name, tiny=tiny),
            "--variants",
            ",".join(names),
            *step_arguments(2, tiny=tiny),
            "--set",
            *changes,
        ]
        lines.append(gpu_line("steps", *words, limit_s=300, line=f"variants {name}, {number}"))
    return Call(f"one optimization at a time: {name}", lines)


def robustness_call(*, tiny: bool) -> Call:
    quickstart = ["--help"] if tiny else ["--output", "/tmp/wfm_quickstart"]  # minutes on a CPU
    # tests/benchmarks/test_gpu_day.py rehearses all of them.
    tests = "tests/gpu/test_kernels.py" if tiny else "tests/gpu"
    return Call(
        "robustness",
        [
            python_line("pytest -m gpu", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", tests, limit_s=300),
            gpu_line("stopped", "tests/recipes/sd3_nft.yaml", limit_s=120),
            python_line("quickstart", "wfm_ds", "quickstart", *quickstart, limit_s=240),
        ],
    )


def videos_call(models: Path, *, tiny: bool) -> Call:
    options = ["--tiny"] if tiny else []
    lines = [
        gpu_line("videos", name, *options, limit_s=limit, line=f"videos {name}")
        for name, limit in (("wan1.3b", 120), ("cosmos2b", 200))
    ]
    cut = options or ["--layers", "10"]
    lines.append(gpu_line("videos", "wan14b", *cut, limit_s=150, line="videos wan14b, 10 layers"))
    changes = pipeline_overrides(models, "wan1.3b", ["rollout.prompts_per_step=1", "rollout.group_size=2"], tiny=tiny)
    words = [
        "tests/recipes/wan_nft.yaml" if tiny else "recipes/wan_nft.yaml",
        *step_arguments(tiny=tiny),
        "--set",
        *changes,
    ]
    lines += [pipeline_line(models, "wan1.3b", tiny=tiny), gpu_line("steps", *words, limit_s=200, line="steps wan_nft")]
    return Call("videos and memory", lines)


def float8_and_overlap_call(models: Path, *, tiny: bool) -> Call:
    """Matrix products in float8, and the gain from a rollout worker that shares the trainer's GPU."""
    device = "cpu" if tiny else "cuda:0"
    lines = [
        gpu_line("matmuls", *(["--scale", "64"] if tiny else []), limit_s=180),
        pipeline_line(models, "sd35m", tiny=tiny),
    ]
    for mode in ("async", "colocated"):
        changes = [*pipeline_overrides(models, "sd35m", ONE_CHUNK, tiny=tiny), f"rollout.mode={mode}"]
        changes += ["rollout.spawn=1", f"rollout.devices=[{device}]"] if mode == "async" else []
        words = [recipe_path("sd3_nft", tiny=tiny), *step_arguments(tiny=tiny), "--set", *changes]
        lines.append(gpu_line("steps", *words, limit_s=150, line=f"steps sd3_nft, {mode}"))
    return Call("float8 products, and overlap on one device", lines)
