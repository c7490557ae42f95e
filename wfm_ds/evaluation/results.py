"""Results of an evaluation: a base model, other models, and their comparison by scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wfm_ds.evaluation.paired import Array, Difference, Estimate, difference, mean_of, ratio
from wfm_ds.evaluation.published import Published, published
from wfm_ds.evaluation.scores import Samples, by_reward, totals
from wfm_ds.evaluation.verdict import Verdict, judge
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.types import Prompt

Kind = Literal["trained", "judge", "related"]
"""Role of a reward: trained on, held out (judge), or held out but using the same network as a trained reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Samples and scores of one model, ordered by prompt, then by seed."""

    name: str  # short, for tables and folders
    path: str  # as given by the user
    files: Sequence[str]  # relative to the report
    sizes: Sequence[tuple[int, int]]  # height and width of each in pixels
    samples: Samples
    diversity: Array | None  # [P]; None with one seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Rewards that a model was trained on."""

    names: Sequence[str]  # names from the recipe, measured or not
    reward: RewardRecipe | None  # weighted sum of the measured ones; None if none was measured
    related: frozenset[str] = frozenset()  # held-out rewards that use the same network as a trained one

    def kind_of(self, reward: str) -> Kind:
        if reward in self.names:
            return "trained"
        return "related" if reward in self.related else "judge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of one model with the base."""

    measured: Measured
    trained: Trained
    means: Mapping[str, Estimate | None]  # mean scores of the model by reward
    differences: Mapping[str, Difference | None]  # other minus base, by reward
    diversity: Estimate | None  # ratio to the diversity of the base
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything in the report."""

    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    rewards: Sequence[str]
    base: Measured
    means: Mapping[str, Estimate | None]  # mean scores of the base by reward
    others: Sequence[Comparison]
    published: Mapping[str, Sequence[Published]]  # by model
    eye: str  # name of the embedder for diversity
    settings: Mapping[str, str]  # sampling settings, for the head of the report

    @property
    def models(self) -> list[Measured]:
        return [self.base, *(other.measured for other in self.others)]


def evaluation(
    *,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    rewards: Sequence[str],
    base: Measured,
    others: Sequence[tuple[Measured, Trained]],
    eye: str,
    settings: Mapping[str, str],
) -> Evaluation:
    """Compare each of the others with the base."""
    scores = {one.name: by_reward(one.samples, len(seeds)) for one in (base, *(results for results, _ in others))}
    means = {
        name: {reward: mean_of(model_scores[reward]) for reward in rewards} for name, model_scores in scores.items()
    }
    comparisons = []
    for model_results, trained_rewards in others:
        other_scores = scores[model_results.name]
        differences = {reward: difference(scores[base.name][reward], other_scores[reward]) for reward in rewards}
        comparisons.append(
            Comparison(
                measured=model_results,
                trained=trained_rewards,
                means=means[model_results.name],
                differences=differences,
                diversity=diversity_ratio(base, model_results),
                verdict=verdict_of(base, model_results, trained_rewards, differences, len(seeds)),
            )
        )
    return Evaluation(
        prompts=prompts,
        seeds=seeds,
        rewards=rewards,
        base=base,
        means=means[base.name],
        others=comparisons,
        published={name: published(prompts, model_scores, len(seeds)) for name, model_scores in scores.items()},
        eye=eye,
        settings=settings,
    )


def verdict_of(
    base: Measured,
    other: Measured,
    trained: Trained,
    differences: Mapping[str, Difference | None],
    num_seeds: int,
) -> Verdict:
    total = None
    if trained.reward is not None:
        total = difference(*(totals(one.samples, num_seeds, trained.reward) for one in (base, other)))
    held_out = {name: gap for name, gap in differences.items() if gap and trained.kind_of(name) != "trained"}
    return judge(", ".join(trained.names), total, held_out, related=trained.related)


def diversity_ratio(base: Measured, other: Measured) -> Estimate | None:
    if base.diversity is None or other.diversity is None:
        return None
    return ratio(base.diversity, other.diversity)
