"""The computations of the learning study. Its runs are ordinary runs, tested elsewhere."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.learning.__main__ import relative_cost, select_finished, variant_row
from benchmarks.learning.curves import Evaluation, find_crossing, read_evaluations
from benchmarks.learning.pictures import plot_curves
from benchmarks.learning.runs import REVISION, StudyRun
from benchmarks.learning.variants import BASELINES, VARIANTS
from wfm_ds.demos.few_steps import step_cost
from wfm_ds.errors import UserError
from wfm_ds.recipe import file as recipe_file

ROOT = Path(__file__).parent.parent.parent


def make_curve(forwards, rewards):
    return [
        Evaluation(step=k, forwards=f, seconds=float(k), reward=r, unseen=r - 0.1, spread=0.15)
        for k, (f, r) in enumerate(zip(forwards, rewards, strict=True))
    ]


CROSSINGS = [  # x and y of evaluations, the value to cross, and where
    ([0, 10, 20], [0.1, 0.5, 0.9], 0.7, 15),  # on the line between two evaluations
    ([0, 10, 20], [0.1, 0.5, 0.9], 0.5, 10),
    ([0, 10], [0.6, 0.7], 0.5, 0),
    ([0, 10], [0.1, 0.4], 0.5, None),
    ([0, 10, 20, 30], [0.1, 0.9, 0.5, 0.9], 0.8, 20 + 10 * 0.1 / 0.2),  # a lucky one: monotone curve at (.9 + .5) / 2
    ([0, 10, 20], [0.1, 0.9, 0.5], 0.8, None),
    ([0, 10, 20, 30], [0.1, 0.5, 0.5, 0.9], 0.5, 10),  # a flat part is crossed at its start
]


def test_a_crossing_is_on_the_monotone_curve():
    for x, y, value, where in CROSSINGS:
        assert find_crossing(x, y, value) == (where if where is None else pytest.approx(where)), (y, value)


def test_a_backward_pass_costs_two_forwards_and_evaluations_nothing():
    line = {"perf/forward_samples_policy": 10.0, "perf/forward_samples_old": 5.0, "perf/forward_samples_rollout": 40.0}
    assert step_cost(line | {"perf/forward_samples_validation": 99.0, "perf/forwards_policy": 7.0}) == 3 * 10 + 5 + 40
    assert step_cost(line | {"perf/forward_samples_fake_policy": 2.0}) == 3 * (10 + 2) + 5 + 40
    assert step_cost({"loss/total": 1.0}) == 0


def write_run(folder, *, updates):
    """Write the files of a run with two RL steps, and evaluations before and after them."""
    folder.mkdir()
    overrides = [f"run.output_dir={folder}", f"algorithm.updates_per_rollout={updates}"]
    (folder / "recipe.yaml").write_text(
        recipe_file.dump_recipe(recipe_file.load_recipe(ROOT / "recipes/digits/flow_grpo.yaml", overrides))
    )
    work = {
        "perf/forward_samples_rollout": 80.0,
        "perf/forward_samples_policy": 10.0,
        "time/step": 3.0,
        "time/validation": 1.0,
    }
    judged = {"val/reward/digits/mean": 0.5, "val/reward/digits/second_judge/mean": 0.4}
    lines = [{"step": 0} | judged, {"step": 1} | work]
    lines += [{"step": k, "loss/total": 1.0} for k in range(2, updates + 1)]
    lines += [{"step": 2 * updates} | judged, {"step": updates + 1} | work]  # the evaluation is logged before the step
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (0, 2):
        samples = folder / "samples" / f"step_{step}"
        samples.mkdir(parents=True)
        entries = []
        for k, value in enumerate((0, 51 * (step + 1))):
            Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(samples / f"{k}.png")
            entries.append({"file": f"{k}.png", "prompt": "one"})
        (samples / "samples.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


@pytest.mark.parametrize("updates", [1, 4])
def test_an_evaluation_has_the_cost_of_the_run_so_far(tmp_path, updates):
    start, end = read_evaluations(write_run(tmp_path / "run", updates=updates))
    assert (start.step, start.forwards, start.seconds) == (0, 0, 0)
    assert (end.step, end.forwards, end.seconds) == (2, 2 * (80 + 30), 2 * 2.0)
    assert (end.reward, end.unseen) == (0.5, 0.4)
    assert (start.spread, end.spread) == (pytest.approx(0.1), pytest.approx(0.3))


def test_a_run_that_counted_no_samples_is_refused(tmp_path):
    run = write_run(tmp_path / "run", updates=1)
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace("perf/forward_samples_", "perf/forwards_"))
    with pytest.raises(UserError, match=r"has no perf/forward_samples_"):
        read_evaluations(run)


def test_a_baseline_below_the_target_bounds_the_ratio():
    theirs = [make_curve([0, 100], [0.5, 1.0]), make_curve([0, 100], [0.5, 0.6])]
    assert relative_cost([20.0, 30.0], theirs[:1], 0.9) == f"{25 / 80:.2f}"
    assert relative_cost([20.0, 30.0], theirs, 0.9) == f"at most {25 / 90:.2f}"
    assert relative_cost([20.0, None], theirs, 0.9) == ""


def test_a_row_and_a_plot_of_two_variants(tmp_path):
    slow, fast = [make_curve([0, 50e3, 100e3], [0.5, 0.8, 1.0])] * 2, [make_curve([0, 10e3, 20e3], [0.5, 0.8, 1.0])] * 2
    curves = {(BASELINES[0], 0): slow, ("nft", 0): fast, ("nft_fp8", 0): fast}
    line = variant_row(curves, [make_curve([0, 20e3], [0.5, 0.45])], "nft", 0)
    assert line["thousand forwards to reward 0.93"] == "16.5, 16.5"
    assert line["forwards relative to DiffusionNFT, published settings"] == "0.20"
    assert (line["end: reward"], line["end: unseen judge"]) == ("1.000, 1.000", "0.900, 0.900")
    assert line["rewards shuffled, end: reward"] == "0.450"
    plot_curves(curves, tmp_path / "curves.png")
    assert Image.open(tmp_path / "curves.png").width > 500


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_valid_recipe(name, tmp_path):
    variant = VARIANTS[name]
    recipe = recipe_file.load_recipe(variant.recipe, [f"run.output_dir={tmp_path}", *variant.overrides])
    assert recipe.logging.num_samples == 200  # the std needs all validation samples


def test_published_settings_follow_no_default():
    """Baselines do not change with defaults of the project."""
    for name in BASELINES:
        text = VARIANTS[name].recipe.read_text()
        for key in ("zero_std", "kl_beta", "timestep_fraction", "updates_per_rollout", "solver", "lr"):
            assert f"{key}:" in text, f"{name}: {key}"


def test_a_report_omits_missing_runs(tmp_path):
    runs = {
        (name, 0): [StudyRun(f"{name}_0_{seed}", VARIANTS[name], 0, seed) for seed in (0, 1)]
        for name in ("nft", "ddrl")
    }
    (tmp_path / "nft_0_1").mkdir()
    (tmp_path / "nft_0_1" / REVISION).write_text("abc\n")
    assert select_finished(tmp_path, runs) == {("nft", 0): [runs["nft", 0][1]]}
