"""Division of the terms of an optimizer step into forwards: micro-batches of one expert, and several of them in one
forward where nothing is differentiated."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.batch import Term, TermBatch
from wfm_ds.chunks import chunks
from wfm_ds.types import ConditionalFrames

TermT = TypeVar("TermT", bound=Term)
# Of a GPU's free memory for predictions, and as much for batches, that wait for the next pass: the rest is for
# activations.
KEPT_SHARE = 0.1
KEPT_ON_HOST = 256 << 20  # for batches, where the device is the host


@dataclass(frozen=True, slots=True)
class Update(Generic[TermT]):
    """The terms of one optimizer step on this rank, levelled: all ranks run equally many forwards for them."""

    terms: Sequence[TermT]
    count: float  # of this rank's terms in the denominator: those without a gradient, which are left out, too


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Terms that go through the denoiser together, or part by part; `batch` is of the algorithm's own class."""

    batch: Any
    expert: int  # the expert that denoises at all of its noise levels

    def parts(self) -> list[MicroBatch]:
        """The batches that have a forward and backward of their own, in their order."""
        return [MicroBatch(part, self.expert) for part in self.batch.parts()]

    def told(self, survey: torch.Tensor | None) -> MicroBatch:
        """Return the same with these sums [B], if there are some, for its loss."""
        return self if survey is None else MicroBatch(dataclasses.replace(self.batch, survey=survey), self.expert)

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
    a device. Iterating again assembles the same again, for every draw has a key, but for those that were kept."""

    cuts: Sequence[tuple[Sequence[TermT], int]]  # terms and their expert
    assemble: Callable[[Sequence[TermT]], Any]
    room: int = 0  # bytes for batches that are kept from one pass to the next
    _kept: dict[int, MicroBatch] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.cuts)

    @property
    def num_backwards(self) -> int:
        return sum(terms[0].num_parts for terms, _ in self.cuts)

    def __iter__(self) -> Iterator[MicroBatch]:
        """The last pass: what was kept is let go, one after the other."""
        for i, (terms, expert) in enumerate(self.cuts):
            yield self._kept.pop(i) if i in self._kept else MicroBatch(self.assemble(terms), expert)

    def before_others(self) -> Iterator[MicroBatch]:
        """A pass that others follow: as many of the first ones as there is room for are kept."""
        free = self.room - sum(num_bytes(micro.batch) for micro in self._kept.values())
        for i, (terms, expert) in enumerate(self.cuts):
            micro = self._kept.get(i) or MicroBatch(self.assemble(terms), expert)
            if i not in self._kept and (size := num_bytes(micro.batch)) <= free:
                self._kept[i], free = micro, free - size
            yield micro


def num_bytes(batch: Any) -> int:
    """Bytes of the tensors that a batch holds, in its own fields and in those of its parts."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    return sum(num_bytes(getattr(batch, f.name)) for f in dataclasses.fields(batch)) if is_dataclass(batch) else 0


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
    has_gradient: Callable[[TermT], bool] = lambda term: True,
) -> Update[TermT]:
    """Terms of weight 1 with a gradient in their order, and enough of weight 0 that all ranks have equally many of each
    expert and number of parts.

    `terms`: this rank's, not empty, with the numbers of parts that every rank has. `maxima`: over ranks, collective.
    Where no rank has a term with a gradient each has one of weight 0, for the optimizer step is still to be done; where
    no rank has a term of weight 1 there is none to do, and no term.
    """
    kinds = list(itertools.product(range(num_experts), sorted({t.num_parts for t in terms})))
    of_kind = {kind: [t for t in terms if (expert_of(t.sigma), t.num_parts) == kind] for kind in kinds}
    live = {kind: [t for t in of_kind[kind] if t.weight > 0 and has_gradient(t)] for kind in kinds}
    count = sum(t.weight for t in terms)
    said = {f"count {kind}": float(len(live[kind])) for kind in kinds}
    said |= {f"sigma {kind}": max((t.sigma for t in of_kind[kind]), default=0.0) for kind in kinds}
    agreed = maxima(said | {"count": count})
    wanted = {kind: int(agreed[f"count {kind}"]) for kind in kinds}
    if agreed["count"] > 0 and not any(wanted.values()):
        wanted[next(kind for kind in kinds if agreed[f"sigma {kind}"] > 0)] = 1
    levelled: list[TermT] = []
    for kind in kinds:
        # A rank without a term of this expert asks about another one's latents at a sigma of the expert, for no weight.
        another = next(t for t in terms if t.num_parts == kind[1])
        fillers = of_kind[kind] or [dataclasses.replace(another, sigma=agreed[f"sigma {kind}"])]
        unused = [dataclasses.replace(t, weight=0.0) for t in sorted(fillers, key=lambda t: t.weight)]
        missing = wanted[kind] - len(live[kind])
        levelled += [*live[kind], *itertools.islice(itertools.cycle(unused), missing)]
    return Update(levelled, count)


def cut(terms: Sequence[TermT], size: int, expert_of: Callable[[float], int]) -> list[tuple[Sequence[TermT], int]]:
    """Micro-batches of at most `size` terms of one expert and one number of parts, in the order of experts, with their
    expert."""
    of_kind: dict[tuple[int, int], list[TermT]] = defaultdict(list)
    for term in terms:
        of_kind[expert_of(term.sigma), term.num_parts].append(term)
    return [(part, kind[0]) for kind in sorted(of_kind) for part in chunks(of_kind[kind], size)]


def joined_stats(parts: Sequence[Stats]) -> Stats:
    """Statistics of a micro-batch whose loss is the sum of those of its parts."""
    if len(parts) == 1:
        return parts[0]
    totals = [cast(torch.Tensor, stats["loss/total"]) for stats in parts]
    merged = {tag: stat for stats in parts for tag, stat in stats.items()}
    return merged | {"loss/total": torch.stack(totals).sum(dim=0)}


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
