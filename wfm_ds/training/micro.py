"""Division of the terms of an optimizer step into forwards: micro-batches of one expert, and several of them in one
forward where nothing is differentiated."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from wfm_ds.algorithms.batch import Term, TermBatch
from wfm_ds.chunks import chunks
from wfm_ds.types import ConditionalFrames

TermT = TypeVar("TermT", bound=Term)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Terms of one forward and backward; `batch` is of the algorithm's own class."""

    batch: Any
    expert: int  # the expert that denoises at all of its noise levels

    @classmethod
    def joined(cls, micros: Sequence[MicroBatch]) -> MicroBatch:
        """One batch for a forward of all of these, of one expert; what only a loss needs is left behind."""
        if len(micros) == 1:
            return micros[0]
        batches = [m.batch for m in micros]
        whole = TermBatch(
            latents=torch.cat([b.latents for b in batches]),
            sigma=torch.cat([b.sigma for b in batches]),
            weight=torch.cat([b.weight for b in batches]),
            prompts=[prompt for b in batches for prompt in b.prompts],
            conditional_frames=joined_frames([b.conditional_frames for b in batches]),
        )
        return cls(whole, micros[0].expert)

    def for_references(self) -> MicroBatch:
        return MicroBatch(self.batch.for_references(), self.expert)


@dataclass(frozen=True, slots=True)
class MicroBatches(Generic[TermT]):
    """The micro-batches of an optimizer step, each assembled when its turn comes: all noised videos at once would fill
    a device. Iterating again assembles the same again, for every draw has a key."""

    parts: Sequence[tuple[Sequence[TermT], int]]  # terms and their expert
    assemble: Callable[[Sequence[TermT]], Any]

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[MicroBatch]:
        for part, expert in self.parts:
            yield MicroBatch(self.assemble(part), expert)


def joined_frames(parts: Sequence[ConditionalFrames | None]) -> ConditionalFrames | None:
    """Join the conditional frames of batches, of which either all have some or none does."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return ConditionalFrames(torch.cat([part.latents for part in known]), torch.cat([part.counts for part in known]))


def level(
    terms: Sequence[TermT],
    expert_of: Callable[[float], int],
    num_experts: int,
    maxima: Callable[[dict[str, float]], dict[str, float]],
) -> list[TermT]:
    """Terms of weight 1 in their order, and enough of weight 0 that all ranks have equally many of each expert.

    `terms`: this rank's, not empty. `maxima`: over ranks, collective. Empty where no rank has a term of weight 1: then
    there is no optimizer step to do.
    """
    by_expert = [[t for t in terms if expert_of(t.sigma) == expert] for expert in range(num_experts)]
    live = [[t for t in of_expert if t.weight > 0] for of_expert in by_expert]
    highest = {f"sigma {expert}": max((t.sigma for t in ts), default=0.0) for expert, ts in enumerate(by_expert)}
    agreed = maxima({f"count {expert}": float(len(ts)) for expert, ts in enumerate(live)} | highest)
    needed = [int(agreed[f"count {expert}"]) for expert in range(num_experts)]
    levelled: list[TermT] = []
    for expert, count in enumerate(needed):
        # A rank without a term of this expert asks about another one's latents at a sigma of the expert, for no weight.
        fillers = by_expert[expert] or [dataclasses.replace(terms[0], sigma=agreed[f"sigma {expert}"])]
        unused = [dataclasses.replace(t, weight=0.0) for t in sorted(fillers, key=lambda t: t.weight)]
        levelled += [*live[expert], *itertools.islice(itertools.cycle(unused), count - len(live[expert]))]
    return levelled


def cut(terms: Sequence[TermT], size: int, expert_of: Callable[[float], int]) -> list[tuple[Sequence[TermT], int]]:
    """Micro-batches of at most `size` terms of one expert, in the order of experts, with their expert."""
    by_expert: dict[int, list[TermT]] = defaultdict(list)
    for term in terms:
        by_expert[expert_of(term.sigma)].append(term)
    return [(part, expert) for expert in sorted(by_expert) for part in chunks(by_expert[expert], size)]


def folded(micros: Iterable[MicroBatch], max_terms: int) -> Iterator[list[MicroBatch]]:
    """Neighbours of one expert, as many as have at most `max_terms` terms together; a larger one stays alone."""
    group: list[MicroBatch] = []
    for micro in micros:
        count = sum(len(m.batch.sigma) for m in [*group, micro])
        if group and (count > max_terms or micro.expert != group[0].expert):
            yield group
            group = []
        group.append(micro)
    if group:
        yield group
