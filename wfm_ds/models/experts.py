"""Several networks that share the noise levels among them, as the one module that an engine trains.

Each call runs one of them. The others get no gradient from it: what their parameters do in an optimizer step in which
none of its micro-steps ran them is what Adam does with a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class Experts(nn.Module):
    """Networks of one architecture by name, in the order of their experts; parameters are called NAME.PARAMETER.

    Offers what an engine asks of a diffusers model, and does it to each of them.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, network in networks.items():
            self.add_module(name, network)

    def forward(self, *args: Any, expert: int, **kwargs: Any) -> Any:
        """The output of this expert for the other arguments."""
        return self.networks[expert](*args, **kwargs)

    @property
    def networks(self) -> list[Any]:
        return list(self.children())

    @property
    def peft_config(self) -> dict[str, Any]:
        """Adapter configurations by name: all experts have the same."""
        config: dict[str, Any] = self.networks[0].peft_config
        return config

    def add_adapter(self, config: Any, adapter_name: str = "default") -> None:
        """Give each expert an adapter of its own, drawn in turn from torch's generator."""
        for network in self.networks:
            network.add_adapter(config, adapter_name=adapter_name)

    def set_adapter(self, adapter_name: str) -> None:
        for network in self.networks:
            network.set_adapter(adapter_name)

    def enable_adapters(self) -> None:
        for network in self.networks:
            network.enable_adapters()

    def disable_adapters(self) -> None:
        for network in self.networks:
            network.disable_adapters()

    def enable_gradient_checkpointing(self) -> None:
        for network in self.networks:
            network.enable_gradient_checkpointing()

    def disable_gradient_checkpointing(self) -> None:
        for network in self.networks:
            network.disable_gradient_checkpointing()
