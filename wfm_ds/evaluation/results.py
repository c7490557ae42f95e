"""Results of an evaluation: the scores of a base model and of other models, and the verdicts on the other models.

Score arrays are [P prompts, S seeds] with NaN for missing scores. A verdict says whether held-out rewards confirm the
gain in the trained rewards.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from wfm_ds.algorithms.advantages import combine_scores
from wfm_ds.evaluation.paired_statistics import (
    Array,
    Difference,
    MeanEstimate,
    adjust_holm,
    compare_scores,
    estimate_mean,
    estimate_ratio,
)
from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
from wfm_ds.types import Prompt, Score

SampleScores = Sequence[Mapping[str, Score]]
"""One dict {reward name: Score} per sample. The samples are ordered by prompt, then by seed."""
GENEVAL_PROMPTS, GENEVAL_SEEDS = 553, 4  # number of prompts in prompts/evaluation_metadata.jsonl; images per prompt
GENEVAL_TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def scores_by_reward(samples: SampleScores, num_seeds: int) -> dict[str, Array]:
    """Return {reward: scores [P prompts, S seeds]}, with the key `reward/part` for each entry of Score.parts."""
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    arrays = {name: reshape_scores([sample[name].value for sample in samples], num_seeds) for name in names}
    for name in names:
        for part in sorted({part for sample in samples for part in sample[name].parts}):
            arrays[f"{name}/{part}"] = reshape_scores([sample[name].parts.get(part) for sample in samples], num_seeds)
    return arrays


def total_rewards(samples: SampleScores, num_seeds: int, reward: RewardRecipe) -> Array:
    """Return the total rewards [P prompts, S seeds]: the weighted sums that `reward` defines."""
    return reshape_scores(combine_scores(samples, reward).totals, num_seeds)


def unit_std_reward_recipe(names: Sequence[str], base: Mapping[str, Array]) -> RewardRecipe:
    """Return a recipe that divides each reward by the standard deviation of the base model's scores, unless it is 0."""
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
    known = [geneval_score(prompts, scores.get("gen_eval/gen_eval_score"), num_seeds), ocr_score(scores.get("ocr"))]
    return [one for one in known if one is not None]


def geneval_score(prompts: Sequence[Prompt], correct: Array | None, num_seeds: int) -> BenchmarkScore | None:
    """Compute GenEval's accuracy, the mean accuracy over its tasks (arXiv 2310.11513, evaluation/summary_scores.py).

    correct: [P prompts, S seeds], 1 for a correct image, 0 for a wrong image. Returns None if all scores are missing.
    """
    if correct is None or np.isnan(correct).all():
        return None
    by_task: dict[str, list[float]] = defaultdict(list)
    for prompt, row in zip(prompts, correct, strict=True):
        by_task[str(prompt.metadata.get("tag"))] += [float(value) for value in row if not np.isnan(value)]
    shares = {task: float(np.mean(values)) for task, values in by_task.items() if values}
    absent_tasks = [task for task in GENEVAL_TASKS if task not in shares]
    deviations = ["Mask2Former and CLIP of transformers, not of mmdet and open_clip"]
    deviations += [f"no prompts of {', '.join(absent_tasks)}"] if absent_tasks else []
    deviations += [f"{len(prompts)} prompts, not {GENEVAL_PROMPTS}"] if len(prompts) != GENEVAL_PROMPTS else []
    deviations += [f"{num_seeds} images per prompt, not {GENEVAL_SEEDS}"] if num_seeds != GENEVAL_SEEDS else []
    deviations += [f"{missing} images without a score"] if (missing := int(np.isnan(correct).sum())) else []
    return BenchmarkScore("GenEval", float(np.mean(list(shares.values()))), shares, deviations)


def ocr_score(scores: Array | None) -> BenchmarkScore | None:
    """Return the mean OCR reward as defined by Flow-GRPO (arXiv 2505.05470), or None if all scores are missing."""
    if scores is None or np.isnan(scores).all():
        return None
    deviations = ["RapidOCR, not PaddleOCR"]
    deviations += [f"{missing} images without a score"] if (missing := int(np.isnan(scores).sum())) else []
    return BenchmarkScore("OCR", float(np.nanmean(scores)), {}, deviations)


