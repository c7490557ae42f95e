import contextlib
import datetime
import io
import json
import logging
import sys
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from each_case import check_each
from monitoring.test_samples import sample
from wfm_ds.monitoring.monitor import (
    LINE_INTERVAL_S,
    ConsoleProgress,
    LineProgress,
    Monitor,
    Pace,
    format_duration,
    truncate_metrics,
)
from wfm_ds.monitoring.samples import GeneratedSample, sample_animation, sample_grid, sample_table
from wfm_ds.monitoring.trackers import TensorBoard
from wfm_ds.monitoring.tracking import RunInfo, TrackerThread
from wfm_ds.training.loop import speed_summary


def monitor(folder, **changes):
    arguments = {"is_main": True, "console": False, "total_steps": 100}
    tensorboard, resumed_at = changes.pop("tensorboard", False), changes.pop("resumed_at", None)
    if tensorboard and changes.get("is_main", True):
        facts = RunInfo(output_dir=folder, name="run", project="tests", resumed_at=resumed_at)
        changes["trackers"] = [TrackerThread(TensorBoard(), facts)]
    return contextlib.closing(Monitor(folder, **(arguments | changes)))


def lines(folder):
    return [
        json.loads(line, parse_constant=pytest.fail) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def events(folder):
    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0, "images": 0, "scalars": 0})
    reader.Reload()
    return reader


def test_scalars_are_written_at_once_and_in_tensorboard_after_closing(tmp_path):
    with monitor(tmp_path, tensorboard=True) as watch:
        watch.log_scalars(1, {"loss/total": 0.5, "optim/lr": np.float32(1e-3)})
        (line,) = lines(tmp_path)
        watch.log_scalars(2, {"loss/total": 0.25})
    assert (line["step"], line["loss/total"], line["optim/lr"]) == (1, 0.5, float(np.float32(1e-3)))
    written = datetime.datetime.fromisoformat(line["time"])
    assert abs((datetime.datetime.now(datetime.UTC) - written).total_seconds()) < 600
    points = events(tmp_path).Scalars("loss/total")
    assert [(point.step, point.value) for point in points] == [(1, 0.5), (2, 0.25)]
    assert lines(tmp_path)[1].keys() == {"step", "time", "loss/total"}


def test_continued_run_shows_each_step_once(tmp_path):
    with monitor(tmp_path, tensorboard=True) as watch:
        watch.log_scalars(1, {"loss/total": 1.0})
        watch.log_scalars(2, {"loss/total": 2.0})
        kept = watch.sync_metrics()
        watch.log_scalars(3, {"loss/total": 3.0})
        watch.log_scalars(4, {"loss/total": 4.0})
    truncate_metrics(tmp_path / "metrics.jsonl", kept)
    with monitor(tmp_path, tensorboard=True, resumed_at=2) as watch:
        assert watch.sync_metrics() == kept
        watch.log_scalars(3, {"loss/total": 30.0})
    assert [line["loss/total"] for line in lines(tmp_path)] == [1.0, 2.0, 30.0]
    assert [(p.step, p.value) for p in events(tmp_path).Scalars("loss/total")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@check_each(
    ("text", "num_bytes", "left"),
    [("{}\n{}\n", 3, "{}\n"), ("{}\n{}\n", 100, "{}\n{}\n"), ("{}\n{", 100, "{}\n"), ("{}\n", 0, ""), (None, 0, "")],
)
def test_a_partial_last_line_of_the_metrics_is_removed(tmp_path, text, num_bytes, left):
    path = tmp_path / "metrics.jsonl"
    if text is not None:
        path.write_text(text)
    truncate_metrics(path, num_bytes)
    assert path.read_text() == left


def test_a_non_finite_value_is_null_without_a_point_and_warns_once(tmp_path, caplog):
    with monitor(tmp_path, tensorboard=True) as watch:
        for step in (1, 2):
            watch.log_scalars(step, {"loss/total": float("nan"), "optim/grad_norm": float("inf"), "optim/lr": 1.0})
        watch.log_scalars(3, {"loss/total": 0.5})
    assert [line["loss/total"] for line in lines(tmp_path)] == [None, None, 0.5]
    assert lines(tmp_path)[0]["optim/grad_norm"] is None
    written = events(tmp_path)
    assert [point.step for point in written.Scalars("loss/total")] == [3]
    assert set(written.Tags()["scalars"]) == {"loss/total", "optim/lr"}
    assert [record.args[:2] for record in caplog.records] == [(1, "loss/total"), (1, "optim/grad_norm")]


def test_tag_that_would_hide_a_key_of_the_line_is_refused(tmp_path):
    with monitor(tmp_path) as watch, pytest.raises(ValueError, match="invalid metric names"):
        watch.log_scalars(1, {"time": 2.0})
    assert lines(tmp_path) == []


def test_other_ranks_do_nothing(tmp_path):
    threads = threading.active_count()
    with monitor(tmp_path / "out", is_main=False, tensorboard=True, console=True) as watch:
        watch.log_scalars(1, {"time": 1.0, "loss/total": float("nan")})
        watch.log_samples(1, "samples", [sample(1)])
        watch.update_progress(1, samples=8)
        watch.log_message("hello")
    watch.close()
    assert not (tmp_path / "out").exists()
    assert threading.active_count() == threads


def test_tensorboard_shows_the_samples_with_prompts_seeds_and_rewards(tmp_path):
    samples = [sample(seed, rewards={"digits": seed / 10}) for seed in range(3)]
    with monitor(tmp_path, tensorboard=True) as watch:
        watch.log_samples(7, "samples", samples)
    written = events(tmp_path)
    (image,) = written.Images("samples")
    assert image.step == 7
    path = tmp_path / "grid.png"
    path.write_bytes(image.encoded_image_string)
    assert np.array_equal(np.asarray(Image.open(path)), sample_grid(samples))
    (text,) = written.Tensors("samples/text_summary")
    assert text.tensor_proto.string_val[0].decode() == sample_table(samples)


def test_tensorboard_plays_videos_and_shows_their_first_frames(tmp_path):
    rng = np.random.default_rng(0)
    videos = rng.integers(0, 256, (2, 4, 64, 64, 3), np.uint8)
    samples = [GeneratedSample(prompt="waves", prompt_id="p", seed=0, pixels=video, fps=5.0) for video in videos]
    with monitor(tmp_path, tensorboard=True) as watch:
        watch.log_samples(3, "samples", samples)
    written = events(tmp_path)
    assert set(written.Tags()["images"]) == {"samples", "samples/video"}
    (still,), (moving,) = written.Images("samples"), written.Images("samples/video")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(still.encoded_image_string))), sample_grid(samples))
    video, _ = sample_animation(samples)
    with Image.open(io.BytesIO(moving.encoded_image_string)) as gif:
        assert (gif.format, gif.n_frames, gif.info["duration"]) == ("GIF", 4, 200)
        assert (gif.height, gif.width) == video.shape[1:3] == (moving.height, moving.width)
    assert (moving.step, still.step) == (3, 3)


