"""Adapters for networks of diffusers that have no methods for them."""

from __future__ import annotations

from typing import Any

from diffusers.loaders import PeftAdapterMixin
from torch import nn


def adaptable(network: Any) -> Any:
    """Return the network with the methods of diffusers' PeftAdapterMixin (`add_adapter`, `load_lora_adapter`, ...).

    Of one without them its class becomes a subclass of the same name, under which diffusers saves it as before.
    """
    if not hasattr(network, "add_adapter"):
        network.__class__ = adaptable_class(type(network))
    return network


def adaptable_class(own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (own, PeftAdapterMixin), {"__module__": own.__module__, "__doc__": own.__doc__})
