"""Trackers: their failures and delays never stop a run. The installed libraries are tested offline."""

import contextlib
import logging
import os
import re
import sqlite3
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from wfm_ds.monitoring import tracking
from wfm_ds.monitoring.monitor import Monitor
from wfm_ds.monitoring.samples import GeneratedSample
from wfm_ds.monitoring.trackers import TRACKERS, TensorBoard, chart_layout, require_trackers
from wfm_ds.monitoring.tracking import RUN_ID_FILES, RunInfo, TrackerError, TrackerThread
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import TrackerName

RECIPE = {
    "run": {"output_dir": "out", "steps": 3},
    "model": {"path": "tiny:sd3"},
    "sampling": {"height": 32, "width": 32},
    "data": {"kind": "paired", "path": "p"},
    "algorithm": {"name": "sft"},
}


class Remembering:
    """A tracker that stores all calls, raises an error at one step, and can be blocked with `gate`."""

    name = "remembering"

    def __init__(self, *, refuses="", breaks_at=None, gate=None):
        self.refuses, self.breaks_at, self.gate, self.heard = refuses, breaks_at, gate, []

    def start(self, run):
        if self.refuses:
            raise RuntimeError(self.refuses)

    def log_scalars(self, step, values):
        if self.gate:
            self.gate.wait(20)
        if step == self.breaks_at:
            raise OSError("no route")
        self.heard.append((step, dict(values)))

    def log_samples(self, step, tag, samples):
        self.heard.append((step, tag, len(samples)))

    def finish(self, status, summary):
        self.heard.append((status, dict(summary)))


def facts(folder, **changes):
    return RunInfo(output_dir=folder, name="mine", project="tests", recipe={"run.steps": 3}, **changes)


def monitor(folder, *trackers, **changes):
    subscribers = [TrackerThread(tracker, facts(folder, **changes)) for tracker in trackers]
    return contextlib.closing(Monitor(folder, is_main=True, console=False, total_steps=9, trackers=subscribers))


def sample(seed, frames=None):
    shape = (16, 16, 3) if frames is None else (frames, 16, 16, 3)
    media = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    keys = {"fps": None if frames is None else 4.0, "rewards": {"ocr": 0.5}}
    return GeneratedSample(prompt="a cat", prompt_id="p", seed=seed, pixels=media, **keys)


def test_all_trackers_get_all_data_and_the_outcome(tmp_path):
    one, other = Remembering(), Remembering()
    with monitor(tmp_path, one, other) as watch:
        watch.log_scalars(1, {"loss": 1.0, "odd": float("nan")})
        watch.log_samples(1, "samples", [sample(0), sample(1)])
        watch.set_outcome("finished", {"loss": 1.0, "odd": float("inf")})
    assert one.heard == other.heard
    assert one.heard == [(1, {"loss": 1.0}), (1, "samples", 2), ("finished", {"loss": 1.0})]
    with monitor(tmp_path, one):
        pass
    assert one.heard[-1] == ("failed", {})  # the default outcome if set_outcome was not called


def test_a_tracker_that_fails_is_dropped_with_one_warning(tmp_path, caplog):
    broken, whole = Remembering(breaks_at=2), Remembering()
    with caplog.at_level(logging.WARNING), monitor(tmp_path, broken, whole) as watch:
        for step in range(1, 6):
            watch.log_scalars(step, {"loss": 0.0})
    assert [heard[0] for heard in broken.heard] == [1]
    assert [heard[0] for heard in whole.heard] == [1, 2, 3, 4, 5, "failed"]
    assert [r.getMessage() for r in caplog.records] == ["remembering is dropped (OSError: no route); the run continues"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_slow_tracker_loses_samples_but_no_metrics(tmp_path, caplog):
    slow = Remembering(gate=threading.Event())
    with caplog.at_level(logging.WARNING), monitor(tmp_path, slow) as watch:
        for step in range(20):
            watch.log_scalars(step, {"loss": 0.0})
            watch.log_samples(step, "samples", [sample(0)])
        slow.gate.set()
    shown = [heard for heard in slow.heard if heard[1] == "samples"]
    assert len(shown) == tracking.MAX_QUEUED_SAMPLES
    assert len(slow.heard) == 20 + len(shown) + 1
    assert len(caplog.records) == 1
    assert "remembering is too slow" in caplog.text


def test_a_hanging_tracker_does_not_block_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "FINISH_S", 0.1)
    stuck = Remembering(gate=threading.Event())
    with monitor(tmp_path, stuck) as watch:
        watch.log_scalars(1, {"loss": 0.0})
    stuck.gate.set()
    assert "did not finish within" in caplog.text


