"""Installs sequence parallelism in a denoiser."""

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
def import_families() -> None:
    for info in pkgutil.iter_modules(ulysses.__path__, f"{ulysses.__name__}."):
        importlib.import_module(info.name)


def ulysses_families() -> dict[type[nn.Module], type[UlyssesTransformer]]:
    """Return {transformer class: UlyssesTransformer subclass} for this package and all other imported modules.

    Raises UserError if a subclass has no transformer class, or if two subclasses have the same transformer class.
    """
    import_families()
    by_class: dict[type[nn.Module], type[UlyssesTransformer]] = {}
    for family in concrete_subclasses(UlyssesTransformer):
        missing = [name for name in ("transformer_class", "patch_embedding") if not hasattr(family, name)]
        if missing:
            raise UserError(f"{class_path(family)} does not set {' and '.join(missing)}")
        other = by_class.setdefault(family.transformer_class, family)
        if other is not family:
            raise UserError(
                f"{class_path(other)} and {class_path(family)} both shard {family.transformer_class.__name__}: remove "
                "one, or change its transformer_class"
            )
    return by_class


def concrete_subclasses(base: type[Any]) -> list[type[UlyssesTransformer]]:
    found: list[type[UlyssesTransformer]] = []
    for subclass in base.__subclasses__():
        found += [*([] if inspect.isabstract(subclass) else [subclass]), *concrete_subclasses(subclass)]
    return found


def class_path(family: type[UlyssesTransformer]) -> str:
    return f"{family.__module__}:{family.__name__}"


def install_ulysses(denoiser: nn.Module, group: ProcessGroup) -> None:
    """Shard the tokens of a diffusers transformer over `group`. Changes the transformer in place.

    Afterwards, all ranks of the group must run each forward pass together. They pass identical complete inputs and
    receive the complete output. If every rank computes the same loss from this output, the gradient of the loss is the
    sum of the parameter gradients of all ranks.

    denoiser: a supported transformer, or a module that has only supported transformers as children (experts). Add
    adapters before this call.
    Raises UserError if the transformer is not supported. A forward pass with too few tokens raises UserError on all
    ranks.
    """
    for transformer, family in match_families(denoiser):
        family(transformer, group)


def check_denoiser(denoiser: nn.Module, num_ranks: int) -> None:
    """Raise UserError if a transformer or this number of ranks is not supported. Needs no process group."""
    for transformer, family in match_families(denoiser):
        family.check_config(transformer.config, num_ranks)


def check_latent_shape(denoiser: nn.Module, num_ranks: int, shape: Sequence[int]) -> None:
    """Raise UserError if latents have too few tokens for this many ranks.

    shape: (channels, h, w) or (channels, latent frames, h, w).
    """
    for transformer, family in match_families(denoiser):
        family.check_shape(transformer.config, num_ranks, shape)


def match_families(denoiser: nn.Module) -> list[tuple[Any, type[UlyssesTransformer]]]:
    """Return (transformer, UlyssesTransformer subclass) for each transformer in a denoiser.

    Raises UserError if a transformer is not supported.
    """
    transformers = [denoiser] if find_family(denoiser) is not None else list(denoiser.children())
    matches = [
        (transformer, family) for transformer in transformers if (family := find_family(transformer)) is not None
    ]
    if not transformers or len(matches) < len(transformers):
        raise UserError(
            "this model does not support sequence parallelism: set engine.sequence_parallel to 1, or use a model that "
            "does (docs/parallelism.md)"
        )
    return matches


def find_family(transformer: nn.Module) -> type[UlyssesTransformer] | None:
    """Return the UlyssesTransformer subclass for a transformer or its nearest supported base class, or None."""
    families = ulysses_families()
    return next((families[kind] for kind in type(transformer).__mro__ if kind in families), None)
