"""Score arrays of one model [P prompts, S seeds] with NaN for missing scores, and published benchmark scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wfm_ds.algorithms.advantages import combine_scores
from wfm_ds.evaluation.paired_statistics import Array
from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
from wfm_ds.types import Prompt, Score

SampleScores = Sequence[Mapping[str, Score]]
"""One {reward: score} for each sample, ordered by prompt, then by seed."""
GENEVAL_PROMPTS, GENEVAL_SEEDS = 553, 4  # number of prompts in prompts/evaluation_metadata.jsonl; images per prompt
GENEVAL_TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def scores_by_reward(samples: SampleScores, num_seeds: int) -> dict[str, Array]:
    """Return {reward: scores [P prompts, S seeds]}.

    Some rewards report partial scores. The result contains them as {`reward/part`: partial scores [P, S]}.
    """
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    arrays = {name: reshape_scores([sample[name].value for sample in samples], num_seeds) for name in names}
    for name in names:
        for part in sorted({part for sample in samples for part in sample[name].parts}):
            arrays[f"{name}/{part}"] = reshape_scores([sample[name].parts.get(part) for sample in samples], num_seeds)
    return arrays


def total_rewards(samples: SampleScores, num_seeds: int, reward: RewardRecipe) -> Array:
    """Return the total rewards [P prompts, S seeds]. A total reward is the weighted sum that `reward` defines."""
    return reshape_scores(combine_scores(samples, reward).totals, num_seeds)


def unit_std_reward_recipe(names: Sequence[str], base: Mapping[str, Array]) -> RewardRecipe:
    """Return a recipe that divides each reward by the standard deviation of the base model's scores.

    The weight of a reward is 1 if its standard deviation is 0.
    """
    functions = []
    for name in names:
        valid = base[name][~np.isnan(base[name])]
        std = float(valid.std(ddof=1)) if len(valid) > 1 else 0.0
        functions.append(RewardFunction(name=name, weight=1 / std if std > 0 else 1.0))
    return RewardRecipe(functions=functions)


def reshape_scores(values: Sequence[float | None], num_seeds: int) -> Array:
    """Reshape a list with one value per sample to [P prompts, S seeds]. None becomes NaN."""
    return np.array([np.nan if value is None else value for value in values], np.float64).reshape(-1, num_seeds)


@dataclass(frozen=True, slots=True)
class BenchmarkScore:
    benchmark: str
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    deviations: Sequence[str] = ()  # deviations from the published protocol; if any, the score is not comparable


def benchmark_scores(prompts: Sequence[Prompt], scores: Mapping[str, Array], num_seeds: int) -> list[BenchmarkScore]:
    """Return the scores of all benchmarks that can be computed from these rewards.

    scores: {reward: [P prompts, S seeds]}.
    """
    geneval_scores = (
        [geneval_score(prompts, scores["gen_eval/gen_eval_score"], num_seeds)]
        if "gen_eval/gen_eval_score" in scores
        else []
    )
    return [one for one in [*geneval_scores, ocr_score(scores.get("ocr"))] if one is not None]


def geneval_score(prompts: Sequence[Prompt], correct: Array, num_seeds: int) -> BenchmarkScore | None:
    """Compute GenEval's accuracy, the mean accuracy over its tasks (arXiv 2310.11513, evaluation/summary_scores.py).

    correct: [P prompts, S seeds], 1 for a correct image, 0 for a wrong image. Returns None if all scores are missing.
    """
    by_task: dict[str, list[float]] = defaultdict(list)
    for prompt, row in zip(prompts, correct, strict=True):
        by_task[str(prompt.metadata.get("tag"))] += [float(value) for value in row if not np.isnan(value)]
    shares = {task: float(np.mean(values)) for task, values in by_task.items() if values}
    if not shares:
        return None
    absent_tasks = [task for task in GENEVAL_TASKS if task not in shares]
    deviations = ["Mask2Former and CLIP of transformers, not of mmdet and open_clip"]
    deviations += [f"no prompts of {', '.join(absent_tasks)}"] if absent_tasks else []
    deviations += [f"{len(prompts)} prompts, not {GENEVAL_PROMPTS}"] if len(prompts) != GENEVAL_PROMPTS else []
    deviations += [f"{num_seeds} images per prompt, not {GENEVAL_SEEDS}"] if num_seeds != GENEVAL_SEEDS else []
    deviations += [f"{missing} images without a score"] if (missing := int(np.isnan(correct).sum())) else []
    return BenchmarkScore("GenEval", float(np.mean(list(shares.values()))), shares, deviations)


def ocr_score(scores: Array | None) -> BenchmarkScore | None:
    """Compute the mean OCR reward as defined by Flow-GRPO (arXiv 2505.05470).

    Returns None if all scores are missing.
    """
    if scores is None or np.isnan(scores).all():
        return None
    deviations = ["RapidOCR, not PaddleOCR"]
    deviations += [f"{missing} images without a score"] if (missing := int(np.isnan(scores).sum())) else []
    return BenchmarkScore("OCR", float(np.nanmean(scores)), {}, deviations)
