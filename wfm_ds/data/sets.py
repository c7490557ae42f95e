"""Several data sets as one: ids begin with the set's name, and each set has the share of the draws that its weight is.

The share is made of repeats: an epoch shows every sample at least once, and those of a set with a larger share more
often. So the order is that of any other data: the same on any number of ranks, and after a resume.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from wfm_ds.data.samples import Sample, SampleSet
from wfm_ds.errors import DataError

log = logging.getLogger(__name__)

MAX_GROWTH = 100  # of the list of samples by repeats


class SeveralSets(SampleSet):
    """The samples of sets by name. An id is NAME/ID; reasons and notes are those of the sets."""

    def __init__(self, sets: Mapping[str, tuple[SampleSet, float]]) -> None:
        """`sets`: each with its weight, above 0."""
        super().__init__("data.sets")
        self.weights = {name: weight for name, (_, weight) in sets.items()}
        for name, (found, _) in sorted(sets.items()):
            self.samples += [renamed(sample, f"{name}/{sample.id}") for sample in found.samples]
            self.notes += [f"{name}: {note}" for note in found.notes]
            for reason, names in found.bad.items():
                for entry in names:
                    self.reject(reason, entry)
        self.samples.sort(key=lambda sample: sample.id)

    def drawn(self, training: Sequence[Sample]) -> list[Sample]:
        """Return the samples of an epoch. Raises DataError for weights so far apart that most of it were repeats."""
        of_set: dict[str, list[Sample]] = {name: [] for name in self.weights}
        for sample in training:
            of_set[sample.id.partition("/")[0]].append(sample)
        counts = epoch_counts({name: len(samples) for name, samples in of_set.items()}, self.weights)
        if sum(counts.values()) > MAX_GROWTH * len(training):
            rarest = min(counts, key=lambda name: counts[name] / max(1, len(of_set[name])))
            raise DataError(
                f"data.sets: by these weights an epoch that shows each sample of {rarest} once has "
                f"{sum(counts.values())} draws of {len(training)} samples: raise the weight of {rarest}"
            )
        whole = sum(counts.values())
        for name, count in counts.items():
            times = count / max(1, len(of_set[name]))
            share = f"{count / whole:.0%} of the draws, {times:.3g} times each an epoch"
            log.info("data.sets: %s: %d samples, %s", name, len(of_set[name]), share)
        return sorted(
            (copy for name, samples in of_set.items() for copy in repeated(samples, counts[name])),
            key=lambda sample: sample.id,
        )


def epoch_counts(sizes: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Return how many draws of an epoch each set has: in proportion to its weight, and none fewer than its samples.
    Sets without samples have none."""
    total = sum(weights[name] for name, size in sizes.items() if size)
    shares = {name: weights[name] / total if size else 0.0 for name, size in sizes.items()}
    length = max((sizes[name] / share for name, share in shares.items() if share), default=0.0)
    return {name: max(sizes[name], round(length * share)) for name, share in shares.items()}


def repeated(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return `count` samples, each of them equally often or once more; the second and later ones have ids of their
    own, so that they are cropped, cut and noised anew."""
    rounds, rest = divmod(count, len(samples)) if samples else (0, 0)
    some = [samples[i * len(samples) // rest] for i in range(rest)]  # spread: the first by name may be of one kind
    found = [*samples]
    for again in range(1, rounds):
        found += [renamed(sample, f"{sample.id}#{again + 1}") for sample in samples]
    return found + [renamed(sample, f"{sample.id}#{rounds + 1}") for sample in some]


def renamed(sample: Sample, sample_id: str) -> Sample:
    return replace(sample, id=sample_id, prompt=replace(sample.prompt, id=sample_id))
