"""Installation of a transformer's family. Families are found by looking into this folder; nothing registers itself."""

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
from wfm_ds.ulysses.base import SharedTokens


@cache
def families() -> dict[type[nn.Module], type[SharedTokens]]:
    """Every family by its transformer class: the concrete subclasses of SharedTokens in the modules of this folder."""
    found: dict[type[nn.Module], type[SharedTokens]] = {}
    for info in pkgutil.iter_modules(ulysses.__path__, f"{ulysses.__name__}."):
        for member in vars(importlib.import_module(info.name)).values():
            if not inspect.isclass(member) or not issubclass(member, SharedTokens) or inspect.isabstract(member):
                continue
            first = found.setdefault(member.transformer, member)
            assert first is member, f"{member} and {first} both serve {member.transformer}"
    return found


def install(denoiser: nn.Module, group: ProcessGroup) -> None:
    """Change a diffusers transformer in place: each forward, called by all ranks of `group` with equal whole inputs,
    works on this rank's share of the tokens and returns the whole output on every rank.

    Parameters' gradients are then partial sums: summed over the group they are the gradient of the whole, if every rank
    differentiates the same loss of the whole output. `denoiser` is a transformer of a known class, or a module whose
    children all are (experts); adapters must be in place already, checkpointing and DeepSpeed may come before or after.
    Raises UserError naming the class and what cannot be shared; a forward does too, on all ranks alike, for inputs too
    small to share.
    """
    for transformer, family in served(denoiser):
        family(transformer, group)


def check(denoiser: nn.Module, num_ranks: int) -> None:
    """UserError as of `install`, as far as it can be told without ranks."""
    for transformer, family in served(denoiser):
        family.check(transformer.config, num_ranks)


def check_shape(denoiser: nn.Module, num_ranks: int, shape: Sequence[int]) -> None:
    """UserError if a forward on latents of this shape, [C,h,w] or [C,T,h,w], would leave a rank without a share."""
    for transformer, family in served(denoiser):
        family.check_shape(transformer.config, num_ranks, shape)


def served(denoiser: nn.Module) -> list[tuple[Any, type[SharedTokens]]]:
    """The transformers in a denoiser with their families. Raises UserError if there is another one."""
    transformers = [denoiser] if family_of(denoiser) is not None else list(denoiser.children())
    found = [(transformer, family) for transformer in transformers if (family := family_of(transformer)) is not None]
    if not transformers or len(found) < len(transformers):
        names = ", ".join(sorted(transformer.__name__ for transformer in families()))
        raise UserError(
            f"{type(denoiser).__name__} cannot share its tokens among ranks; set engine.sequence_parallel to 1, or use "
            f"a model with one of {names}"
        )
    return found


def family_of(transformer: nn.Module) -> type[SharedTokens] | None:
    """The family that serves a transformer: that of its class, or of the class that it is made from."""
    return next((families()[kind] for kind in type(transformer).__mro__ if kind in families()), None)
