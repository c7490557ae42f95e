"""Bytes that an optimizer step sends, by kind, as formulas; a test compares them with the counts of real runs.

Payload of a call as traffic.py counts it, on one rank. Gradients travel in float32, weights in the dtype of training.
What ZeRO-3 gathers in the backward pass of a LoRA is not known in advance: DeepSpeed gathers what lies behind the first
adapter; the formula is the upper bound, everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Elements of each parameter of a denoiser."""

    trained: Sequence[int]
    frozen: Sequence[int]
    blocks: Sequence[int]  # of them, those inside the blocks that gradient checkpointing computes twice

    @property
    def all(self) -> list[int]:
        return [*self.trained, *self.frozen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of the training."""

    stage: int  # of ZeRO
    world: int
    weight_bytes: int  # of an element in the dtype of training
    micro_steps: int  # with gradient, in an optimizer step
    checkpointing: bool = False
    forwards: int = 0  # without gradient, in an optimizer step


def padded(numels: Sequence[int], world: int) -> int:
    """Elements of shards of equal size."""
    return sum(math.ceil(n / world) * world for n in numels)


def zero_bytes(network: Network, setting: Setting) -> dict[str, int]:
    """Return the bytes of ZeRO's collectives in an optimizer step, by kind; {} in a world of one."""
    if setting.world == 1:
        return {}
    gradients = GRADIENT_BYTES * sum(network.trained)
    if setting.stage < 3:
        # Stage 1 adds micro-steps up at home; stage 2 gives each micro-step's gradients to their owners at once.
        reductions = 1 if setting.stage == 1 else setting.micro_steps
        gathered = math.ceil(sum(network.trained) / (2 * setting.world)) * 2 * setting.world  # DeepSpeed's alignment
        return {"all-reduce": reductions * gradients, "all-gather": setting.weight_bytes * gathered}
    whole = padded(network.all, setting.world)
    again = padded(network.blocks, setting.world) if setting.checkpointing else 0
    passes = setting.micro_steps * (2 * whole + again) + setting.forwards * whole
    return {
        "all-gather": setting.weight_bytes * passes,
        "reduce-scatter": setting.micro_steps * GRADIENT_BYTES * padded(network.trained, setting.world),
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
    """Return the bytes of the all-to-alls of `micro_steps` forwards and backwards of one sample, on one rank.

    attentions: tokens of this rank and of all ranks in each attention. width: of q, k, v and of what attention gives,
    own_width: of this rank's heads. output: elements of this rank's share of the result, which all ranks get.
    """
    # By tokens: q, k and v there, and the gradient of the result. By heads: the result, and the gradients of q, k, v.
    by_tokens = 4 * width * sum(own for own, _ in attentions)
    by_heads = 4 * own_width * sum(whole for _, whole in attentions)
    return micro_steps * element_bytes * (by_tokens + by_heads + ranks * output)


def on_the_wire(kind: str, payload: float, ranks: int) -> float:
    """Bytes that a rank sends for a call, with ring algorithms and pairwise exchanges."""
    share = (ranks - 1) / ranks
    return payload * {"all-reduce": 2 * share, "broadcast": 1.0, "reduce": 1.0}.get(kind, share)
