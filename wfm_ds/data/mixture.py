"""Weighted mixture of datasets. The number of samples per epoch from each dataset is proportional to its weight.

An epoch contains every sample at least once. Samples are repeated where the weights require it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from wfm_ds.data.samples import Sample, SampleSet
from wfm_ds.errors import DataError

log = logging.getLogger(__name__)

MAX_GROWTH = 100  # maximum epoch length relative to the number of samples


class SampleSetMixture(SampleSet):
    """A weighted mixture of named datasets. The sample ids are NAME/ID."""

    def __init__(self, sets: Mapping[str, tuple[SampleSet, float]]) -> None:
        """sets: {name: (dataset, weight)}, with weights > 0."""
        super().__init__("data.sets")
        self.weights = {name: weight for name, (_, weight) in sets.items()}
        for name, (dataset, _) in sorted(sets.items()):
            self.samples += [rename_sample(sample, f"{name}/{sample.id}") for sample in dataset.samples]
            self.notes += [f"{name}: {note}" for note in dataset.notes]
            for reason, names in dataset.bad.items():
                for entry in names:
                    self.reject(reason, entry)
        self.samples.sort(key=lambda sample: sample.id)

    def epoch_samples(self, training: Sequence[Sample]) -> list[Sample]:
        """Return an epoch's samples, including repeats.

        Raises DataError if the epoch would have more than MAX_GROWTH * len(training) samples.
        """
        by_dataset: dict[str, list[Sample]] = {name: [] for name in self.weights}
        for sample in training:
            by_dataset[sample.id.partition("/")[0]].append(sample)
        counts = epoch_counts({name: len(samples) for name, samples in by_dataset.items()}, self.weights)
        if sum(counts.values()) > MAX_GROWTH * len(training):
            rarest = min(counts, key=lambda name: counts[name] / max(1, len(by_dataset[name])))
            raise DataError(
                f"data.sets: weight of {rarest} too small: one epoch would need {sum(counts.values())} samples for "
                f"{len(training)} distinct ones. Raise the weight of {rarest}"
            )
        total = sum(counts.values())
        for name, count in counts.items():
            times = count / max(1, len(by_dataset[name]))
            share = f"{count / total:.0%} of an epoch, each {times:.3g} times per epoch"
            log.info("data.sets: %s: %d samples, %s", name, len(by_dataset[name]), share)
        return sorted(
            (item for name, samples in by_dataset.items() for item in repeat_samples(samples, counts[name])),
            key=lambda sample: sample.id,
        )


def epoch_counts(sizes: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Return {dataset: number of samples per epoch}. The numbers are proportional to the weights.

    Each number is at least the size of the dataset. It is 0 if the dataset is empty.
    """
    total = sum(weights[name] for name, size in sizes.items() if size)
    shares = {name: weights[name] / total if size else 0.0 for name, size in sizes.items()}
    length = max((sizes[name] / share for name, share in shares.items() if share), default=0.0)
    return {name: max(sizes[name], round(length * share)) for name, share in shares.items()}


def repeat_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Repeat samples evenly until there are `count`. Repeats get new ids, so that their crop, clip and noise differ."""
    rounds, rest = divmod(count, len(samples)) if samples else (0, 0)
    extra = [samples[i * len(samples) // rest] for i in range(rest)]  # evenly spaced: neighbours may be similar
    copies = [*samples]
    for round_index in range(1, rounds):
        copies += [rename_sample(sample, f"{sample.id}#{round_index + 1}") for sample in samples]
    return copies + [rename_sample(sample, f"{sample.id}#{rounds + 1}") for sample in extra]


def rename_sample(sample: Sample, sample_id: str) -> Sample:
    return replace(sample, id=sample_id, prompt=replace(sample.prompt, id=sample_id))
