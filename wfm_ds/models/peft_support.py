"""LoRA support for diffusers networks that lack it."""

from __future__ import annotations

from typing import Any

from diffusers.loaders import PeftAdapterMixin


def add_peft_methods(network: Any) -> Any:
    """Add the methods of diffusers' PeftAdapterMixin (`add_adapter`, `load_lora_adapter`, ...) to a network, in place.

    Its class becomes a subclass with the same name, so diffusers saves the network as before.
    """
    network_class = type(network)
    if not issubclass(network_class, PeftAdapterMixin):
        namespace = {"__module__": network_class.__module__}
        network.__class__ = type(network_class.__name__, (network_class, PeftAdapterMixin), namespace)
    return network