def test_without_a_terminal_progress_is_logged_at_intervals(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with monitor(tmp_path, console=True, unit="videos") as watch:  # under pytest, stderr is not a terminal
        watch.update_progress(0, samples=0, note="validating")
        for step in range(1, 60):
            watch.update_progress(step, samples=8, note=f"loss {step}")
        watch.log_message("saved step 59")
        watch.close()
    first, message, last = [record.getMessage() for record in caplog.records]
    assert first == "step 0/100, validating"
    assert message == "saved step 59"
    assert last.startswith("step 59/100, ")
    assert last.endswith(" videos/s, loss 59")


# ---- progress


def test_pace_gives_speed_and_remaining_time_without_the_slow_start():
    pace = Pace(100, "images")
    pace.update(50.0, 0, 0)
    assert (pace.speed(), pace.format_text(0, "warming up")) == (None, "step 0/100, warming up")
    pace.update(60.0, 5, 200)
    assert pace.speed() == (0.5, 20.0)
    assert pace.format_text(5, "loss 0.1") == "step 5/100, 3:10 left, 20 images/s, loss 0.1"
    for step in range(6, 101):  # the previous step compiled for an hour
        pace.update(3600.0 + step, step, 8)
    assert pace.speed() == (1.0, 8.0)
    stuck = Pace(10, "images")
    for now_s in (1.0, 1.0, 2.0):
        stuck.update(now_s, 3, 4)
    assert (stuck.speed(), stuck.format_text(3)) == (None, "step 3/10")


def test_the_speed_of_a_gpu_is_shown_on_a_gpu():
    metrics = {"perf/tflops_per_gpu": 312.0, "perf/peak_memory_gib": 61.2}
    assert speed_summary(torch.device("cuda", 0), metrics) == "312 TFLOP/s per GPU, 61.2 GiB"
    assert speed_summary(torch.device("cpu"), metrics) == "61.2 GiB"


@check_each(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")])
def test_clock(seconds, text):
    assert format_duration(seconds) == text


def test_log_lines_are_the_first_the_last_and_one_per_interval(caplog):
    caplog.set_level(logging.INFO)
    for total_steps, num_steps in ((100, 40), (2, 2)):
        progress = LineProgress(total_steps)
        for step in range(1, num_steps + 1):  # one step a second
            progress.update(float(step), step, f"step {step}")
        progress.close()
    shown = [f"step {1 + k * int(LINE_INTERVAL_S)}" for k in range(4)] + ["step 40", "step 1", "step 2"]
    assert [record.getMessage() for record in caplog.records] == shown


def test_terminal_has_one_live_line_and_prints_the_rest_above_it(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = ConsoleProgress(Console(file=screen, force_terminal=True, width=100), total_steps=4)
    progress.update(0.0, 1, "step 1/4, reward [0.5]")
    sys.stderr.write("a warning\n")
    progress.update(1.0, 4, "step 4/4, done")
    progress.close()
    text = screen.getvalue()
    assert "a warning" in text  # printed above the progress bar
    assert text.rstrip().removesuffix("\x1b[?25h").rstrip().endswith("step 4/4, done")
    assert "\x1b[?25h" in text  # the cursor is visible again
