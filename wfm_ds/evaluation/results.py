"""Results of an evaluation: a base, other models beside it, and what their scores say of each."""

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
"""Of a reward: trained on, held out, or held out and looking through the same network as one that was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Samples of one model, prompt by prompt and within these seed by seed."""

    name: str  # short, for tables and folders
    path: str  # as it was named
    files: Sequence[str]  # relative to the report
    sizes: Sequence[tuple[int, int]]  # height and width of each in pixels
    samples: Samples
    diversity: Array | None  # [P]; None with one seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Rewards that a model was trained on, as far as it was measured."""

    names: Sequence[str]  # of rewards; as its recipe has them, measured or not
    reward: RewardRecipe | None  # their sum; None if none of them was measured
    related: frozenset[str] = frozenset()  # judges that look through the same network as one of them

    def kind_of(self, reward: str) -> Kind:
        if reward in self.names:
            return "trained"
        return "related" if reward in self.related else "judge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One model beside the base."""

    measured: Measured
    trained: Trained
    means: Mapping[str, Estimate | None]  # of its own scores, by reward
    differences: Mapping[str, Difference | None]  # from the base
    diversity: Estimate | None  # how many times that of the base (paired.ratio)
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything that a report shows."""

    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    rewards: Sequence[str]
    base: Measured
    means: Mapping[str, Estimate | None]  # of the base
    others: Sequence[Comparison]
    published: Mapping[str, Sequence[Published]]  # by model
    eye: str  # what diversity was seen with
    settings: Mapping[str, str]  # of sampling, for the head of the report

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
    scores = {one.name: by_reward(one.samples, len(seeds)) for one in (base, *(measured for measured, _ in others))}
    means = {name: {reward: mean_of(found[reward]) for reward in rewards} for name, found in scores.items()}
    compared = []
    for measured, trained in others:
        own = scores[measured.name]
        differences = {reward: difference(scores[base.name][reward], own[reward]) for reward in rewards}
        compared.append(
            Comparison(
                measured=measured,
                trained=trained,
                means=means[measured.name],
                differences=differences,
                diversity=diversity_ratio(base, measured),
                verdict=verdict_of(base, measured, trained, differences, len(seeds)),
            )
        )
    return Evaluation(
        prompts=prompts,
        seeds=seeds,
        rewards=rewards,
        base=base,
        means=means[base.name],
        others=compared,
        published={name: published(prompts, found, len(seeds)) for name, found in scores.items()},
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
    judges = {name: found for name, found in differences.items() if found and trained.kind_of(name) != "trained"}
    return judge(", ".join(trained.names), total, judges, related=trained.related)


def diversity_ratio(base: Measured, other: Measured) -> Estimate | None:
    if base.diversity is None or other.diversity is None:
        return None
    return ratio(base.diversity, other.diversity)
