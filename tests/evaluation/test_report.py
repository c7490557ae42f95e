"""Evaluation report: the contents of its tables, files and page for known scores."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from wfm_ds.evaluation.diversity import PixelEmbedder, load_embedder, prompt_diversity
from wfm_ds.evaluation.report import format_csv, format_json, format_text, render_page
from wfm_ds.evaluation.results import (
    ModelResults,
    TrainedRewards,
    benchmark_scores,
    compare_models,
    geneval_score,
    ocr_score,
    scores_by_reward,
    total_rewards,
    unit_std_reward_recipe,
)
from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
from wfm_ds.types import Prompt, Score

RNG = np.random.default_rng(0)
SEEDS = [0, 1]
HOSTILE = "</script><img onerror=alert(1)>"
PROMPTS = [Prompt(id=f"p/{i}", text=HOSTILE if i == 0 else f"prompt, {i}") for i in range(8)]
WORTH = {"pick": RNG.normal(size=16), "ocr": RNG.normal(size=16) / 10 + 0.5, "new": RNG.normal(size=16)}


def samples(**shift):
    """Return scores of 8 prompts with 2 seeds; `shift` is added to a reward."""
    values = {name: worth + shift.get(name, 0) + RNG.normal(size=16) / 50 for name, worth in WORTH.items()}
    return [
        {name: Score(sample_id=str(i), reward=name, value=float(v[i])) for name, v in values.items()} for i in range(16)
    ]


def measured(name, spread=1.0, **shift):
    return ModelResults(
        name=name,
        path=f"outputs/{name}",
        files=[f"{name}/{i:04d}.png" for i in range(16)],
        sizes=[(32, 48)] * 16,
        samples=samples(**shift),
        diversity=spread * np.arange(1.0, 9.0),
    )


@pytest.fixture(scope="module")
def found():
    reward = RewardRecipe(functions=[RewardFunction(name="pick", weight=2.0)])
    trained = TrainedRewards(names=["pick"], reward=reward, related=frozenset({"new"}))
    hacked, improved = measured("step_9", 0.5, pick=1, ocr=-0.2), measured("step_3", pick=1, ocr=0.2)
    hacked = replace(hacked, samples=[{**one} for one in hacked.samples])
    hacked.samples[3]["new"] = Score(sample_id="3", reward="new", failure="it broke")
    return compare_models(
        prompts=PROMPTS,
        seeds=SEEDS,
        rewards=["pick", "ocr", "new"],
        base=measured("base"),
        others=[(hacked, trained), (improved, trained)],
        embedder_name="RGB",
        settings={"sampling": "4 steps"},
    )


def test_the_table_shows_a_hacked_reward(found):
    said = format_text(found)
    first, second = said.split("\n\n")[1:3]
    assert first.splitlines()[0].split() == ["base", "step_9", "difference", "better", "in"]
    assert first.splitlines()[1].startswith("pick       T")
    assert first.splitlines()[2].split()[-4:] == ["0", "of", "16", "decreased"]
    assert first.splitlines()[3].startswith("new        R")
    assert "x0.5 [0.5, 0.5]" in first
    assert "verdict: HACKED: pick increased, but ocr decreased by" in first
    assert "verdict: IMPROVED: pick and ocr increased" in second
    assert "step_9: samples without a score: 1 by new (it broke); their pairs are excluded" in said
    assert "OCR: not comparable with published numbers: RapidOCR, not PaddleOCR" in said


def test_the_json_has_the_values_of_the_table(found):
    content = json.loads(format_json(found))
    hacked = content["models"][0]
    assert (hacked["name"], hacked["verdict"]["name"], hacked["trained_on"]) == ("step_9", "hacked", ["pick"])
    gap = hacked["differences"]["ocr"]
    assert gap["low"] < gap["value"] < gap["high"] < 0
    assert hacked["differences"]["new"]["missing"] == 1
    assert hacked["diversity_ratio"]["value"] == pytest.approx(0.5)


def test_the_csv_has_a_line_for_each_sample(found):
    rows = list(csv.DictReader(format_csv(found).splitlines()))
    assert len(rows) == 48
    assert (rows[0]["model"], rows[0]["prompt"], rows[17]["seed"], rows[19]["new"]) == ("base", HOSTILE, "1", "")
    assert float(rows[20]["ocr"]) == found.comparisons[0].results.samples[4]["ocr"].value


def test_the_page_shows_all_samples_and_escapes_prompts(found):
    made = render_page(found)
    assert HOSTILE not in made
    assert made.count("<img ") == 48
    assert 'src="step_9/0003.png"' in made
    assert "new: it broke" in made
    assert made.count("<svg") == 6
    assert "<script" not in made


def test_rewards_without_a_recipe_are_weighted_by_their_std():
    drawn = samples()
    base = scores_by_reward(drawn, 2)
    summed = total_rewards(drawn, 2, unit_std_reward_recipe(["pick", "ocr"], base))
    want = base["pick"] / base["pick"].std(ddof=1) + base["ocr"] / base["ocr"].std(ddof=1)
    assert summed == pytest.approx(want)


def test_diversity_is_the_mean_distance_of_two_seeds():
    eye = PixelEmbedder()
    black, white = np.zeros((1, 64, 64, 3), np.uint8), np.full((1, 64, 64, 3), 255, np.uint8)
    vectors = [eye.embed(one) for one in (black, white, black)]
    assert prompt_diversity([*vectors, vectors[0], None, None], 3) == pytest.approx([2 / 3, np.nan], nan_ok=True)
    clip = np.concatenate([black, white, white])
    assert np.linalg.norm(eye.embed(clip) - eye.embed(clip[::-1])) == pytest.approx((2 / 3) ** 0.5)


def test_an_image_model_can_look(tmp_path):
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    small = {"height": 28, "width": 28}
    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(tmp_path)
    BitImageProcessor(size=small, crop_size=small).save_pretrained(tmp_path)
    eye = load_embedder(str(tmp_path), "cpu")
    one, other = (RNG.integers(0, 256, (2, 40, 40, 3)).astype(np.uint8) for _ in range(2))
    assert np.linalg.norm(eye.embed(one)) == pytest.approx(1)
    assert np.linalg.norm(eye.embed(one) - eye.embed(other)) > 0
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_embedder(str(tmp_path / "none"), "cpu")


def test_geneval_is_the_mean_over_tasks_not_over_images():
    tags = ["counting"] * 3 + ["colors"]
    prompts = [Prompt(id=str(i), text="x", metadata={"tag": tag}) for i, tag in enumerate(tags)]
    correct = np.array([[1.0, 1.0], [1.0, 1.0], [1.0, np.nan], [0.0, 1.0]])
    one = geneval_score(prompts, correct, 2)
    assert one.value == pytest.approx((1 + 0.5) / 2)
    assert any("4 prompts, not 553" in words for words in one.deviations)
    assert ocr_score(np.full((2, 2), np.nan)) is None
    scores = benchmark_scores(prompts, {"gen_eval/gen_eval_score": correct, "ocr": correct}, 2)
    assert [one.benchmark for one in scores] == ["GenEval", "OCR"]