def test_a_tracker_that_cannot_start_is_a_one_line_error(tmp_path):
    with pytest.raises(TrackerError, match=r"logging.trackers: remembering cannot start \(no key\): fix"):
        monitor(tmp_path, Remembering(refuses="no\nkey"))


def test_a_missing_tracker_package_is_a_one_line_error(monkeypatch):
    monkeypatch.setattr("wfm_ds.monitoring.trackers.find_spec", lambda name: None)
    recipe = Recipe.model_validate({**RECIPE, "logging": {"trackers": ["wandb"]}})
    with pytest.raises(TrackerError, match=r"logging.trackers: wandb is not installed: pip install 'wfm_ds\[wandb\]'"):
        require_trackers(recipe)
    require_trackers(Recipe.model_validate({**RECIPE, "logging": {"tensorboard": False}}))
    assert TRACKERS.keys() == set(get_args(TrackerName))


def test_options_without_their_tracker_are_refused():
    with pytest.raises(ValueError, match="wandb needs the tracker wandb: add it to trackers"):
        Recipe.model_validate({**RECIPE, "logging": {"wandb": {"entity": "me"}}})
    with pytest.raises(ValueError, match="mlflow takes only tracking_uri, not uri"):
        Recipe.model_validate({**RECIPE, "logging": {"trackers": ["mlflow"], "mlflow": {"uri": "x"}}})


def test_tensorboard_has_a_layout_and_omits_scalars_that_are_always_0(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    with monitor(tmp_path, TensorBoard()) as watch:
        for step in range(1, 5):
            watch.log_scalars(step, {"loss": 1.0, "data/bad/decode": 0.0, "optim/skipped_steps": float(step == 3)})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "optim/skipped_steps"}
    points = [(point.step, point.value) for point in events.Scalars("optim/skipped_steps")]
    assert points == [(2, 0.0), (3, 1.0), (4, 0.0)]
    written = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert [page.title for page in Layout.FromString(written).category] == ["1 outcome", "4 optimizer", "5 time"]


SHOWN = {  # for each chart title, tags that match the chart in TensorBoard
    "evaluation": ["val/reward/ocr/mean"],
    "reward while training": ["reward/ocr/mean"],
    "loss": ["loss/total", "sft/loss", "val/loss", "dpo/loss", "vlm/loss"],
    "held-out rewards": ["val/held_out/ocr/mean"],
    "change since the start": ["val/held_out/ocr/change"],
    "ratio": ["policy/ratio_mean"],
    "clipped": ["policy/clip_fraction_high"],
    "KL": ["kl/ref"],
    "gradient norm": ["optim/grad_norm"],
    "learning rate": ["optim/lr"],
    "seconds": ["time/step"],
    "throughput": ["perf/samples_per_second", "perf/tflops_per_gpu"],
}


def test_each_chart_of_the_layout_has_its_tags_and_no_others():
    found = chart_layout({"reward.functions": [1], "validation.held_out_rewards": ["ocr"]})
    tags = [*(tag for shown in SHOWN.values() for tag in shown), "sft/loss_bucket0", "val/reward/ocr/std"]
    drawn = {
        title: [tag for tag in tags if any(re.match(pattern, tag) for pattern in patterns)]
        for page in found.values()
        for title, (_, patterns) in page.items()
    }
    assert drawn == SHOWN
    without_rewards = chart_layout({"validation.held_out_rewards": []})
    assert sum(map(len, without_rewards.values())) == 5


# ---- the real libraries, offline

