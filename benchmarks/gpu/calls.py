"""The lines of a day of measurements on a GPU, in order of their value, and how they share calls of ten minutes.

A line is a command in a separate process with its own time limit. A call runs the first lines without a result whose
time limits fit into the time that is left. The rehearsal (`tiny`) runs the same lines with tiny pipelines.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from benchmarks.gpu.variants import AS_SHIPPED, COMPARED, COMPILED, LEVERS, VARIANTS

CALL_S = 600.0  # the longest command on a borrowed machine
SPARE_S = 60.0  # of a call: start of Python, pages and archive
GROUPS = ("correctness", "headline", "tests", "levers", "videos and memory")
LORA = ("sd3_nft", "sd3_flow_grpo", "sd3_image_sft_lora")
# Fewer samples than in the recipes (48 x 24), so that a step takes seconds on one GPU. A rollout has two batches or
# one.
TWO_CHUNKS = ("rollout.prompts_per_step=4", "rollout.group_size=9")
ONE_CHUNK = ("rollout.prompts_per_step=2", "rollout.group_size=9")
GPU_TESTS = "gpu tests"  # the lines of tests/gpu start with this
REHEARSAL_LIMIT_S = 420.0  # of every line, because a busy CPU is much slower
SEPARATE_TESTS = {"engine": 200, "families": 200, "memory": 150}  # other files of tests/gpu, and their limits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallLine:
    """One command."""

    name: str
    command: Sequence[str]
    limit_s: float
    group: str = ""
    rows: bool = True  # whether it writes table rows. If False, the last line of its output is the result
    pipeline: str = ""  # name of the line that writes the pipeline of this line
    makes: Path | None = None  # the pipeline that this line writes; the line is skipped if it exists on this machine
    cache: str = ""  # name of the line whose compile cache this line starts with
    keeps_cache: bool = False  # whether other lines start with the compile cache of this line


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Lines in order of their value, and the lines that write the pipelines."""

    lines: Sequence[CallLine]
    pipelines: Sequence[CallLine]

    def find_pipeline(self, line: CallLine) -> CallLine | None:
        return next((pipeline for pipeline in self.pipelines if pipeline.name == line.pipeline), None)

    def choose_line(self, done: Collection[str], existing: Collection[str], left_s: float) -> CallLine | None:
        """Return the next line to run, or None if no line fits into the time that is left.

        done: names of the lines that have a result. existing: names of the pipelines on this machine. A line fits if
        its whole time limit is left, and also the limit of its pipeline if this does not exist: no line is cut off.
        """
        for line in self.lines:
            if line.name in done or (line.cache and line.cache not in done):
                continue
            pipeline = self.find_pipeline(line)
            missing = None if pipeline is None or pipeline.name in existing else pipeline
            if line.limit_s + (missing.limit_s if missing else 0) <= left_s:
                return missing or line
        return None

    def schedule(self, minutes: float) -> list[list[CallLine]]:
        """Return the lines of each call if every line takes its whole time limit, and if each call starts on a machine
        without pipelines. Lines usually take less, so that a call reaches more lines."""
        calls: list[list[CallLine]] = []
        done: set[str] = set()
        for call_s in split_minutes(minutes):
            left_s, existing, lines = call_s - SPARE_S, set[str](), list[CallLine]()
            while (line := self.choose_line(done, existing, left_s)) is not None:
                lines.append(line)
                left_s -= line.limit_s
                (done if line.makes is None else existing).add(line.name)
            calls.append(lines)
        return calls


def split_minutes(minutes: float) -> list[float]:
    """Return the seconds of each call: ten minutes, and the rest in the last call."""
    left_s, calls = 60 * minutes, []
    while left_s > SPARE_S:
        calls.append(min(left_s, CALL_S))
        left_s -= calls[-1]
    return calls


def against_name(recipe: str, variant: str) -> str:
    """Return the name of the line that compares this variant of a recipe with the published loop."""
    return f"against {recipe}" + ("" if variant == AS_SHIPPED else f", {variant}")


def plan_day(models: Path, *, tiny: bool) -> Plan:
    """Return the lines of a day. models: folder for pipelines."""
    day = _Day(models, tiny)
    groups = (day.correctness(), day.headline(), day.tests(), day.levers(), day.videos_and_memory())
    lines = [
        dataclasses.replace(line, group=name) for name, group in zip(GROUPS, groups, strict=True) for line in group
    ]
    if tiny:
        lines = [dataclasses.replace(line, limit_s=REHEARSAL_LIMIT_S) for line in lines]
    names = dict.fromkeys(line.pipeline for line in lines if line.pipeline)
    return Plan(lines, [day.pipeline_line(name.removeprefix("pipeline ")) for name in names])


