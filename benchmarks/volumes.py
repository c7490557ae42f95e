"""Formulas for the bytes that an optimizer step sends, by kind. A test compares them with counts of real runs.

The payload of a call on one rank is defined as in traffic.py. Gradients are sent in float32, weights in the training
dtype. The gathers of ZeRO-3 in the backward pass of a LoRA are not known in advance: DeepSpeed gathers the weights
after the first adapter. The formula is the upper bound: all weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Numbers of elements of a denoiser's parameters."""

    trained: Sequence[int]
    frozen: Sequence[int]
    blocks: Sequence[int]  # parameters inside the blocks that gradient checkpointing recomputes

    @property
    def all(self) -> list[int]:
        return [*self.trained, *self.frozen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of the training."""

    stage: int  # of ZeRO
    world: int
    weight_bytes: int  # bytes of an element in the training dtype
    micro_steps: int  # per optimizer step, with gradient
    checkpointing: bool = False
    forwards: int = 0  # per optimizer step, without gradient


def pad_elements(numels: Sequence[int], world: int) -> int:
    """Return the number of elements in shards of equal size."""
    return sum(math.ceil(n / world) * world for n in numels)


def zero_bytes(network: Network, setting: Setting) -> dict[str, int]:
    """Return the bytes of ZeRO's collectives in an optimizer step, by kind; {} for one rank."""
    if setting.world == 1:
        return {}
    gradients = GRADIENT_BYTES * sum(network.trained)
    if setting.stage < 3:
        # Stage 1 accumulates gradients locally; stage 2 reduces the gradients of each micro-step immediately.
        reductions = 1 if setting.stage == 1 else setting.micro_steps
        gathered = math.ceil(sum(network.trained) / (2 * setting.world)) * 2 * setting.world  # DeepSpeed's alignment
        return {"all-reduce": reductions * gradients, "all-gather": setting.weight_bytes * gathered}
    whole = pad_elements(network.all, setting.world)
    again = pad_elements(network.blocks, setting.world) if setting.checkpointing else 0
    passes = setting.micro_steps * (2 * whole + again) + setting.forwards * whole
    return {
        "all-gather": setting.weight_bytes * passes,
        "reduce-scatter": setting.micro_steps * GRADIENT_BYTES * pad_elements(network.trained, setting.world),
    }


def ulysses_bytes(
    attentions: Sequence[tuple[int, int]],
    width: int,
    own_width: int,
    output: int,
    *,
    ranks: int,
    element_bytes: int,
    micro_steps: int,
) -> int:
    """Return the bytes of the all-to-alls for `micro_steps` forward and backward passes of one sample, on one rank.

    attentions: tokens of this rank and of all ranks for each attention. width: of q, k, v and the attention output;
    own_width: of this rank's heads. output: elements of this rank's shard of the result, which all ranks receive.
    """
    # Sharded by tokens: q, k, v and the gradient of the result. By heads: the result and the gradients of q, k, v.
    by_tokens = 4 * width * sum(own for own, _ in attentions)
    by_heads = 4 * own_width * sum(whole for _, whole in attentions)
    return micro_steps * element_bytes * (by_tokens + by_heads + ranks * output)


def wire_bytes(kind: str, payload: float, ranks: int) -> float:
    """Return the bytes that a rank sends in a call, for ring algorithms and pairwise exchanges."""
    share = (ranks - 1) / ranks
    return payload * {"all-reduce": 2 * share, "broadcast": 1.0, "reduce": 1.0}.get(kind, share)
