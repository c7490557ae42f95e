"""The GPU benchmark day (benchmarks/gpu): its records, and a rehearsal of each of its commands on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import day, host_counts
from benchmarks.gpu.calls import CALL_S, Call, CallLine, plan_calls
from benchmarks.gpu.goals import check_goals
from benchmarks.gpu.variants import COMPARED, LEVERS, VARIANTS, select_variants
from wfm_ds.errors import UserError
from wfm_ds.recipe import file as recipe_file

SAYS = "import sys, json; json.dump([{'x': 1}], open(sys.argv[-1], 'w'))"


def make_line(name, code, **options):
    return CallLine(name=name, command=[sys.executable, "-c", code], limit_s=options.pop("limit_s", 30), **options)


def run_call(out, *lines, **options):
    out.mkdir(exist_ok=True)
    call = Call("a call", lines)
    day.run_call(call, 1, out, again=options.get("again", False))
    return {record["line"]: record for record in day.load_records(call, 1, out)}


def test_no_line_stops_the_next_one(tmp_path):
    found = run_call(
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
    run_call(tmp_path / "out", make_line("parent", code, limit_s=0.5))
    with pytest.raises(subprocess.TimeoutExpired):  # longer than the child would have taken
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=2)
    assert not mark.exists()


def test_a_line_with_a_result_is_repeated_only_on_request(tmp_path):
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')"
    made = tmp_path / "made"
    lines = [
        make_line("counts", count, rows=False),
        make_line("makes", f"{count}; open({str(made)!r}, 'w')", rows=False, makes=made),
    ]
    for _ in range(2):
        run_call(tmp_path / "out", *lines)
    assert (tmp_path / "runs").read_text() == "xx"
    made.unlink()  # as on another machine: the files that later lines need are written again
    run_call(tmp_path / "out", *lines)
    assert (tmp_path / "runs").read_text() == "xxx"
    run_call(tmp_path / "out", *lines, again=True)
    assert (tmp_path / "runs").read_text() == "xxxx"


def test_a_call_ends_at_its_time_limit_and_the_next_one_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(day, "CALL_S", day.ENOUGH_S - 1)
    found = run_call(tmp_path / "out", make_line("fine", SAYS))
    assert found["fine"]["status"] == "not run"
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("tiny", [False, True])
def test_every_call_fits_and_names_what_exists(tiny, root, tmp_path):
    planned = plan_calls(tmp_path, tiny=tiny)
    names = [line.name for call in planned for line in call.lines if not line.makes]
    assert len(set(names)) == len(names), "goals look rows up by the line's name"
    for call in planned:
        assert all(0 < line.limit_s <= CALL_S for line in call.lines)
        for words in (line.command for line in call.lines):
            recipes = [root / word for word in words if word.startswith("recipes/")]
            assert all(recipe.exists() for recipe in recipes)
    full, rehearsed = plan_calls(tmp_path, tiny=False), plan_calls(tmp_path, tiny=True)
    assert [[line.name for line in call.lines] for call in full] == [[line.name for line in c.lines] for c in rehearsed]


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
        "against sd3_nft": [{"variant": "as shipped", "times as fast": 1.2}, {"variant": "all", "times as fast": 1.6}],
        "steps sd3_nft": [{"rollout MFU": 0.3, "allocated / estimated": 0.8}],
        "steps sd3_flow_grpo": [{"allocated / estimated": 1.1}, {"error": "out of memory"}],
        "videos cosmos2b": [
            {"what": "forward, native", "times as fast": 1.0},
            {"what": "forward, cudnn", "times as fast": 1.45},
        ],
    }
    rows = {row["goal"]: row for row in check_goals(tables, {"pytest -m gpu": "failed (1)"})}
    nft = rows["DiffusionNFT compared with the published loop, times as fast"]
    assert (nft["wanted"], nft["found"], nft["met"]) == ("at least 1.5", 1.6, "yes")
    assert rows["MFU of SD3.5 medium rollouts, as shipped"]["met"] == "no"
    assert rows["MFU of SD3.5 medium training, as shipped"]["met"] == "not measured"
    assert rows["Cosmos 704p forward by attention alone, times as fast"]["found"] == 1.45
    memory = rows["peak memory relative to the estimate, farthest from 1"]
    assert (memory["wanted"], memory["found"], memory["met"]) == ("0.85 to 1.15", 0.8, "no")
    assert [row["met"] for row in rows.values()][-1] == "no"


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


ENDED = ("done", "made before")  # the latter: a pipeline that an earlier call has written


def choose_lines(calls):
    """Return a call of few lines: the last line of each program of a day, and before them the pipelines that they use.

    `steps` counts as two programs, with rollouts in the same process and with async rollouts.
    """
    lines = [line for call in calls for line in call.lines]
    by_program = {}
    for module, *rest in (line.command[2:] for line in lines if not line.makes):
        by_program[rest[0] if module == "benchmarks.gpu" else module, "rollout.mode=async" in rest] = module, *rest
    chosen = [line for line in lines if tuple(line.command[2:]) in by_program.values()]
    words = {word for line in chosen for word in line.command}
    pipelines = {line.makes: line for line in lines if line.makes and f"model.path={line.makes}" in words}
    return Call("one line of each program", [*pipelines.values(), *chosen])


def test_a_line_of_each_program_is_rehearsed(tmp_path, monkeypatch):
    """Run some lines on a CPU with tiny pipelines, so that mistakes in them cost no GPU time."""
    monkeypatch.setattr(day, "CALL_S", 1800.0)
    (tmp_path / "models").mkdir()
    call = choose_lines(plan_calls(tmp_path / "models", tiny=True))
    assert {"machine", "kernel table", "pytest -m gpu", "stopped", "quickstart", "matmuls"} < {
        line.name for line in call.lines
    }
    day.run_call(call, 1, tmp_path, again=False)
    records = [record for record in day.load_records(call, 1, tmp_path) if record["status"] not in ENDED]
    assert {record["line"]: record["said"] for record in records} == {}
    day.write_report(day.load_records(call, 1, tmp_path), tmp_path, tiny=True, write=False)
    page = (tmp_path / "day.md").read_text()
    assert "times as fast" in page
    assert "| rollout MFU |" in page


@pytest.mark.long
def test_a_rehearsal_runs_all_lines(root, tmp_path):
    words = ["--tiny", "--out", str(tmp_path / "out"), "--models", str(tmp_path / "models"), "--json"]
    command = [sys.executable, "-m", "benchmarks.gpu", "day", *words, str(tmp_path / "lines.json")]
    for number in range(1, len(plan_calls(tmp_path / "models", tiny=True)) + 1):
        asked = [*command, "--call", str(number)]
        done = subprocess.run(asked, cwd=root, capture_output=True, text=True, timeout=1800, check=False)
        lines = [line for line in json.loads((tmp_path / "lines.json").read_text()) if line["call"] == number]
        assert {line["line"]: line["said"] for line in lines if line["status"] not in ENDED} == {}, done.stderr[-3000:]
        assert done.returncode == 0
    lines = json.loads((tmp_path / "lines.json").read_text())
    page = (Path(tmp_path) / "out" / "day.md").read_text()
    assert "times as fast" in page
    assert "| rollout MFU |" in page
    record = json.loads((tmp_path / "out" / "day.json").read_text())
    assert len(record["lines"]) == len(lines)
    assert not [row for line in record["lines"] for row in line["rows"] if "error" in row]


@pytest.mark.long
def test_the_tests_that_need_a_gpu_are_rehearsed(root):
    """Run their bodies on a CPU; tests that only a GPU can run are skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    environment = {**os.environ, "WFM_TEST_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
