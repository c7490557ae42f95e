"""Splits the loss terms of an optimizer step into micro-batches, and pads them across ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from wfm_ds.algorithms.base import LossTerm, LossTermBatch, Stats
from wfm_ds.chunks import split_into_chunks
from wfm_ds.types import ConditioningFrames

TermT = TypeVar("TermT", bound=LossTerm)
# Fraction of the free GPU memory for cached predictions, and again for cached batches. Activations use the remainder.
GPU_BUFFER_FRACTION = 0.1
HOST_CACHE_BYTES = 256 << 20  # maximum size of cached batches if training runs on the CPU


@dataclass(frozen=True, slots=True)
class Update(Generic[TermT]):
    """This rank's loss terms of one optimizer step, padded so that all ranks run the same forward passes."""

    terms: Sequence[TermT]
    total_weight: float  # this rank's part of the loss denominator, including dropped terms without a gradient


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Loss terms that are computed in the same forward passes. The algorithm determines the class of `batch`."""

    batch: Any
    expert: int  # index of the expert for all noise levels in the batch

    def parts(self) -> list[MicroBatch]:
        """Split the micro-batch into parts. The loss of each part needs its own forward and backward pass."""
        return [MicroBatch(part, self.expert) for part in self.batch.parts()]

    def with_group_statistics(self, group_statistics: torch.Tensor | None) -> MicroBatch:
        """Return a copy with group statistics [B], one per loss term, or self if `group_statistics` is None."""
        if group_statistics is None:
            return self
        return MicroBatch(dataclasses.replace(self.batch, group_statistics=group_statistics), self.expert)

    @classmethod
    def concat(cls, micros: Sequence[MicroBatch]) -> MicroBatch:
        """Concatenate micro-batches of the same expert. Use the result only for forward passes, not for the loss."""
        if len(micros) == 1:
            return micros[0]
        batches = [m.batch for m in micros]
        batch = LossTermBatch(
            latents=torch.cat([b.latents for b in batches]),
            sigma=torch.cat([b.sigma for b in batches]),
            weight=torch.cat([b.weight for b in batches]),
            prompts=[prompt for b in batches for prompt in b.prompts],
            conditioning_frames=concat_conditioning_frames([b.conditioning_frames for b in batches]),
        )
        return cls(batch, micros[0].expert)

    def reference_inputs(self) -> MicroBatch:
        return MicroBatch(self.batch.reference_inputs(), self.expert)


@dataclass(frozen=True, slots=True)
class MicroBatches(Generic[TermT]):
    """Iterable micro-batches of an optimizer step. Each micro-batch is assembled when it is needed."""

    splits: Sequence[tuple[Sequence[TermT], int]]  # (terms, expert) of each micro-batch
    assemble: Callable[[Sequence[TermT]], Any]
    cache_bytes: int = 0  # size limit of the batches cached between iterations
    _cache: dict[int, MicroBatch] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.splits)

    @property
    def num_backwards(self) -> int:
        return sum(terms[0].num_parts for terms, _ in self.splits)

    def iterate(self, *, release: bool, chosen: Container[int] | None = None) -> Iterator[MicroBatch]:
        """Yield the micro-batches in order. chosen: indices of the micro-batches to yield; None yields all of them.

        release=False: cache micro-batches for the next iteration, up to `cache_bytes`.
        release=True: remove each micro-batch from the cache. Use this for the last iteration.
        """
        free = 0 if release else self.cache_bytes - sum(num_bytes(micro.batch) for micro in self._cache.values())
        for i, (terms, expert) in enumerate(self.splits):
            if chosen is not None and i not in chosen:
                continue
            micro = self._cache.pop(i, None) if release else self._cache.get(i)
            if micro is None:
                micro = MicroBatch(self.assemble(terms), expert)
                if not release and (size := num_bytes(micro.batch)) <= free:
                    self._cache[i], free = micro, free - size
            yield micro


def num_bytes(batch: Any) -> int:
    """Return the number of bytes of all tensors in a dataclass, including nested dataclasses and mappings."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, Mapping):
        return sum(map(num_bytes, batch.values()))
    return sum(num_bytes(getattr(batch, f.name)) for f in dataclasses.fields(batch)) if is_dataclass(batch) else 0


def concat_conditioning_frames(parts: Sequence[ConditioningFrames | None]) -> ConditioningFrames | None:
    """Concatenate the conditioning frames of several batches. Returns None if all parts are None.

    Either all parts or no part must be None.
    """
    frames = [part for part in parts if part is not None]
    if not frames:
        return None
    return ConditioningFrames(torch.cat([f.latents for f in frames]), torch.cat([f.counts for f in frames]))


@dataclass(frozen=True, slots=True)
class TermGroup(Generic[TermT]):
    """This rank's loss terms that have the same expert, `num_parts` and teacher."""

    expert: int
    num_parts: int
    teacher: int
    terms: Sequence[TermT]
    training: Sequence[TermT]  # the terms with weight 1 and a gradient

    @property
    def max_sigma(self) -> float:
        return max((term.sigma for term in self.terms), default=0.0)

    @property
    def name(self) -> str:
        return f"expert {self.expert}, num_parts {self.num_parts}, teacher {self.teacher}"

    def pad(self, length: int, substitute: TermT) -> list[TermT]:
        """Return `length` loss terms: first `training`, then copies of the group's loss terms with weight 0.

        substitute: loss term to copy if this rank has none of the group.
        """
        candidates = sorted(self.terms, key=lambda term: term.weight) or [substitute]
        padding = [dataclasses.replace(term, weight=0.0) for term in candidates]
        return [*self.training, *itertools.islice(itertools.cycle(padding), length - len(self.training))]


