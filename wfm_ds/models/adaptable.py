"""Adapters for networks of diffusers that have no methods for them."""

from __future__ import annotations

from typing import Any

from diffusers.loaders import PeftAdapterMixin


def adaptable(network: Any) -> Any:
    """Return the network with the methods of diffusers' PeftAdapterMixin (`add_adapter`, `load_lora_adapter`, ...).

    Of one without them its class becomes a subclass of the same name, under which diffusers saves it as before.
    """
    own = type(network)
    if not issubclass(own, PeftAdapterMixin):
        network.__class__ = type(own.__name__, (own, PeftAdapterMixin), {"__module__": own.__module__})
    return network
