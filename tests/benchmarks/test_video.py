"""The computations of the video study. Its runs are ordinary ones, tested elsewhere."""

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.learning.video import OF_THE_STUDY, VARIANTS, first_alarm_step, write_comparison
from wfm_ds.demos.shapes import PromptedVideo
from wfm_ds.recipe import file as recipe_file
from wfm_reward.moving_demo import draw_clip, list_clips, render_frames


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_recipe(name, tmp_path):
    variant = VARIANTS[name]
    recipe = recipe_file.load_recipe(variant.recipe, [f"run.output_dir={tmp_path}", *variant.overrides])
    assert recipe.rl.rollout.prompts_per_step == 12
    assert set(OF_THE_STUDY) <= set(VARIANTS)


def test_the_first_alarm_counts():
    found = [(Path(f"samples/step_{8 * k}"), metrics) for k, metrics in enumerate([{}, {"val/alarm": 0.0}])]
    assert first_alarm_step(found) is None
    raised = [*found, (Path("samples/step_16"), {"val/alarm": 1.0}), (Path("samples/step_24"), {"val/alarm": 1.0})]
    assert first_alarm_step(raised) == 16


def test_models_are_shown_side_by_side(tmp_path):
    videos = [PromptedVideo(clip.prompt, render_frames(draw_clip(clip))) for clip in list_clips()]
    write_comparison(tmp_path / "one.png", {"SFT": videos})
    write_comparison(tmp_path / "two.png", {"SFT": videos, "RL": videos})
    one, two = (Image.open(tmp_path / name).size for name in ("one.png", "two.png"))
    assert two == (2 * one[0], one[1])