def pad_across_ranks(
    terms: Sequence[TermT],
    expert_of: Callable[[float], int],
    num_experts: int,
    max_over_ranks: Callable[[dict[str, float]], Mapping[str, float]],
    has_gradient: Callable[[TermT], bool] = lambda term: True,
    num_teachers: int = 1,
) -> Update[TermT]:
    """Remove loss terms without a gradient and add terms of weight 0, so that all ranks run the same forward passes.

    All ranks must call this. If no loss term on any rank has weight 1, the result is empty.

    terms: this rank's loss terms, at least one. The values of `num_parts` must be the same on every rank.
    expert_of: function that returns the expert for a noise level.
    max_over_ranks: function that returns the maximum of each value over all ranks.
    has_gradient: function that returns whether a loss term can have a gradient.
    num_teachers: number of teachers. The field `teacher` of a loss term is in 0 .. num_teachers - 1.
    """
    groups = group_terms(terms, expert_of, num_experts, has_gradient, num_teachers)
    total_weight = sum(term.weight for term in terms)
    largest = max_over_ranks(
        {f"terms of {group.name}": float(len(group.training)) for group in groups}
        | {f"max sigma of {group.name}": group.max_sigma for group in groups}
        | {"weight": total_weight}
    )
    lengths = [int(largest[f"terms of {group.name}"]) for group in groups]
    sigmas = [largest[f"max sigma of {group.name}"] for group in groups]
    if largest["weight"] > 0 and not any(lengths):  # no term has a gradient: the optimizer step must still run
        lengths[next(i for i, sigma in enumerate(sigmas) if sigma > 0)] = 1
    padded: list[TermT] = []
    for group, length, sigma in zip(groups, lengths, sigmas, strict=True):
        # A rank without terms of this group evaluates another term's latents, at a noise level of the group.
        substitute = next(term for term in terms if term.num_parts == group.num_parts)
        padded += group.pad(length, dataclasses.replace(substitute, sigma=sigma, teacher=group.teacher))
    return Update(padded, total_weight)


def group_terms(
    terms: Sequence[TermT],
    expert_of: Callable[[float], int],
    num_experts: int,
    has_gradient: Callable[[TermT], bool],
    num_teachers: int,
) -> list[TermGroup[TermT]]:
    """Group loss terms by expert, `num_parts` and teacher, and sort the groups by these numbers.

    The result contains a group, maybe empty, for every combination of the three numbers.
    """
    all_parts = sorted({term.num_parts for term in terms})
    by_kind: dict[tuple[int, int, int], list[TermT]] = {
        kind: [] for kind in itertools.product(range(num_experts), all_parts, range(num_teachers))
    }
    for term in terms:
        by_kind[term_kind(term, expert_of)].append(term)
    return [
        TermGroup(*kind, members, [t for t in members if t.weight > 0 and has_gradient(t)])
        for kind, members in by_kind.items()
    ]


def term_kind(term: LossTerm, expert_of: Callable[[float], int]) -> tuple[int, int, int]:
    """Return the kind of a loss term: (index of its expert, `num_parts`, index of its teacher).

    All loss terms of a micro-batch have the same kind. expert_of: function that returns the expert for a noise level.
    """
    return expert_of(term.sigma), term.num_parts, term.teacher


def split_into_micro_batches(
    terms: Sequence[TermT], max_terms: int, expert_of: Callable[[float], int]
) -> list[tuple[Sequence[TermT], int]]:
    """Split loss terms into micro-batches of at most `max_terms` terms of the same kind (`term_kind`).

    Returns [(loss terms, expert)], sorted by kind. expert_of: function that returns the expert for a noise level.
    """
    by_kind: dict[tuple[int, int, int], list[TermT]] = defaultdict(list)
    for term in terms:
        by_kind[term_kind(term, expert_of)].append(term)
    return [(part, kind[0]) for kind in sorted(by_kind) for part in split_into_chunks(by_kind[kind], max_terms)]


def merge_part_stats(parts: Sequence[Stats]) -> Stats:
    """Merge the statistics of the parts of one micro-batch: sum `loss/total`, and keep all other statistics."""
    if len(parts) == 1:
        return parts[0]
    totals = [cast(torch.Tensor, stats["loss/total"]) for stats in parts]
    merged = {tag: stat for stats in parts for tag, stat in stats.items()}
    return merged | {"loss/total": torch.stack(totals).sum(dim=0)}


def group_micro_batches(micros: Iterable[MicroBatch], max_terms: int) -> Iterator[list[MicroBatch]]:
    """Group consecutive micro-batches of the same expert for forward passes of at most `max_terms` loss terms.

    A micro-batch with more loss terms forms a group of one.
    """
    group: list[MicroBatch] = []
    for full in micros:
        micro = full.reference_inputs()  # may have fewer loss terms: DDRL's data samples need no reference
        count = sum(len(m.batch.sigma) for m in [*group, micro])
        if group and (count > max_terms or micro.expert != group[0].expert):
            yield group
            group = []
        group.append(micro)
    if group:
        yield group
