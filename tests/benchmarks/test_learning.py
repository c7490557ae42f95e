"""The study's own arithmetic; its runs are ordinary ones, tested elsewhere."""

import json

import numpy as np

from benchmarks.learning import curve, plot, row, smoothed


def a_run(folder, rewards, before, after):
    folder.mkdir()
    lines = [{"step": 0, "val/reward/digits/mean": before}]
    lines += [
        {"step": i + 1, "reward/digits/mean": value, "rollout/samples": 80.0, "perf/seconds": 1.0}
        for i, value in enumerate(rewards)
    ]
    lines.append({"step": len(rewards), "val/reward/digits/mean": after})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_curve_is_smoothed_over_the_last_values_only():
    assert smoothed([1.0, 3.0]).tolist() == [1.0, 2.0]
    values = [0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 5.0]
    np.testing.assert_allclose(smoothed(values), [0, 0, 0, 0, 0, 1, 2])


def test_a_row_reads_evaluations_and_gains_from_the_runs(tmp_path):
    runs = [a_run(tmp_path / "0", [0.5, 0.75], 0.5, 0.75), a_run(tmp_path / "1", [0.25, 0.5], 0.25, 0.75)]
    assert curve(runs[0]) == [0.5, 0.75]
    line = row("nft", runs, [a_run(tmp_path / "control", [0.5, 0.5], 0.5, 0.375)])
    assert line["RL steps"] == 2
    assert (line["before"], line["after"]) == ("0.500, 0.250", "0.750, 0.750")
    assert line["mean gain"] == 0.375
    assert (line["after, rewards shuffled"], line["mean gain, rewards shuffled"]) == ("0.375", -0.125)
    plot({"nft": [curve(run) for run in runs]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
