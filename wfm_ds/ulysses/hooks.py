"""Changes of single modules: of the arguments that they are called with, and of a convolution that needs its
neighbours' lines. In PEFT's layers as in plain ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from wfm_ds.ulysses.exchange import halo


def change_arguments(module: nn.Module, change: Callable[[dict[str, Any]], None]) -> None:
    """Have `change` replace the arguments of each call of the module: it gets them by name in a dict
    that it changes.

    Positional ones stay positional: DeepSpeed's own hooks see no others.
    """
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    def changed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional = names[: len(args)]
        arguments = dict(zip(positional, args, strict=True)) | kwargs
        change(arguments)
        return tuple(arguments.pop(name) for name in positional), arguments

    module.register_forward_pre_hook(changed, with_kwargs=True)


def trade_lines(convolution: nn.Module, group: ProcessGroup) -> None:
    """Make a convolution with one line of zero padding, over inputs [B,C,n,W], take the lines of the neighbouring ranks
    instead. Its zeros stay at the ends of the whole, and along W."""
    for part in convolution.modules():  # itself, or those of an adapter: the base and lora_A are padded, lora_B is not
        if isinstance(part, nn.Conv2d) and part.padding[0]:
            assert part.padding[0] == 1, part
            part.padding = (0, int(part.padding[1]))

    def widened(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (halo(args[0], group),)

    convolution.register_forward_pre_hook(widened)
