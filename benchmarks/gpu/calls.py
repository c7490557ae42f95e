"""The calls of a day on a GPU, in order, and the lines of each: a call fits ten minutes.

A line is a command of its own process under its own limit. The rehearsal (`tiny`) has the same lines on tiny pipelines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.variants import COMPARED, LEVERS

CALL_S = 540.0  # of all lines of a call
LORA = ("sd3_image_sft_lora", "sd3_nft", "sd3_flow_grpo")
# Of the recipes' 48 x 24 samples a step, for one GPU and minutes: two forwards of a rollout, or one.
TWO_CHUNKS = ("rollout.prompts_per_step=4", "rollout.group_size=9")
ONE_CHUNK = ("rollout.prompts_per_step=2", "rollout.group_size=9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One command. `rows`: it writes those of a table; else the last line of its output stands for it."""

    name: str
    command: Sequence[str]
    limit_s: float
    rows: bool = True
    makes: Path | None = None  # what later lines of the call need: done where it exists, on this very machine


@dataclass(frozen=True, slots=True)
class Call:
    """Lines that are run in one go."""

    title: str
    lines: Sequence[Line]


def gpu(name: str, *words: str | Path, limit_s: float, line: str = "", makes: Path | None = None) -> Line:
    command = [sys.executable, "-m", "benchmarks.gpu", name, *map(str, words)]
    return Line(name=line or name, command=command, limit_s=limit_s, makes=makes)


def python(line: str, *words: str, limit_s: float) -> Line:
    return Line(name=line, command=[sys.executable, "-m", *words], limit_s=limit_s, rows=False)


def calls(models: Path, *, tiny: bool) -> list[Call]:
    """All calls of a day; `models`: a folder of this machine for pipelines."""
    return [
        environment(tiny=tiny),
        steps(models, tiny=tiny),
        reference(models, LORA[:2], tiny=tiny),
        reference(models, LORA[2:], tiny=tiny),
        *(variants(models, name, tiny=tiny) for name in COMPARED),
        robustness(tiny=tiny),
        videos(models, tiny=tiny),
        rest(models, tiny=tiny),
    ]


def environment(*, tiny: bool) -> Call:
    tests = ["tests/kernels/test_coefficients.py"] if tiny else ["tests/kernels"]
    table = ["--help"] if tiny else ["--shapes", "sd35_512_b9", "--no-write"]  # on a CPU it counts, for minutes
    return Call(
        "environment and kernels",
        [
            gpu("machine", *(["--size", "64"] if tiny else []), limit_s=90),
            python("kernel tests", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, limit_s=180),
            python("kernel table", "benchmarks.kernels", *table, limit_s=270),
        ],
    )


def pipeline(models: Path, name: str, *, tiny: bool) -> Line:
    folder = models / (f"{name}-tiny" if tiny else name)
    options = ["--tiny"] if tiny else []
    return gpu("pipeline", name, folder, *options, limit_s=120, line=f"pipeline {name}", makes=folder)


def recipe(name: str, *, tiny: bool) -> str:
    known = {"sd3_image_sft_lora": "sd3_sft_lora"}
    return f"recipes/tiny/{known.get(name, name)}.yaml" if tiny else f"recipes/{name}.yaml"


def settings(models: Path, name: str, samples: Sequence[str] = (), *, tiny: bool) -> list[str]:
    """Changes to a recipe of this pipeline. samples: those that say how many a step makes."""
    changes = [f"model.path={models / (f'{name}-tiny' if tiny else name)}"]
    if tiny:
        changes += ["model.max_sequence_length=16"]
    return [*changes, *(() if tiny else samples)]


def samples_of(name: str, chunks: Sequence[str]) -> Sequence[str]:
    return () if "sft" in name else chunks


def measured(steps: int = 3, *, tiny: bool) -> list[str]:
    """Arguments for the number of steps; a rehearsal needs a peak too, since a CPU has none."""
    return ["--steps", "1", "--peak-tflops", "0.1"] if tiny else ["--steps", str(steps)]


def steps(models: Path, *, tiny: bool) -> Call:
    """Recipes as shipped: phases, rates, memory, launches, waits."""
    lines = [pipeline(models, "sd35m", tiny=tiny)]
    for name in LORA:
        changes = settings(models, "sd35m", samples_of(name, TWO_CHUNKS), tiny=tiny)
        words = [recipe(name, tiny=tiny), *measured(tiny=tiny), "--set", *changes]
        lines.append(gpu("steps", *words, limit_s=150, line=f"steps {name}"))
    return Call("steps of SD3.5 medium", lines)


