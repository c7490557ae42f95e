"""The computations of the video study. Its runs are ordinary runs, tested elsewhere."""

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.learning.video import COLUMNS, OF_THE_STUDY, VARIANTS, first_alarm_step, metric_rows, write_comparison
from wfm_ds.demos.shapes import STARTS, PromptedVideo
from wfm_ds.demos.shapes_data import HELD_OUT_PAIRS, TRAINED_PAIRS
from wfm_ds.monitoring.samples import GeneratedSample, write_samples
from wfm_ds.recipe import file as recipe_file
from wfm_reward.moving_demo import MovingClip, draw_clip, list_clips, render_frames


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_valid_recipe(name, tmp_path):
    variant = VARIANTS[name]
    recipe = recipe_file.load_recipe(variant.recipe, [f"run.output_dir={tmp_path}", *variant.overrides])
    assert recipe.rl.rollout.prompts_per_step == len(TRAINED_PAIRS)
    assert set(OF_THE_STUDY) <= set(VARIANTS)


def test_the_first_alarm_counts():
    found = [(Path(f"samples/step_{8 * k}"), metrics) for k, metrics in enumerate([{}, {"val/alarm": 0.0}])]
    assert first_alarm_step(found) is None
    raised = [*found, (Path("samples/step_16"), {"val/alarm": 1.0}), (Path("samples/step_24"), {"val/alarm": 1.0})]
    assert first_alarm_step(raised) == 16


def test_trained_and_held_out_pairs_are_measured_separately(tmp_path):
    samples = []
    for k, (shape, direction) in enumerate(TRAINED_PAIRS + HELD_OUT_PAIRS):
        clip = MovingClip(shape, direction, 0)
        shown = clip if k else MovingClip(shape, "down", 0)  # the first video shows a wrong direction
        scores = {name: 2.0 * k for name in COLUMNS.values()}
        rewards = {name: scores.pop(name) for name in ("moving", "nearest_clip")}
        frames = render_frames(draw_clip(shown))
        samples.append(
            GeneratedSample(
                prompt=clip.prompt, prompt_id=f"{k}", seed=0, pixels=frames, fps=8.0, rewards=rewards, parts=scores
            )
        )
    write_samples(tmp_path, samples)
    trained, held_out = metric_rows("SFT", 3, tmp_path)
    assert (trained["pairs"], held_out["pairs"]) == ("trained", "held-out")
    assert {trained[column] for column in COLUMNS} == {8.0}
    assert {held_out[column] for column in COLUMNS} == {20.0}
    assert (trained[STARTS], held_out[STARTS]) == (pytest.approx(8 / 9), 1.0)


def test_models_are_shown_side_by_side(tmp_path):
    videos = [PromptedVideo(clip.prompt, render_frames(draw_clip(clip))) for clip in list_clips()]
    write_comparison(tmp_path / "one.png", {"SFT": videos})
    write_comparison(tmp_path / "two.png", {"SFT": videos, "RL": videos})
    one, two = (Image.open(tmp_path / name).size for name in ("one.png", "two.png"))
    assert two == (2 * one[0], one[1])
