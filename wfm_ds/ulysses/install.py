"""Installation of sequence parallelism in a denoiser. Families are discovered in the modules of this package."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from wfm_ds import ulysses
from wfm_ds.errors import UserError
from wfm_ds.ulysses.base import UlyssesTransformer


@cache
def ulysses_families() -> dict[type[nn.Module], type[UlyssesTransformer]]:
    """Return {transformer class: family} for the concrete subclasses of UlyssesTransformer in this package."""
    by_class: dict[type[nn.Module], type[UlyssesTransformer]] = {}
    for info in pkgutil.iter_modules(ulysses.__path__, f"{ulysses.__name__}."):
        for member in vars(importlib.import_module(info.name)).values():
            if not inspect.isclass(member) or not issubclass(member, UlyssesTransformer) or inspect.isabstract(member):
                continue
            first = by_class.setdefault(member.transformer_class, member)
            assert first is member, f"{member} and {first} both support {member.transformer_class}"
    return by_class


def install_ulysses(denoiser: nn.Module, group: ProcessGroup) -> None:
    """Shard the tokens of a diffusers transformer over `group`. Changes the transformer in place.

    Forward passes are then collective in the group. All ranks pass identical complete inputs, and receive the complete
    output. If every rank computes the same loss of the complete output, each rank's parameter gradients are partial
    sums. Their sum over the group is the gradient of the loss.

    denoiser: a supported transformer, or a module that has only supported transformers as children (experts). Add
    adapters before this call. Set up gradient checkpointing and DeepSpeed before or after this call. Raises UserError
    if the transformer is unsupported. A forward pass raises UserError on all ranks if its inputs have too few tokens.
    """
    for transformer, family in match_families(denoiser):
        family(transformer, group)


def check_denoiser(denoiser: nn.Module, num_ranks: int) -> None:
    """Raise UserError if `install_ulysses` would fail with this many ranks. Needs no process group."""
    for transformer, family in match_families(denoiser):
        family.check_config(transformer.config, num_ranks)


def check_latent_shape(denoiser: nn.Module, num_ranks: int, shape: Sequence[int]) -> None:
    """Raise UserError if latents of this shape, [C,h,w] or [C,T,h,w], have too few tokens for this many ranks."""
    for transformer, family in match_families(denoiser):
        family.check_shape(transformer.config, num_ranks, shape)


def match_families(denoiser: nn.Module) -> list[tuple[Any, type[UlyssesTransformer]]]:
    """Return (transformer, family) of each transformer in a denoiser. Raises UserError if one is unsupported."""
    transformers = [denoiser] if find_family(denoiser) is not None else list(denoiser.children())
    matches = [
        (transformer, family) for transformer in transformers if (family := find_family(transformer)) is not None
    ]
    if not transformers or len(matches) < len(transformers):
        names = ", ".join(sorted(transformer.__name__ for transformer in ulysses_families()))
        raise UserError(
            f"{type(denoiser).__name__} does not support sequence parallelism: set engine.sequence_parallel to 1, or "
            f"use a model with one of {names}"
        )
    return matches


def find_family(transformer: nn.Module) -> type[UlyssesTransformer] | None:
    """Return the family of a transformer's class or of its nearest supported base class, or None."""
    return next((ulysses_families()[kind] for kind in type(transformer).__mro__ if kind in ulysses_families()), None)
