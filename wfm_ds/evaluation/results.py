"""Results of an evaluation: a base model, the models compared with it, and the comparison of their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wfm_ds.evaluation.paired_statistics import (
    Array,
    Difference,
    MeanEstimate,
    compare_scores,
    estimate_mean,
    estimate_ratio,
)
from wfm_ds.evaluation.score_arrays import (
    BenchmarkScore,
    SampleScores,
    benchmark_scores,
    scores_by_reward,
    total_rewards,
)
from wfm_ds.evaluation.verdict import Verdict, decide_verdict
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.types import Prompt

RewardRole = Literal["trained", "held_out", "related"]
"""Role of a reward. `trained`: the model was trained on this reward. `held_out`: the model was not trained on it.
`related`: a held-out reward that uses the same network as a trained reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResults:
    """The samples and scores of one model, ordered by prompt, then by seed."""

    name: str  # short, for tables and folders
    path: str  # as given on the command line
    files: Sequence[str]  # relative to the report
    sizes: Sequence[tuple[int, int]]  # height and width of each in pixels
    samples: SampleScores
    diversity: Array | None  # [P]; None with one seed


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
    """All results of an evaluation. The reports show them."""

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
