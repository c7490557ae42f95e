"""The reward and the measures of the reward hacking study. Its runs are ordinary runs, tested elsewhere."""

import json

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks.learning.foolable import Bold
from benchmarks.learning.hacking import GUARDS, HackingEvaluation, evaluate_samples, pick_stopped
from wfm_ds.recipe import file as recipe_file
from wfm_ds.types import MediaBatch


def make_evaluation(step, unseen):
    return HackingEvaluation(step=step, reward=0.1 * step, unseen=unseen, distance=0.0, spread=0.0)


def grey_image(grey):
    return np.repeat(np.asarray(grey, np.uint8)[:, :, None], 3, axis=2)


def test_the_foolable_reward_prefers_white_images():
    media = np.stack([grey_image(np.full((8, 8), value)) for value in (0, 51, 255)])
    batch = MediaBatch(media=media, sample_ids=["a", "b", "c"], prompts=[""] * 3, metadata=[{}] * 3, reward="bold")
    assert [score.value for score in Bold().score(batch)] == pytest.approx([0.0, 0.2, 1.0])


def test_real_digits_are_recognized_and_white_images_are_not(tmp_path):
    data = load_digits()
    entries = []
    for k in range(20):
        real = data.images[2 * k] * 255 / 16  # from the half that the model is trained on
        Image.fromarray(grey_image(np.rint(real) if k < 10 else np.full((8, 8), 255))).save(tmp_path / f"{k}.png")
        entries.append({"file": f"{k}.png", "prompt": f"the digit {data.target[2 * k]}"})
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    real, white = evaluate_samples(tmp_path, 0, 0.5, half=0), evaluate_samples(tmp_path, 0, 0.5, half=1)
    assert (real.unseen, real.distance) == (1.0, pytest.approx(0, abs=1e-9))
    assert white.unseen < 0.5
    assert white.distance > 0.4


def test_a_stop_is_chosen_on_one_half_and_measured_on_the_other():
    chosen_on = [make_evaluation(0, 0.7), make_evaluation(1, 0.8), make_evaluation(2, 0.6)]
    seen_on = [make_evaluation(0, 0.71), make_evaluation(1, 0.75), make_evaluation(2, 0.9)]
    assert pick_stopped(chosen_on, seen_on) is seen_on[1]


@pytest.mark.parametrize("name", GUARDS)
def test_every_guard_is_a_valid_recipe(name, tmp_path):
    variant = GUARDS[name]
    recipe = recipe_file.load_recipe(variant.recipe, [f"run.output_dir={tmp_path}", *variant.overrides])
    assert sum(function.weight for function in recipe.rl.reward.functions) >= 1
