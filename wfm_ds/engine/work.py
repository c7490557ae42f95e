"""The FLOPs of the forwards that an engine ran.

Forwards are noted with the shapes of their arguments, and each kind of them is counted once, on a copy of the denoiser
on the meta device that was taken before DeepSpeed cut it up. So every size and length of text counts as it was.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wfm_ds.engine.flops import Flops, flops_of, on_meta
from wfm_ds.engine.policy import add_adapters
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.recipe.schema import Recipe

log = logging.getLogger(__name__)

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of some forwards and their backward passes."""

    needed: int = 0  # by the mathematics
    repeated: int = 0  # by gradient checkpointing

    def __add__(self, other: Work) -> Work:
        return Work(self.needed + other.needed, self.repeated + other.repeated)


@dataclass(frozen=True, slots=True)
class Kind:
    """Forwards of which a sample costs the same."""

    shapes: Hashable
    differentiated: bool
    adapters: bool  # they compute, if there are any


class WorkCounter:
    """Notes the forwards of one rank; `take` says what they cost, and counts each kind of them only once."""

    def __init__(self, shadow: nn.Module, *, checkpointing: bool) -> None:
        """shadow: the denoiser on the meta device, with its adapters and its flags of what trains."""
        self._shadow, self._checkpointing = shadow, checkpointing
        self._samples: Counter[Kind] = Counter()
        self._examples: dict[Hashable, Arguments] = {}
        self._flops: dict[Hashable, Flops] = {}
        self._warned = False

    @classmethod
    def of(
        cls, denoiser: nn.Module, recipe: Recipe, targets: list[str], frozen: AbstractSet[str] = frozenset()
    ) -> WorkCounter:
        """Copy a denoiser that is still whole and has no adapters. targets: where the recipe's adapters will be.
        frozen: parameters that full training leaves as they are."""
        shadow = on_meta(denoiser)
        make_trainable(shadow, recipe, targets, [], frozen)
        return cls(shadow, checkpointing=recipe.model.gradient_checkpointing)

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, differentiated: bool, adapters: bool) -> None:
        """A forward with these arguments is run. The first tensor among them has a row for each sample."""
        batch = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        shapes = (tuple(map(_shape, args)), tuple((name, _shape(value)) for name, value in kwargs.items()))
        self._samples[Kind(shapes, differentiated, adapters)] += batch
        if shapes not in self._examples:
            self._examples[shapes] = tuple(map(_single, args)), {name: _single(v) for name, v in kwargs.items()}

    def take(self) -> Work | None:
        """The work of all forwards since the last call; None for a denoiser that needs values, which are not there on
        the meta device."""
        try:
            return sum((self._work_of(kind, samples) for kind, samples in self._samples.items()), Work())
        except RuntimeError as error:
            if not self._warned:
                log.warning("the FLOPs of this denoiser cannot be counted, so no speed in TFLOP/s is shown: %s", error)
            self._warned = True
            return None
        finally:
            self.clear()

    def clear(self) -> None:
        """Forget the forwards since the last call of `take`."""
        self._samples.clear()

    def _work_of(self, kind: Kind, samples: int) -> Work:
        if kind.shapes not in self._flops:
            args, kwargs = self._examples[kind.shapes]
            self._flops[kind.shapes] = flops_of(
                self._shadow, lambda: self._shadow(*args, **kwargs)[0], checkpointing=self._checkpointing
            )
        flops = self._flops[kind.shapes]
        forward = flops.forward if kind.adapters else flops.forward_without_adapters
        if not kind.differentiated:
            return Work(samples * forward)
        return Work(samples * (forward + flops.backward), samples * flops.recompute)


def make_trainable(
    shadow: nn.Module,
    recipe: Recipe,
    targets: Sequence[str],
    names: Sequence[str],
    frozen: AbstractSet[str] = frozenset(),
) -> None:
    """Give a copy on the meta device the adapters, flags and dtype that the engine gives the denoiser itself, which may
    be stored in another dtype. names: of the adapters beside `default`. frozen: parameters that full training leaves
    as they are."""
    if recipe.lora is None:
        for name, parameter in shadow.named_parameters():
            parameter.requires_grad_(name not in frozen)
    else:
        with torch.device("meta"):
            add_adapters(shadow, recipe.lora, targets, names, seed=0)
    for parameter in shadow.parameters():
        parameter.data = parameter.data.to(DTYPES[recipe.model.dtype])


def _shape(value: Any) -> Hashable:
    """The part of an argument that FLOPs of a sample depend on: the shape without the batch, or the value itself."""
    return (tuple(value.shape[1:]), value.dtype) if isinstance(value, Tensor) else value


def _single(value: Any) -> Any:
    """The same for one sample, without values."""
    return torch.empty_like(value[:1], device="meta") if isinstance(value, Tensor) else value
