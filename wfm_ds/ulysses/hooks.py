"""Hooks that edit a module's arguments or exchange border lines before a convolution. They support PEFT layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from wfm_ds.ulysses.exchange import exchange_halo


def change_arguments(module: nn.Module, change: Callable[[dict[str, Any]], None]) -> None:
    """Call `change` with a module's arguments {name: value} before each forward pass. It edits them in place.

    Positional arguments stay positional.
    """
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    def edit_call(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional = names[: len(args)]  # DeepSpeed's hooks handle only positional arguments
        arguments = dict(zip(positional, args, strict=True)) | kwargs
        change(arguments)
        return tuple(arguments.pop(name) for name in positional), arguments

    module.register_forward_pre_hook(edit_call, with_kwargs=True)


def install_halo_exchange(convolution: nn.Module, group: ProcessGroup) -> None:
    """Replace a convolution's zero padding between shards by the border lines of the neighbouring ranks.

    The convolution must pad its inputs [B,C,n,W] by one line. The padding along W and at both ends of the sequence
    remains zero.
    """
    for part in convolution.modules():  # also inside a LoRA layer: the base and lora_A pad, lora_B does not
        if isinstance(part, nn.Conv2d) and part.padding[0]:
            assert part.padding[0] == 1, part
            part.padding = (0, int(part.padding[1]))

    def add_halo(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (exchange_halo(args[0], group),)

    convolution.register_forward_pre_hook(add_halo)