class _Day:
    """Makes the lines of a day."""

    def __init__(self, models: Path, tiny: bool) -> None:
        self.models, self.tiny = models, tiny

    def correctness(self) -> Iterable[CallLine]:
        yield self.gpu_line("machine", *self.if_tiny("--size", "64"), limit_s=60)
        for name in LORA[:2]:
            yield self.recipe_line(f"first step {name}", "first_step", name, ONE_CHUNK, limit_s=90)
        kernels = "tests/kernels/test_coefficients.py" if self.tiny else "tests/kernels"
        yield self.tests_line("kernel tests", "-x", kernels, limit_s=150)

    def headline(self) -> Iterable[CallLine]:
        """Recipes as shipped: in detail, and compared with the published loops.

        On an H100, a step of TWO_CHUNKS takes at least 12 s (sd3_nft) and 18 s (sd3_flow_grpo), and a tenth more if the
        goals are met. `steps` runs three of them, `against` runs four steps of ONE_CHUNK of both loops. The limits also
        leave 40 s for imports and loading, and 60 s for two models.
        """
        for name, steps_s in zip(LORA[:2], (120, 140), strict=True):
            words = ["--no-counts", *self.step_arguments(2)]
            yield self.steps_line(f"steps {name}", name, TWO_CHUNKS, words=words, limit_s=steps_s)
            yield self.roofline_line(name)
            yield self.against_line(name, AS_SHIPPED, limit_s=180)

    def tests(self) -> Iterable[CallLine]:
        """Tests on the device, and a whole demo. Other lines of tests/gpu are in `videos_and_memory`."""
        ignored = [f"--ignore=tests/gpu/test_{name}.py" for name in SEPARATE_TESTS]
        yield self.tests_line(GPU_TESTS, "-m", "gpu", "tests/gpu", *ignored, limit_s=210)
        yield self.gpu_line("quickstart", *self.if_tiny("--steps", "1"), limit_s=180)
        yield self.separate_tests_line("engine")

    def levers(self) -> Iterable[CallLine]:
        """One optimization at a time: cheap variants, then compiled ones, which start with the cache of a line that
        only compiles. Each row is written at once, so the time limit loses only unfinished variants."""
        cheap, compiled = list[CallLine](), list[CallLine]()
        for name, groups in COMPARED.items():
            compile_line = f"compile {name}"
            for number, variants in enumerate(groups, 1):
                is_compiled = any(COMPILED in VARIANTS[variant].overrides for variant in variants)
                line = self.steps_line(
                    *(f"variants {name}, {number}", name, ONE_CHUNK),
                    words=["--variants", ",".join(variants), "--no-counts", *self.step_arguments(2)],
                    limit_s=300 if is_compiled else 240,
                    cache=compile_line if is_compiled else "",
                )
                (compiled if is_compiled else cheap).append(line)
        # The first variants of each recipe matter most.
        yield from sorted(cheap, key=lambda line: line.name.rpartition(", ")[2])
        for name in LORA[:2]:
            yield self.steps_line(f"launches {name}", name, ONE_CHUNK, words=self.step_arguments(1), limit_s=150)
        for name in COMPARED:
            words = ["--variants", LEVERS[name], "--no-counts", *self.step_arguments(1)]
            yield self.steps_line(
                *(f"compile {name}", name, ONE_CHUNK), words=words, limit_s=CALL_S - SPARE_S - 140, keeps_cache=True
            )
            yield self.against_line(name, LEVERS[name], limit_s=240, cache=f"compile {name}")
        yield from compiled
        yield self.gpu_line("matmuls", *self.if_tiny("--scale", "64"), limit_s=120)
        device = "cpu" if self.tiny else "cuda:0"
        for mode in ("async", "colocated"):
            changes = ["rollout.spawn=1", f"rollout.devices=[{device}]"] if mode == "async" else []
            changes.append(f"rollout.mode={mode}")
            words = ["--no-counts", *self.step_arguments(3)]
            yield self.steps_line(
                f"steps sd3_nft, {mode}", "sd3_nft", ONE_CHUNK, words=words, changes=changes, limit_s=150
            )

    def videos_and_memory(self) -> Iterable[CallLine]:
        tiny = self.if_tiny("--tiny")
        yield self.separate_tests_line("memory")
        for name, limit_s in (("wan1.3b", 120), ("cosmos2b", 200)):
            yield self.gpu_line("videos", name, *tiny, limit_s=limit_s, line=f"videos {name}")
        small = ["rollout.prompts_per_step=1", "rollout.group_size=2"]
        yield self.steps_line("steps wan_nft", "wan_nft", small, limit_s=200, model="wan1.3b")
        yield self.separate_tests_line("families")
        yield self.gpu_line("stopped", "tests/recipes/sd3_nft.yaml", limit_s=240)
        yield self.against_line("sd3_image_sft_lora", AS_SHIPPED, limit_s=180)
        yield self.steps_line("steps sd3_image_sft_lora", "sd3_image_sft_lora", (), limit_s=120)
        cut = tiny or ["--layers", "10"]
        yield self.gpu_line("videos", "wan14b", *cut, limit_s=150, line="videos wan14b, 10 layers")
        table = (
            ["--help"] if self.tiny else ["--shapes", "sd35_512_b9", "--no-write"]
        )  # counting on a CPU takes minutes
        yield self.python_line("kernel table", "benchmarks.kernels", *table, limit_s=270)

    def gpu_line(self, command: str, *words: str, limit_s: float, line: str = "") -> CallLine:
        return CallLine(
            name=line or command, command=[sys.executable, "-m", "benchmarks.gpu", command, *words], limit_s=limit_s
        )

    def python_line(self, line: str, *words: str, limit_s: float) -> CallLine:
        return CallLine(name=line, command=[sys.executable, "-m", *words], limit_s=limit_s, rows=False)

    def tests_line(self, line: str, *words: str, limit_s: float) -> CallLine:
        return self.python_line(line, "pytest", "-q", "-p", "no:cacheprovider", *words, limit_s=limit_s)

    def separate_tests_line(self, file: str) -> CallLine:
        words = ["-m", "gpu", f"tests/gpu/test_{file}.py"]
        return self.tests_line(f"{GPU_TESTS}, {file}", *words, limit_s=SEPARATE_TESTS[file])

    def pipeline_line(self, model: str) -> CallLine:
        folder = self.pipeline_folder(model)
        words = ["pipeline", model, str(folder), *self.if_tiny("--tiny")]
        command = [sys.executable, "-m", "benchmarks.gpu", *words]
        return CallLine(name=f"pipeline {model}", command=command, limit_s=60 if self.tiny else 90, makes=folder)

    def recipe_line(
        self,
        line: str,
        command: str,
        recipe: str,
        samples: Sequence[str],
        *,
        limit_s: float,
        words: Sequence[str] = (),
        changes: Sequence[str] = (),
        model: str = "sd35m",
        cache: str = "",
        keeps_cache: bool = False,
    ) -> CallLine:
        """Return a line that runs a recipe. samples: overrides for the number of samples in a step of RL."""
        sizes = () if self.tiny or "sft" in recipe else samples
        overrides = [*self.pipeline_changes(model), *sizes, *changes]
        full = ["benchmarks.gpu", command, str(self.recipe_path(recipe)), *words, "--set", *overrides]
        return CallLine(
            name=line,
            command=[sys.executable, "-m", *full],
            limit_s=limit_s,
            pipeline=f"pipeline {model}",
            cache=cache,
            keeps_cache=keeps_cache,
        )

    def steps_line(
        self, line: str, recipe: str, samples: Sequence[str], *, words: Sequence[str] | None = None, **options: object
    ) -> CallLine:
        words = self.step_arguments(3) if words is None else words
        return self.recipe_line(line, "steps", recipe, samples, words=words, **options)  # type: ignore[arg-type]

    def against_line(self, recipe: str, variant: str, *, limit_s: float, cache: str = "") -> CallLine:
        name = against_name(recipe, variant)
        words = ["--variants", variant, "--rounds", "1" if self.tiny else "3"]
        return self.recipe_line(name, "against", recipe, ONE_CHUNK, words=words, limit_s=limit_s, cache=cache)

    def roofline_line(self, recipe: str) -> CallLine:
        """Return a line that needs no weights of the released model, only its name."""
        if self.tiny:
            return self.recipe_line(f"roofline {recipe}", "roofline", recipe, (), limit_s=60)
        words = [str(self.recipe_path(recipe)), "--set", *TWO_CHUNKS]
        return self.gpu_line("roofline", *words, limit_s=60, line=f"roofline {recipe}")

    def step_arguments(self, steps: int) -> list[str]:
        """Return arguments for the number of steps. A rehearsal on a CPU also needs a peak rate."""
        return ["--steps", "1", "--peak-tflops", "0.1"] if self.tiny else ["--steps", str(steps)]

    def recipe_path(self, name: str) -> Path:
        known = {"sd3_image_sft_lora": "sd3_sft_lora"}
        return (
            Path("tests/recipes" if self.tiny else "recipes") / f"{known.get(name, name) if self.tiny else name}.yaml"
        )

    def pipeline_folder(self, model: str) -> Path:
        return self.models / (f"{model}-tiny" if self.tiny else model)

    def pipeline_changes(self, model: str) -> list[str]:
        """Return overrides to use this pipeline in a recipe."""
        return [f"model.path={self.pipeline_folder(model)}", *self.if_tiny("model.max_sequence_length=16")]

    def if_tiny(self, *words: str) -> list[str]:
        return list(words) if self.tiny else []
