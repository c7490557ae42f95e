"""Page of a run: contents and maximum size of data.js, escaping of user text, and failures that never stop the run."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from wfm_ds.cli.main import COMMANDS
from wfm_ds.cli.page import parser, run
from wfm_ds.errors import UserError
from wfm_ds.monitoring import run_data, run_page
from wfm_ds.monitoring.run_data import MAX_POINTS, MAX_SAMPLES, MAX_STEPS, BoundedCurve, pick_evenly
from wfm_ds.monitoring.run_page import DATA_FILE, INDEX_FILE, MAX_BYTES, PAGE_MARKER, update_page_live, write_page
from wfm_ds.monitoring.samples import GeneratedSample, write_samples
from wfm_ds.runs import layout
from wfm_ds.runs import output_folder as run_folder

HOSTILE = "</script><img src=x onerror=\"document.title='broken in'\"> & \u2028 \U0001f600"
IMAGE = np.full((8, 8, 3), 90, np.uint8)
CHROMIUM = shutil.which("chromium")


def content(folder):
    """Return the argument of wfmRun in data.js."""
    text = (folder / DATA_FILE).read_text()
    assert text.startswith("wfmRun(")
    return json.loads(text.removeprefix("wfmRun(").removesuffix(");\n"))


def metrics(folder, steps, **values):
    lines = [
        {"step": step, "time": f"2026-01-02T03:{step // 60 % 60:02d}:{step % 60:02d}+00:00", **values} for step in steps
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def samples(folder, step, prompts=("a cat",), seeds=(1, 2)):
    shown = [
        GeneratedSample(prompt=p, prompt_id=p[:3], seed=seed, pixels=IMAGE, rewards={"ocr": step / 10, "color": None})
        for p in prompts
        for seed in seeds
    ]
    write_samples(folder / "samples" / f"step_{step}", shown)


@pytest.fixture
def a_run(tmp_path):
    """Write the folder of a small running run at step 20."""
    folder = tmp_path / "a <run>"
    folder.mkdir()
    metrics(folder, range(1, 21), **{"loss/total": 0.5, "reward/ocr/mean": 1 / 3, "optim/lr": None, "other/tag": 1.0})
    for step in (0, 10, 20):
        samples(folder, step, prompts=("a cat", HOSTILE))
    (folder / "logs").mkdir()
    (folder / "logs" / "rank_0.log").write_text(
        "2026-01-02T03:00:00.000Z rank 0 INFO wfm_ds.train: begins\n"
        f"2026-01-02T03:00:01.000Z rank 0 WARNING wfm_ds.data: 3 files are broken {HOSTILE!s}\n"
        "2026-01-02T03:00:02.000Z rank 0 INFO wfm_ds.monitoring.monitor: load it with:\n"
        "from diffusers import DiffusionPipeline\npipe = 1\n"
        "2026-01-02T03:00:03.000Z rank 0 INFO wfm_ds.train: ends\n",
        encoding="utf-8",
    )
    recipe = Path("tests/recipes/sd3_nft.yaml")
    (folder / "recipe.yaml").write_text(recipe.read_text())
    return folder


def test_the_page_shows_the_files_of_the_run(a_run):
    assert write_page(a_run) == a_run / INDEX_FILE
    said = content(a_run)
    assert (said["name"], said["status"], said["step"]) == ("a <run>", "running", 20)
    curves = {curve["tag"]: curve["points"] for panel in said["panels"] for curve in panel["curves"]}
    assert curves.keys() == {"loss/total", "reward/ocr/mean"}  # null values are omitted
    assert curves["reward/ocr/mean"][:4] == [1, 0.33333, 2, 0.33333]
    assert said["clock"][-2:] == [20, 19]
    assert [one["step"] for one in said["samples"]] == [0, 10, 20]
    last = said["samples"][-1]["items"]
    assert [(item["prompt"], item["seed"]) for item in last] == [(p, s) for p in ("a cat", HOSTILE) for s in ("1", "2")]
    assert last[0]["rewards"] == {"ocr": 2.0, "color": None}
    assert (a_run / last[3]["file"]).is_file()
    assert [w["text"].startswith("3 files are broken") for w in said["warnings"]] == [True]
    assert said["load"] == "from diffusers import DiffusionPipeline\npipe = 1"
    assert said["recipe"]["algorithm"] == "diffusion_nft"
    assert said["recipe"]["changed"]["model.path"] == json.dumps(said["recipe"]["model"])
    assert "logging.page" not in said["recipe"]["changed"]  # equal to the default


def test_the_main_curves_of_each_kind_of_run_are_drawn(a_run):
    tags = ["sft/loss", "dpo/loss", "dpo/accuracy", "vlm/loss", "vlm/token_accuracy", "val/loss", "val/token_accuracy"]
    metrics(a_run, [30], **dict.fromkeys(tags, 0.5))
    write_page(a_run)
    drawn = [curve["tag"] for panel in content(a_run)["panels"] for curve in panel["curves"]]
    assert sorted(tag for tag in drawn if tag in tags) == sorted(tags)  # each tag is in exactly one panel


def test_an_alarm_is_shown_if_the_last_evaluation_raised_it(a_run):
    write_page(a_run)
    assert content(a_run)["alarm"] == ""
    with (a_run / "logs" / "rank_0.log").open("a") as log:
        log.write("2026-01-02T03:00:04.000Z rank 0 WARNING wfm_ds.training.validation: ALARM: step 30: ocr fell\n")
    metrics(a_run, [30], **{"val/held_out/ocr/mean": 0.4, "val/alarm": 1.0})
    write_page(a_run)
    said = content(a_run)
    assert said["alarm"] == "ALARM: step 30: ocr fell"
    assert "held-out rewards" in [panel["title"] for panel in said["panels"]]
    metrics(a_run, [40], **{"val/alarm": 0.0})
    write_page(a_run)
    assert content(a_run)["alarm"] == ""


def test_the_outcome_is_that_of_result_json(a_run):
    (a_run / "result.json").write_text(json.dumps({"status": "failed", "step": 7, "message": "no room"}))
    write_page(a_run)
    assert [content(a_run)[key] for key in ("status", "step", "message")] == ["failed", 7, "no room"]


def test_no_text_can_close_the_script_element(a_run):
    write_page(a_run)
    text = (a_run / DATA_FILE).read_text()
    assert not re.search("[<>&\u2028]", text)
    assert text.isascii()
    index = (a_run / INDEX_FILE).read_text()
    assert "innerHTML" not in index
    assert "insertAdjacentHTML" not in index
    assert "Content-Security-Policy\" content=\"default-src 'none';" in index
    assert "http://" not in index.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in index


def test_invalid_numbers_and_lines_are_omitted(a_run):
    good = json.dumps({"step": 30, "time": "2026-01-02T03:00:30+00:00", "loss/total": 0.25})
    odd = [good.replace("0.25", number) for number in ("NaN", "-Infinity", "1e999", "9" * 400, '"x"')]
    odd += ["[" * 99999, '{"a":' * 99999, good.replace("30", "NaN", 1), good.replace("2026", "9" * 9), "7", '"step"']
    odd += [good.replace("loss/total", name).replace("0.25", "NaN") for name in ("rollout/step", "val/alarm")]
    with (a_run / "metrics.jsonl").open("ab") as file:
        file.write("\n".join([*odd, good.replace("0.25", "NaN"), good.replace("0.25", "0.5")]).encode() + b"\n\xff\n")
    (a_run / "samples" / "step_20" / "samples.jsonl").write_bytes(b"\xff\n" + b"[" * 99999 + b'\n{"file": "a.png"}\n')
    (a_run / "result.json").write_text('{"status": "failed", "step": NaN}')
    (a_run / "page").mkdir()
    (a_run / "page" / "machine.json").write_text('{"devices": NaN, "torch": ' + "[" * 500 + "]" * 500 + "}")
    run(parser().parse_args([str(a_run)]))
    curves = {curve["tag"]: curve["points"] for panel in content(a_run)["panels"] for curve in panel["curves"]}
    assert curves["loss/total"][-4:] == [20, 0.5, 30, 0.5]
    assert [item["file"] for item in content(a_run)["samples"][-1]["items"]] == ["samples/step_20/a.png"]


def test_only_new_lines_are_read_and_a_resume_drops_later_steps(a_run):
    reader = run_data.RunReader(a_run)
    assert reader.read_page()["step"] == 20
    with (a_run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "time"')  # a partly written line
    assert reader.read_page()["step"] == 20
    (a_run / "metrics.jsonl").write_text("")
    metrics(a_run, range(1, 11), **{"loss/total": 2.0})
    said = reader.read_page()
    assert said["step"] == 10
    assert [curve["points"] for panel in said["panels"] for curve in panel["curves"]] == [
        [number for step in range(1, 11) for number in (step, 2.0)]
    ]
    assert [one["step"] for one in said["samples"]] == [0, 10], "those of step 20 are of what was cut"


def test_rl_steps_and_optimizer_steps_are_distinguished(a_run):
    metrics(a_run, [21], **{"rollout/step": 10.0})
    metrics(a_run, [22], **{"val/accuracy": 1.0})
    said = run_data.RunReader(a_run).read_page()
    assert said["step"] == 10
    assert [one["step"] for one in said["samples"]] == [0, 10]


def test_a_thinned_curve_keeps_its_extremes():
    values = np.random.default_rng(0).normal(size=100_000)
    values[[12_345, 67_890]] = 50.0, -60.0
    curve = BoundedCurve()
    for step, value in enumerate(values):
        curve.add(step, value)
    steps, kept = curve.flat_points()[::2], curve.flat_points()[1::2]
    assert MAX_POINTS / 4 < len(steps) <= MAX_POINTS
    assert steps == sorted(steps)
    assert dict(zip(steps, kept, strict=True))[12_345] == 50.0
    assert (max(kept), min(kept)) == (50.0, -60.0)


def test_an_even_selection_has_both_ends():
    assert pick_evenly(range(5), 12) == [0, 1, 2, 3, 4]
    chosen = pick_evenly(range(100), MAX_STEPS)
    assert (chosen[0], chosen[-1], len(set(chosen))) == (0, 99, MAX_STEPS)


@pytest.mark.slow
def test_the_page_of_a_long_run_stays_below_its_size_limit(tmp_path):
    tags = ",".join(f'"time/phase_{k}": -1.23456e-05' for k in range(45))
    line = '{"step": %d, "time": "2026-01-02T03:04:05.678+00:00", "loss/total": 0.25, %s}\n'
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(line % (step, tags if step % 40 == 0 else '"optim/lr": 1.5') for step in range(1, 100_001))
    for step in range(0, 100_001, 5000):
        samples(tmp_path, step, prompts=[f"{k}" + "<\u4e16" * 1000 for k in range(20)], seeds=(1,))
    write_page(tmp_path)
    said = content(tmp_path)
    curves = [curve for panel in said["panels"] for curve in panel["curves"]]
    assert len(curves) == run_data.MAX_CURVES
    assert all(200 < len(curve["points"]) <= 2 * MAX_POINTS for curve in curves)
    assert [one["step"] for one in said["samples"]][:: MAX_STEPS - 1] == [0, 100_000]
    assert {len(one["items"]) for one in said["samples"]} == {MAX_SAMPLES}
    assert (tmp_path / DATA_FILE).stat().st_size <= MAX_BYTES


def test_a_page_above_the_limit_loses_its_curves(a_run):
    long = {"panels": ["x" * MAX_BYTES], "samples": ["kept"]}
    assert run_page.encode_script(long) == 'wfmRun({"panels":[],"samples":["kept"]});\n'


def test_a_run_updates_its_page_atomically(a_run, monkeypatch):
    monkeypatch.setattr(run_page, "UPDATE_INTERVAL_S", 0.02)
    monkeypatch.setattr(run_page, "MAX_TIME_SHARE", 1.0)
    seen = set()
    with update_page_live(a_run, devices="2 x CPU"):
        ends = time.monotonic() + 20
        while len(seen) < 3 and time.monotonic() < ends:
            if (a_run / DATA_FILE).exists():
                seen.add(content(a_run)["step"])  # every read gives a complete file
                metrics(a_run, [20 + len(seen)], **{"loss/total": 1.0})
    assert len(seen) >= 3
    assert content(a_run)["machine"]["devices"] == "2 x CPU"
    assert "torch" in content(a_run)["machine"]
    assert sorted(path.name for path in (a_run / "page").iterdir()) == ["data.js", "machine.json"]


def test_a_page_that_cannot_be_written_warns_once(a_run, monkeypatch, caplog):
    monkeypatch.setattr(run_page, "UPDATE_INTERVAL_S", 0.02)
    monkeypatch.setattr(run_page, "MAX_TIME_SHARE", 1.0)
    (a_run / "page").write_text("a file where the folder should be")
    with update_page_live(a_run, devices="CPU"):
        for step in range(21, 26):
            metrics(a_run, [step], **{"loss/total": 1.0})
            time.sleep(0.05)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the run continues" in caplog.text


def test_an_index_html_of_the_user_is_kept(a_run, caplog):
    (a_run / INDEX_FILE).write_text("<p>mine</p>")
    assert not run_page.try_write_page(a_run)
    assert "is not the page of a run" in caplog.text
    with pytest.raises(UserError, match="move it"):
        run(parser().parse_args([str(a_run)]))
    (a_run / layout.RECORD_FILE).write_text(layout.format_record(layout.RUN_NAMES))
    run_folder.clear_run(a_run)
    assert sorted(path.name for path in a_run.iterdir()) == [layout.RECORD_FILE, INDEX_FILE]


def test_the_command_writes_the_page_and_overwriting_removes_it(a_run, tmp_path, capsys):
    assert COMMANDS["page"][0] == "wfm_ds.cli.page"
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        run(parser().parse_args([str(tmp_path)]))
    assert list(tmp_path.iterdir()) == [a_run]
    (a_run / layout.RECORD_FILE).write_text(
        layout.format_record((*layout.RUN_FILES, "samples", "logs"))
    )  # the record of an older version
    run(parser().parse_args([str(a_run)]))
    assert capsys.readouterr().out == f"{a_run / INDEX_FILE}\n"
    assert layout.list_unrecorded_files(a_run) == ()
    run_folder.clear_run(a_run)
    assert list(a_run.iterdir()) == []


def test_the_script_of_the_page_is_valid(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not on this machine")
    text = run_page.TEMPLATE.read_text()
    assert PAGE_MARKER in text[:256]
    (tmp_path / "page.js").write_text(re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[0])
    subprocess.run([node, "--check", tmp_path / "page.js"], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on this machine")
def test_a_browser_shows_it_from_the_disk_without_a_server(a_run):
    write_page(a_run)
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    url = (a_run / INDEX_FILE).as_uri()
    shown = subprocess.run([CHROMIUM, *words, url], capture_output=True, timeout=90, check=True, env={**os.environ})
    page = shown.stdout.decode()
    assert "<title>a &lt;run&gt;</title>" in page
    assert page.count("<path") >= 2, "curves are drawn"
    assert 'src="samples/step_20/0000.png"' in page
    assert "&lt;/script&gt;&lt;img src=x onerror=" in page, "a hostile prompt is text"
    assert "<img src=x" not in page
    assert "differs from the defaults" in page