def reference(models: Path, names: Sequence[str], *, tiny: bool) -> Call:
    """Beside the published loops, as shipped and with all levers."""
    counts = ["--rounds", "1"] if tiny else ["--rounds", "3"]
    lines = [pipeline(models, "sd35m", tiny=tiny)]
    for name in names:
        changes = settings(models, "sd35m", samples_of(name, ONE_CHUNK), tiny=tiny)
        # A rehearsal compiles in the call of variants; here it would take minutes of a CPU for nothing new.
        compared = "as shipped" if tiny else f"as shipped,{LEVERS[name]}"
        words = [recipe(name, tiny=tiny), "--variants", compared, *counts, "--set", *changes]
        lines.append(gpu("against", *words, limit_s=240 if len(names) > 1 else 400, line=f"against {name}"))
    return Call(f"beside the published loops: {', '.join(names)}", lines)


def variants(models: Path, name: str, *, tiny: bool) -> Call:
    """One lever at a time. A variant's row is written when it has run: what a limit cuts off are the later ones."""
    lines = [pipeline(models, "sd35m", tiny=tiny)]
    changes = settings(models, "sd35m", ONE_CHUNK, tiny=tiny)
    for number, names in enumerate(COMPARED[name], 1):
        words = [recipe(name, tiny=tiny), "--variants", ",".join(names), *measured(2, tiny=tiny), "--set", *changes]
        lines.append(gpu("steps", *words, limit_s=300, line=f"variants {name}, {number}"))
    return Call(f"one lever at a time: {name}", lines)


def robustness(*, tiny: bool) -> Call:
    quickstart = ["--help"] if tiny else ["--output", "/tmp/wfm_quickstart"]  # minutes on a CPU
    # All of them have a rehearsal of their own (tests/benchmarks/test_gpu_day.py).
    tests = "tests/gpu/test_kernels.py" if tiny else "tests/gpu"
    return Call(
        "robustness",
        [
            python("pytest -m gpu", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", tests, limit_s=300),
            gpu("stopped", "recipes/tiny/sd3_nft.yaml", limit_s=120),
            python("quickstart", "wfm_ds.quickstart", *quickstart, limit_s=240),
        ],
    )


def videos(models: Path, *, tiny: bool) -> Call:
    options = ["--tiny"] if tiny else []
    lines = [
        gpu("videos", name, *options, limit_s=limit, line=f"videos {name}")
        for name, limit in (("wan1.3b", 120), ("cosmos2b", 200))
    ]
    cut = options or ["--layers", "10"]
    lines.append(gpu("videos", "wan14b", *cut, limit_s=150, line="videos wan14b, 10 layers"))
    changes = settings(models, "wan1.3b", ["rollout.prompts_per_step=1", "rollout.group_size=2"], tiny=tiny)
    words = ["recipes/tiny/wan_nft.yaml" if tiny else "recipes/wan_nft.yaml", *measured(tiny=tiny), "--set", *changes]
    lines += [pipeline(models, "wan1.3b", tiny=tiny), gpu("steps", *words, limit_s=200, line="steps wan_nft")]
    return Call("videos and memory", lines)


def rest(models: Path, *, tiny: bool) -> Call:
    """Products in float8, and a worker on the trainer's own GPU: what is left of the gain when both share a device."""
    device = "cpu" if tiny else "cuda:0"
    lines = [gpu("matmuls", *(["--scale", "64"] if tiny else []), limit_s=180), pipeline(models, "sd35m", tiny=tiny)]
    for mode in ("async", "colocated"):
        changes = [*settings(models, "sd35m", ONE_CHUNK, tiny=tiny), f"rollout.mode={mode}"]
        changes += ["rollout.spawn=1", f"rollout.devices=[{device}]"] if mode == "async" else []
        words = [recipe("sd3_nft", tiny=tiny), *measured(tiny=tiny), "--set", *changes]
        lines.append(gpu("steps", *words, limit_s=150, line=f"steps sd3_nft, {mode}"))
    return Call("float8 products, and overlap on one device", lines)