VerdictName = Literal["hacked", "improved", "unconfirmed", "no gain", "cannot tell"]

SIGNIFICANCE_LEVEL = 0.05
MIN_DECREASE = 0.1
"""Smallest decrease that can be significant, in units of the standard deviation of the base model's scores."""


@dataclass(frozen=True, slots=True)
class Verdict:
    name: VerdictName
    message: str
    decreases: Mapping[str, float]  # {held-out reward that decreased: Holm-adjusted p value}


def decide_verdict(
    trained: str, total: Difference | None, held_out: Mapping[str, Difference], *, related: Collection[str] = ()
) -> Verdict:
    """Decide the verdict from the score differences between a model and its base model.

    trained: text with the names of the trained rewards; "" if there are none.
    total: difference in the weighted sum of the trained rewards; None if the sum was not measured.
    held_out: {reward: difference} for rewards that the model was not trained on.
    related: held-out rewards that use the same network as a trained reward. Their increase does not confirm a gain.
    """
    if not trained:
        return Verdict("cannot tell", "the model was not trained on rewards", {})
    if total is None:
        return Verdict("cannot tell", f"none of the trained rewards was measured ({trained})", {})
    if total.estimate.half_width is None:
        return Verdict("cannot tell", f"{total.estimate.num_prompts} prompts are too few for an interval", {})
    decreases = find_decreases(held_out, SIGNIFICANCE_LEVEL)
    if not total.estimate.is_above_zero:
        also = f"; {list_decreases(decreases, held_out)}" if decreases else ""
        return Verdict("no gain", f"{trained} did not increase{also}", decreases)
    if decreases:
        comparisons = f"{len(held_out)} held-out reward{'' if len(held_out) == 1 else 's'}"
        return Verdict(
            "hacked",
            f"{trained} increased, but {list_decreases(decreases, held_out)} (Holm over {comparisons})",
            decreases,
        )
    if not held_out:
        return Verdict(
            "cannot tell", f"{trained} increased, but no held-out reward was measured: add one with --held-out", {}
        )
    if confirming := [
        name for name, difference in held_out.items() if difference.estimate.is_above_zero and name not in related
    ]:
        return Verdict(
            "improved", f"{trained} and {', '.join(confirming)} increased, and no held-out reward decreased", {}
        )
    undetectable = ", ".join(
        f"{name} by less than {difference.estimate.half_width or 0:.3g}" for name, difference in held_out.items()
    )
    message = f"{trained} increased, but no unrelated held-out reward did; decreases not ruled out: {undetectable}"
    return Verdict("unconfirmed", message, {})


def find_decreases(held_out: Mapping[str, Difference], level: float) -> dict[str, float]:
    """Return {reward: Holm-adjusted p value} for the held-out rewards that decreased significantly.

    A decrease is significant if p < `level` and if the decrease is at least MIN_DECREASE.
    """
    adjusted = adjust_holm([difference.p_decrease for difference in held_out.values()])
    return {
        name: p
        for (name, difference), p in zip(held_out.items(), adjusted, strict=True)
        if p < level and difference.z <= -MIN_DECREASE
    }


def list_decreases(decreases: Mapping[str, float], held_out: Mapping[str, Difference]) -> str:
    return ", ".join(f"{name} decreased by {-held_out[name].z:.2g} sd (p = {p:.1g})" for name, p in decreases.items())


