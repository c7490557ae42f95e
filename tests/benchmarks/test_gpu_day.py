"""The GPU benchmark day (benchmarks/gpu): its plan and records, and a rehearsal of each of its lines on a CPU."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from benchmarks.gpu import archive, day, first_step, host_counts, pages
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.calls import CALL_S, GPU_TESTS, GROUPS, SPARE_S, CallLine, Plan, plan_day, split_minutes
from benchmarks.gpu.goals import GOALS, check_goals, measurable_goals
from benchmarks.gpu.line_process import CACHE_VARIABLE
from benchmarks.gpu.variants import COMPARED, COMPILED, LEVERS, VARIANTS, select_variants
from wfm_ds.errors import UserError
from wfm_ds.recipe import file as recipe_file

SAYS = "import sys, json; json.dump([{'x': 1}], open(sys.argv[-1], 'w'))"
REHEARSAL_S = 1800.0  # on two busy cores


def make_line(name, code, **options):
    return CallLine(name=name, command=[sys.executable, "-c", code], limit_s=options.pop("limit_s", 30), **options)


def open_day(out, *lines, pipelines=()):
    out.mkdir(exist_ok=True)
    return day.Day(Plan(lines, pipelines), out, out.with_suffix(".tar.gz"), tiny=False)


def run_lines(out, *lines, minutes=60, pipelines=()):
    """Run one call, and return the records by line."""
    made = open_day(out, *lines, pipelines=pipelines)
    made.run_call(60 * minutes)
    return {record["line"]: record for record in made.records()}


def test_no_line_stops_the_next_one(tmp_path):
    found = run_lines(
        tmp_path / "out",
        make_line("fine", SAYS),
        make_line("fails", "raise SystemExit('no such thing')", rows=False),
        make_line("hangs", "import time; time.sleep(60)", limit_s=0.5),
        make_line("says", "print('12 passed')", rows=False),
    )
    assert [record["status"] for record in found.values()] == [
        "done",
        "failed (1)",
        "killed at its limit of 0 s",
        "done",
    ]
    assert found["fine"]["rows"] == [{"x": 1}]
    assert found["fails"]["said"] == "no such thing"
    assert found["says"]["said"] == "12 passed"


def test_child_processes_of_a_killed_line_end(tmp_path):
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    run_lines(tmp_path / "out", make_line("parent", code, limit_s=0.5))
    time.sleep(2)  # longer than the child would have taken
    assert not mark.exists()


def test_a_killed_line_leaves_no_compile_cache_and_a_finished_one_passes_it_on(tmp_path):
    """A process that is killed while it compiles leaves files that no other process can load."""
    write = f"import os, time; folder = os.environ[{CACHE_VARIABLE!r}]; open(folder + '/main.so', 'w').write("
    read = f"import os; print(*os.listdir(os.environ[{CACHE_VARIABLE!r}]))"
    found = run_lines(
        tmp_path / "out",
        make_line("killed", write + "'broken'); time.sleep(60)", limit_s=1, keeps_cache=True),
        make_line("after the killed one", read, rows=False, cache="killed"),
        make_line("compiles", write + "'whole')", rows=False, keeps_cache=True),
        make_line("compiled", read, rows=False, cache="compiles"),
        make_line("another", read, rows=False),
    )
    said = {name: record["said"] for name, record in found.items()}
    assert [said[name] for name in ("after the killed one", "compiled", "another")] == ["", "main.so", ""]
    # The cache travels with the results.
    archive.unpack_results(tmp_path / "out.tar.gz", tmp_path / "there")
    later = make_line("later", read, rows=False, cache="compiles")
    assert run_lines(tmp_path / "there", make_line("compiles", "", rows=False), later)["later"]["said"] == "main.so"


def test_a_day_continues_from_its_archive_on_another_machine(tmp_path):
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')"
    folder = tmp_path / "pipeline"
    pipeline = make_line("pipeline", f"{count}; open({str(folder)!r}, 'w')", rows=False, makes=folder)
    lines = [
        make_line("first", count, rows=False, pipeline="pipeline"),
        make_line("fails", f"{count}; raise SystemExit(1)", rows=False),
        make_line("second", count, rows=False, pipeline="pipeline", limit_s=400),
    ]
    run_lines(tmp_path / "out", *lines, minutes=6, pipelines=[pipeline])
    assert (tmp_path / "runs").read_text() == "xxx"  # the last line does not fit into this call
    folder.unlink()  # another machine
    archive.unpack_results(tmp_path / "out.tar.gz", tmp_path / "there")
    continued = open_day(tmp_path / "there", *lines, pipelines=[pipeline])
    assert continued.run_call(3600) is True
    assert (tmp_path / "runs").read_text() == "xxxxx"  # the pipeline again, and the missing line
    assert [call["lines"] for call in continued.calls] == [["pipeline", "first", "fails"], ["pipeline", "second"]]
    continued.forget_failures()
    assert continued.run_call(3600) is True
    assert (tmp_path / "runs").read_text() == "xxxxxx"
    assert continued.run_call(3600) is False


def test_an_archive_without_the_newest_results_of_the_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a day replaces the handler of its process
    lines = [make_line(name, SAYS) for name in ("first", "second")]
    out, old = tmp_path / "out", tmp_path / "old.tar.gz"
    run_lines(out, lines[0])
    (tmp_path / "out.tar.gz").rename(old)
    first = (out / "first.json").read_bytes()
    run_lines(out, *lines)
    before = {path: path.read_bytes() for path in out.iterdir()}

    def continue_day(file, *words):
        options = ["--tiny", "--minutes", "0", "--models", str(tmp_path), "--continue-from", str(file)]
        return main(["day", *options, *words])

    assert continue_day(old, "--out", str(out)) == 2
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    (out / "second.json").unlink()  # the archive has all results of the folder, and calls.json is newer than its own
    assert continue_day(tmp_path / "out.tar.gz", "--out", str(out)) == 0
    assert {"first.json", "second.json"} <= {path.name for path in out.iterdir()}
    assert continue_day(old, "--out", str(tmp_path / "other")) == 0
    assert (tmp_path / "other" / "first.json").read_bytes() == first
    (out / "first.json").write_text("{}")  # another result for the same line
    assert continue_day(old, "--out", str(out)) == 2


def test_a_line_without_its_pipeline_is_not_run(tmp_path):
    pipeline = make_line("pipeline", "raise SystemExit(1)", rows=False, makes=tmp_path / "never")
    found = run_lines(tmp_path / "out", make_line("line", "", pipeline="pipeline"), pipelines=[pipeline])
    assert {name: record["status"] for name, record in found.items()} == {"pipeline": "failed (1)", "line": "not run"}


def test_the_budget_and_the_calls_are_never_exceeded(tmp_path):
    """Lines start only if their whole time limit is left, whatever earlier calls have spent."""
    lines = [make_line(f"line {number}", "", rows=False, limit_s=200) for number in range(9)]
    made = open_day(tmp_path / "out", *lines)
    assert made.run_call(200) is False  # no time for the pages
    assert made.run_call(200 + SPARE_S + 5) is True
    assert made.calls[0]["lines"] == ["line 0"] or made.calls[0]["s"] < 5  # later lines need the whole limit too
    made.calls = [{"s": 1000.0, "lines": ["line 8"], "machine": {}}]
    assert made.run_call(1000 + 2 * SPARE_S + 199) is False
    for minutes in (5, 10, 15, 30, 45, 60):
        assert all(call_s <= CALL_S for call_s in split_minutes(minutes))
        assert math.isclose(sum(split_minutes(minutes)), 60 * minutes)
        calls = plan_day(tmp_path, tiny=False).schedule(minutes)
        assert sum(SPARE_S + sum(line.limit_s for line in call) for call in calls) <= 60 * minutes
        assert all(SPARE_S + sum(line.limit_s for line in call) <= CALL_S for call in calls)


def test_half_an_hour_is_enough_for_correctness_and_the_headline_even_if_all_lines_take_their_limits(tmp_path):
    plan = plan_day(tmp_path, tiny=False)
    within = [line.name for call in plan.schedule(30) for line in call]
    first = {line.name for line in plan.lines if line.group in GROUPS[:2]}
    assert {*first, GPU_TESTS} <= set(within)
    assert sum(goal.startswith("MFU") for goal in measurable_goals(within, [line.name for line in plan.lines])) == 4


def test_the_docs_list_the_lines_and_goals_of_15_and_30_minutes_and_of_all_lines(tmp_path, root):
    plan, page = plan_day(tmp_path, tiny=False), (root / "docs" / "measurements.md").read_text()
    before, also = set(), ""
    for minutes in (15, 30):
        rows = [row for row in day.plan_rows(plan, minutes) if row["group"]]
        assert before <= {row["line"] for row in rows}
        new = [row for row in rows if row["line"] not in before]
        lines, goals = ", ".join(row["line"] for row in new), "; ".join(row["goals"] for row in new if row["goals"])
        assert f"| {minutes} | {also}{lines} | {also}{goals} |" in page
        before, also = before | {row["line"] for row in rows}, "also "
    (whole,) = re.findall(r"^\| (\d+) \| all \| all \|$", page, re.MULTILINE)
    every = {line.name for line in plan.lines}
    assert every <= {row["line"] for row in day.plan_rows(plan, int(whole))}
    assert not every <= {row["line"] for row in day.plan_rows(plan, int(whole) - 10)}
    assert len(measurable_goals(every, every)) == len(GOALS) + 1


def test_cheap_variants_run_before_anything_is_compiled(tmp_path):
    names = [line.name for line in plan_day(tmp_path, tiny=False).lines]
    positions = {variant: [] for variants in COMPARED["sd3_nft"] for variant in variants}
    for number, variants in enumerate(COMPARED["sd3_nft"], 1):
        for variant in variants:
            positions[variant] = names.index(f"variants sd3_nft, {number}")
    compiled = {name for name, variant in VARIANTS.items() if COMPILED in variant.overrides}
    first = names.index("compile sd3_nft")
    assert all((position > first) == (variant in compiled) for variant, position in positions.items())
    assert {"merged lora", "cuda graph"} <= set(COMPARED["sd3_nft"][0])


@pytest.mark.parametrize("tiny", [False, True])
def test_every_line_fits_and_names_what_exists(tiny, root, tmp_path):
    plan = plan_day(tmp_path, tiny=tiny)
    names = [line.name for line in plan.lines]
    assert len(set(names)) == len(names), "goals look rows up by the line's name"
    assert {line.cache for line in plan.lines} - {""} <= {line.name for line in plan.lines if line.keeps_cache}
    for line in plan.lines:
        pipeline = plan.find_pipeline(line)
        assert 0 < line.limit_s + (pipeline.limit_s if pipeline else 0) <= CALL_S - SPARE_S
        recipes = [root / word for word in line.command if word.startswith(("recipes/", "tests/"))]
        assert all(recipe.exists() for recipe in recipes)
    full = plan_day(tmp_path, tiny=False)
    assert names == [line.name for line in full.lines]
    # Every file of tests/gpu is in a line.
    commands = [line.command for line in plan.lines if line.name.startswith("gpu tests")]
    ignored = {word.removeprefix("--ignore=") for words in commands for word in words if word.startswith("--ignore=")}
    assert ignored == {words[-1] for words in commands if words[-1].startswith("tests/gpu/")}


def test_every_variant_is_a_valid_recipe(root):
    """Keys that a recipe rejects must be found without a GPU."""
    pairs = [(recipe, name) for recipe, lines in COMPARED.items() for names in lines for name in names]
    for recipe, name in [*pairs, *LEVERS.items()]:
        recipe_file.load_recipe(root / "recipes" / f"{recipe}.yaml", VARIANTS[name].overrides)
    assert {name for _, name in [*pairs, *LEVERS.items()]} == set(VARIANTS), "each is compared somewhere"


def test_an_unknown_variant_is_an_error():
    with pytest.raises(UserError, match="unknown variant nonsense; available: as shipped"):
        select_variants("as shipped,nonsense")


def test_goals_are_looked_up_and_checked():
    tables = {
        "against sd3_nft": [{"variant": "as shipped", "times as fast": 1.7}],
        "against sd3_nft, nft levers": [{"variant": "nft levers", "times as fast": 1.6}],
        "against sd3_flow_grpo": [{"variant": "as shipped", "times as fast": 1.9}],
        "against sd3_flow_grpo, grpo levers": [{"variant": "grpo levers", "error": "out of memory"}],
        "steps sd3_nft": [{"rollout MFU": 0.27, "train MFU": 0.2, "allocated / estimated": 0.8}],
        "roofline sd3_nft": [
            {"phase": "rollout", "highest MFU, eager": 0.3},
            {"phase": "train", "highest MFU, eager": 0.25},
        ],
        "steps sd3_flow_grpo": [{"rollout MFU": 0.3, "allocated / estimated": 1.1}, {"error": "out of memory"}],
        "videos cosmos2b": [
            {"what": "forward, native", "times as fast": 1.0},
            {"what": "forward, cudnn", "times as fast": 1.45},
        ],
    }
    statuses = {"gpu tests": "done", "gpu tests, memory": "failed (1)"}
    rows = {row["goal"]: row for row in check_goals(tables, statuses)}
    nft = rows["DiffusionNFT with all levers compared with the published loop, times as fast"]
    assert (nft["wanted"], nft["found"], nft["met"]) == ("at least 1.5", 1.6, "yes")
    grpo = rows["Flow-GRPO with all levers compared with the published loop, times as fast"]
    assert (grpo["found"], grpo["met"]) == (None, "not measured"), "the variant as shipped does not count"
    rollout = rows["MFU of DiffusionNFT rollouts, as shipped, of the eager limit"]
    assert (rollout["wanted"], rollout["found"], rollout["met"]) == ("at least 0.9", pytest.approx(0.9), "yes")
    assert rows["MFU of DiffusionNFT training, as shipped, of the eager limit"]["met"] == "no"
    assert rows["MFU of Flow-GRPO rollouts, as shipped, of the eager limit"]["met"] == "not measured"
    assert rows["Cosmos 704p forward by attention alone, times as fast"]["found"] == 1.45
    memory = rows["peak memory relative to the estimate, farthest from 1"]
    assert (memory["wanted"], memory["found"], memory["met"]) == ("0.85 to 1.15", 0.8, "no")
    assert [row["met"] for row in rows.values()][-1] == "no"
    assert check_goals({}, {"gpu tests": "done", "gpu tests, memory": "not run"})[-1]["met"] == "not measured"


def test_a_goal_is_measured_exactly_if_all_lines_that_it_needs_have_run(tmp_path):
    planned = {line.name for line in plan_day(tmp_path, tiny=False).lines}
    numbers = {"times as fast": 1.0, "what": "forward", "allocated / estimated": 1.0, "highest MFU, eager": 0.3}
    rows = [{"phase": phase, f"{phase} MFU": 0.3, **numbers} for phase in ("rollout", "train")]
    for goal in GOALS:
        assert set(goal.needs) <= planned
        assert goal.find_value({line: rows for line in goal.needs}) == 1.0
        for missing in goal.needs:
            assert goal.find_value({line: rows for line in planned - {missing}}) is None
    assert measurable_goals(["steps sd3_nft", "roofline sd3_nft"], planned) == [
        "MFU of DiffusionNFT rollouts, as shipped, of the eager limit",
        "MFU of DiffusionNFT training, as shipped, of the eager limit",
    ]


def test_a_first_step_with_wrong_numbers_is_an_error():
    good = {"loss/total": 0.5, "optim/grad_norm": 0.1, "policy/ratio_start_abs_dev": 0.0}
    assert "error" not in first_step.check_metrics(good, 1e-4)
    assert first_step.check_metrics(good | {"loss/total": math.nan}, None)["error"] == "loss is nan"
    assert "clipped at 0.0001" in first_step.check_metrics(good | {"policy/ratio_start_abs_dev": 2e-4}, 1e-4)["error"]


def test_the_performance_table_lists_each_measured_loop():
    seconds = {"median": 4.0, "min": 3.0, "max": 5.0}
    steps = {"recipe": "sd3_nft", "variant": "merged lora", "samples": 18, "step s": seconds}
    steps |= {"MFU": 0.3, "allocated GiB": 20.0}
    against = {"recipe": "sd3_nft", "variant": "as shipped", "samples": 18, "ours s": seconds, "reference s": seconds}
    records = [{"rows": [steps, {"error": "out of memory"}]}, {"rows": [against]}]
    found = pages.performance_rows(records)
    assert [row["loop"] for row in found] == ["wfm_ds", "wfm_ds, alternating", "published loop, alternating"]
    assert found[0]["samples per GPU and second"] == 18 / 4
    assert (found[0]["s per step"], found[0]["peak memory GiB"], found[0]["MFU"]) == (seconds, 20.0, 0.3)
    assert len({tuple(row) for row in found}) == 1  # equal columns


def test_results_are_packed_below_the_limit_of_a_file(tmp_path, monkeypatch):
    out, file = tmp_path / "out", tmp_path / "results.tar.gz"
    (out / "caches").mkdir(parents=True)
    (out / "day.md").write_text("page")
    (out / "line.log").write_bytes(os.urandom(300_000))
    for name, size in (("small", 100_000), ("large", 200_000)):
        (out / "caches" / f"{name}.tar.gz").write_bytes(os.urandom(size))
    monkeypatch.setattr(archive, "MAX_BYTES", 300_000)
    assert archive.pack_results(out, file) == ["caches/large.tar.gz"]
    with tarfile.open(file) as packed:
        assert {member.name for member in packed} == {"day.md", "line.log", "caches/small.tar.gz"}
    assert file.stat().st_size < 300_000
    with pytest.raises(UserError, match="not an archive"):
        archive.unpack_results(out / "day.md", tmp_path / "other")


def test_launches_and_copies_are_counted_separately():
    calls_by_name = {
        "cudaLaunchKernel": 7,
        "cuLaunchKernelEx": 2,
        "cudaGraphLaunch": 1,
        "cudaMemcpyAsync": 3,
        "aten::mm": 5,
    }
    expected = {"kernel launches": 9, "graph launches": 1, "copies": 3}
    assert host_counts.summarize_calls(calls_by_name, on_cuda=True) == expected
    assert host_counts.summarize_calls(calls_by_name, on_cuda=False) == {"operators": 5}


WHEELS = """#!/bin/sh
# Stands for `python3 -m pip`: writes one file for each package, and fails at the package $BROKEN.
while [ $# -gt 0 ]; do
  case $1 in
    -d|-w) folder=$2; mkdir -p "$folder"; shift ;;
    "$BROKEN"==*) echo "no wheel of $1" >&2; exit 1 ;;
    *==*) touch "$folder/$1$TAG" ;;
  esac
  shift
