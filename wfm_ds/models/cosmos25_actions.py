"""Cosmos-Predict2.5 robot/action-cond: videos that continue a first frame and follow robot actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.models.cosmos25 import Cosmos25
from wfm_ds.models.cosmos25_action_network import ACTIONS_PER_LATENT
from wfm_ds.models.input_specs import InputSpec
from wfm_ds.pinned_memory import copy_to_device

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning

ACTIONS = "actions"


class Cosmos25Actions(Cosmos25):
    """Cosmos-Predict2.5 with actions. All latent frames have the timestep sigma, also the conditioning frames."""

    family = "cosmos25_actions"
    pipeline_classes = ("CosmosActionPipeline",)
    optional_conditioning_keys = frozenset({ACTIONS})
    input_specs: ClassVar[Mapping[str, InputSpec]] = MappingProxyType({ACTIONS: InputSpec(rank=2, required=True)})

    def encode_inputs(
        self, inputs: Sequence[Mapping[str, npt.NDArray[Any]]], num_frames: int, size: tuple[int, int]
    ) -> Conditioning:
        """Return {actions: float32 [batch, num_frames - 1, action_dim]}.

        Raises ValueError if a sample has no actions, or actions of another shape.
        """
        expected = (num_frames - 1, self.config.action_dim)
        for sample in inputs:
            if ACTIONS not in sample:
                raise ValueError(f"{ACTIONS} is missing")
            if sample[ACTIONS].shape != expected:
                raise ValueError(f"{ACTIONS} must be {list(expected)}, got {list(sample[ACTIONS].shape)}")
        rows = np.stack([np.asarray(sample[ACTIONS], np.float32) for sample in inputs])
        return {ACTIONS: copy_to_device(torch.from_numpy(rows), self.device)}

    def input_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {ACTIONS: (ACTIONS_PER_LATENT * (shape[1] - 1), self.config.action_dim)}

    def frame_timesteps(self, sigma: Tensor, mask: Tensor) -> Tensor:
        return sigma.view(-1, 1, 1, 1, 1).expand_as(mask)

    def network_inputs(self, conditioning: Conditioning) -> dict[str, Tensor]:
        if ACTIONS not in conditioning:
            raise ValueError(f"conditioning lacks {ACTIONS}, which this network needs")
        return {ACTIONS: conditioning[ACTIONS].to(self.dtype)}