USE = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_tracking import monitor, sample
from wfm_ds.monitoring.trackers import TRACKERS
folder, name = Path(sys.argv[1]), sys.argv[2]
for resumed_at, steps in (RUNS):
    with monitor(folder, TRACKERS[name](), resumed_at=resumed_at, options=OPTIONS) as watch:
        for step in steps:
            watch.log_scalars(step, {"loss/total": step / 4, "val/reward/ocr/mean": 0.5})
        watch.log_samples(steps[-1], "samples", [sample(0), sample(1)])
        if name == "swanlab":
            watch.log_samples(steps[-1], "clips", [sample(2, frames=3)])
        watch.set_outcome("finished", {"loss/total": 1.0})
"""


def used(name, folder, resumes="(None, (1, 2, 3)), (2, (3, 4))", options=None):
    """Run a tracker in a subprocess, with a resume after step 2. Check that the id of the run is copied to a storage.

    Return the folder of the trackers.
    """
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'wfm_ds[{name}]'")
    dropped = ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_DIR", "SWANLAB_MODE", "SWANLAB_API_KEY")
    quiet = {key: value for key, value in os.environ.items() if key not in dropped} | {"HOME": str(folder / "home")}
    code = USE.replace("RUNS", resumes).replace("OPTIONS", repr(options or {}))
    words = [sys.executable, "-c", code, str(folder / "run"), name, str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=quiet)
    assert done.returncode == 0, done.stderr
    assert "is dropped" not in done.stderr, done.stderr
    assert done.stdout == ""
    assert [path for path in RUN_ID_FILES if name in path and (folder / "run" / path).is_file()]
    return folder / "run" / "trackers"


@pytest.mark.slow
def test_wandb_stores_an_offline_run(tmp_path):
    found = sorted((used("wandb", tmp_path) / "wandb").glob("offline-run-*"))
    ids = {folder.name.split("-")[3] for folder in found}  # offline-run-TIME-ID
    assert len(ids) == 1  # the resumed run has the same id
    assert sum(len(list(folder.rglob("*.png"))) for folder in found) == 4


def query(database, text):
    with sqlite3.connect(database) as connection:
        return connection.execute(text).fetchall()


@pytest.mark.slow
def test_mlflow_stores_a_database_and_starts_a_new_run_without_it(tmp_path):
    trackers = used("mlflow", tmp_path)
    database, first_id = trackers / "mlflow.db", (trackers / "mlflow_run").read_text()
    steps = query(database, "select step from metrics where key = 'loss/total'")
    assert {step for (step,) in steps} == {1, 2, 3, 4}
    assert query(database, "select status from runs") == [("FINISHED",)]
    assert len(list((trackers / "mlflow").rglob("step_*.png"))) == 2
    database.unlink()  # as on another machine, to which only the id is copied
    used("mlflow", tmp_path, resumes="(2, (3, 4)),")
    assert (trackers / "mlflow_run").read_text() != first_id


@pytest.mark.slow
def test_mlflow_continues_the_run_on_the_server_of_the_recipe(tmp_path):
    used("mlflow", tmp_path, options={"tracking_uri": f"sqlite:///{tmp_path / 'server.db'}"})
    assert query(tmp_path / "server.db", "select count(*) from runs") == [(1,)]


@pytest.mark.slow
def test_trackio_stores_a_database(tmp_path):
    [path] = (used("trackio", tmp_path) / "trackio").glob("*.db")
    rows = query(path, "select distinct run_name, step from metrics")
    assert len({name for name, _ in rows}) == 1
    assert {1, 2, 3, 4} <= {step for _, step in rows}


@pytest.mark.slow
def test_swanlab_stores_an_offline_run(tmp_path):
    trackers = used("swanlab", tmp_path)
    folders = [path.parent for path in (trackers / "swanlab").rglob("media") if path.is_dir()]
    assert len(folders) == 2
    assert [len(list(folder.rglob("*.png"))) for folder in folders] == [3, 3]  # a clip has its first frame
    assert [len(list(folder.rglob("*.gif"))) for folder in folders] == [1, 1]
    assert all(b"loss/total" in next(folder.glob("*.swanlab")).read_bytes() for folder in folders)
    run_id = (trackers / "swanlab_id").read_text()
    assert all(run_id in folder.name for folder in folders)  # the resumed run has the same id