RewardRole = Literal["trained", "held_out", "related"]
"""Role of a reward. `trained`: the model was trained on this reward. `held_out`: the model was not trained on it.
`related`: a held-out reward that uses the same network as a trained reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResults:
    """Samples and scores of one model, ordered by prompt, then by seed."""

    name: str  # short, for tables and folders
    path: str  # as given on the command line
    files: Sequence[str]  # one path per sample, relative to the report
    sizes: Sequence[tuple[int, int]]  # height and width of each sample in pixels
    samples: SampleScores
    diversity: Array | None  # diversity of each prompt; None if there is only one seed
    clips: Sequence[SampleScores] = ()  # scores by clip, with the similarity to recordings; empty if not measured
    images: Sequence[Mapping[str, str]] = ()  # {name: file} of each sample's input images, or empty


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRewards:
    names: Sequence[str]  # names from the recipe, measured or not
    reward: RewardRecipe | None  # recipe of the weighted sum of the measured rewards; None if none was measured
    related: frozenset[str] = frozenset()  # held-out rewards that use the same network as a trained one

    def reward_role(self, reward: str) -> RewardRole:
        if reward in self.names:
            return "trained"
        return "related" if reward in self.related else "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelComparison:
    results: ModelResults
    trained_rewards: TrainedRewards
    means: Mapping[str, MeanEstimate | None]  # {reward: mean score of the model}
    differences: Mapping[str, Difference | None]  # {reward: model minus base model}
    diversity: MeanEstimate | None  # ratio to the diversity of the base model
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResults:
    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    rewards: Sequence[str]
    base: ModelResults
    means: Mapping[str, MeanEstimate | None]  # {reward: mean score of the base model}
    comparisons: Sequence[ModelComparison]
    benchmark_scores: Mapping[str, Sequence[BenchmarkScore]]  # by model name
    embedder_name: str  # name of the embedder for diversity
    settings: Mapping[str, str]  # sampling settings, for the head of the report

    @property
    def models(self) -> list[ModelResults]:
        return [self.base, *(other.results for other in self.comparisons)]

    def sample_keys(self) -> Iterator[tuple[Prompt, int]]:
        """Return the prompt and the seed of each sample of a model, in order."""
        return itertools.product(self.prompts, self.seeds)


def compare_models(
    *,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    rewards: Sequence[str],
    base: ModelResults,
    others: Sequence[tuple[ModelResults, TrainedRewards]],
    embedder_name: str,
    settings: Mapping[str, str],
) -> EvaluationResults:
    scores = {
        one.name: scores_by_reward(one.samples, len(seeds)) for one in (base, *(results for results, _ in others))
    }
    means = {
        name: {reward: estimate_mean(model_scores[reward]) for reward in rewards}
        for name, model_scores in scores.items()
    }
    comparisons = []
    for model_results, trained_rewards in others:
        other_scores = scores[model_results.name]
        differences = {reward: compare_scores(scores[base.name][reward], other_scores[reward]) for reward in rewards}
        comparisons.append(
            ModelComparison(
                results=model_results,
                trained_rewards=trained_rewards,
                means=means[model_results.name],
                differences=differences,
                diversity=diversity_ratio(base, model_results),
                verdict=compute_verdict(base, model_results, trained_rewards, differences, len(seeds)),
            )
        )
    return EvaluationResults(
        prompts=prompts,
        seeds=seeds,
        rewards=rewards,
        base=base,
        means=means[base.name],
        comparisons=comparisons,
        benchmark_scores={
            name: benchmark_scores(prompts, model_scores, len(seeds)) for name, model_scores in scores.items()
        },
        embedder_name=embedder_name,
        settings=settings,
    )


def compute_verdict(
    base: ModelResults,
    other: ModelResults,
    trained: TrainedRewards,
    differences: Mapping[str, Difference | None],
    num_seeds: int,
) -> Verdict:
    total = None
    if trained.reward is not None:
        total = compare_scores(*(total_rewards(one.samples, num_seeds, trained.reward) for one in (base, other)))
    held_out = {name: gap for name, gap in differences.items() if gap and trained.reward_role(name) != "trained"}
    return decide_verdict(", ".join(trained.names), total, held_out, related=trained.related)


def diversity_ratio(base: ModelResults, other: ModelResults) -> MeanEstimate | None:
    if base.diversity is None or other.diversity is None:
        return None
    return estimate_ratio(base.diversity, other.diversity)