done
"""
SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"


def make_wheels(folder, root, **variables):
    """Run wheels.sh in a copy of the repository, with a python3 that stands for pip and a python3.12 that is a shim
    without this version."""
    (folder / "benchmarks" / "gpu").mkdir(parents=True, exist_ok=True)
    for name in ("constraints.txt", "constraints-3.12.txt", "benchmarks/gpu/wheels.sh"):
        (folder / name).write_text((root / name).read_text())
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in (("python3", WHEELS), ("python3.12", SHIM)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TAG": "-py3-none-any.whl", "BROKEN": "none"}
    command = ["bash", str(folder / "benchmarks" / "gpu" / "wheels.sh"), "3.12"]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=60)


@pytest.mark.unit
def test_wheels_need_no_python_of_the_other_machine_and_are_complete_or_absent(tmp_path, root):
    done = make_wheels(tmp_path, root)
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in (tmp_path / ".whl").iterdir())
    assert {"deepspeed", "hjson", "diffusers", "pyzmq"} <= {name.partition("==")[0] for name in files}
    failed = make_wheels(tmp_path, root, BROKEN="deepspeed")
    assert failed.returncode != 0
    assert "no wheel of deepspeed" in failed.stderr
    assert sorted(path.name for path in (tmp_path / ".whl").iterdir()) == files  # those of the earlier run
    empty = tmp_path / "empty"
    empty.mkdir()
    assert make_wheels(empty, root, BROKEN="diffusers").returncode != 0
    assert not (empty / ".whl").exists()
    compiled = make_wheels(empty, root, TAG="-cp311-cp311-linux_x86_64.whl")
    assert compiled.returncode != 0
    assert "another Python" in compiled.stderr
    assert not list(empty.glob(".whl*"))


@pytest.mark.long
def test_the_whole_day_is_rehearsed_within_a_time_budget(root, tmp_path):
    """Run every line on a CPU with tiny pipelines, and with them every file of tests/gpu, so that mistakes in them cost
    no GPU time."""
    out = tmp_path / "out"
    words = ["--tiny", "--minutes", "120", "--out", str(out), "--models", str(tmp_path / "models")]
    command = [sys.executable, "-m", "benchmarks.gpu", "day", *words]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=REHEARSAL_S, check=False
    )
    record = json.loads((out / "day.json").read_text())
    ended = {line["line"]: line["said"] for line in record["lines"] if line["status"] != "done"}
    assert ended == {}, done.stderr[-3000:]
    assert done.returncode == 0
    assert not [row for line in record["lines"] for row in line["rows"] if "error" in row]
    table = (out / "performance.md").read_text()
    for column in ("samples per GPU and second", "s per step", "peak memory GiB", "MFU", "torch 2"):
        assert column in table
    assert "published loop" in table
    assert "| rollout MFU |" in (out / "day.md").read_text()
    assert (tmp_path / "out.tar.gz").stat().st_size < archive.MAX_BYTES
