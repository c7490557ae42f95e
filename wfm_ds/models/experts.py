"""Several expert networks, one per range of noise levels, as one module for the engine.

Each call runs one expert. If no micro-batch of an optimizer step runs an expert, its gradient is zero, and Adam updates
its parameters accordingly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class Experts(nn.Module):
    """The expert networks of a denoiser, with the interface of one network. Parameters are named EXPERT.PARAMETER."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, network in networks.items():
            self.add_module(name, network)

    def forward(self, *args: Any, expert: int, **kwargs: Any) -> Any:
        return self.networks[expert](*args, **kwargs)

    @property
    def networks(self) -> list[Any]:
        return list(self.children())

    @property
    def peft_config(self) -> dict[str, Any]:
        """{adapter name: config}, identical for all experts."""
        config: dict[str, Any] = self.networks[0].peft_config
        return config

    def add_adapter(self, config: Any, adapter_name: str = "default") -> None:
        """Add a separate adapter to each expert, initialized from torch's global generator in expert order."""
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
