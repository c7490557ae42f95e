"""A memory estimate before anything is trained: weights, gradients, optimizer and policy copies; not activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from wfm_ds.algorithms import rl_policies
from wfm_ds.recipe.deepspeed import find_config, policy_copies, read_config
from wfm_ds.recipe.schema import Recipe

GIB = 2**30
BYTES = {"bfloat16": 2, "float32": 4}


def lora_parameters(denoiser: nn.Module, targets: Sequence[str], rank: int) -> int:
    """Parameters of A and B on every linear layer whose name ends with a target."""
    suffixes = tuple(f".{target}" for target in targets)  # whole names, as PEFT matches them
    layers = [
        m
        for name, m in denoiser.named_modules()
        if isinstance(m, nn.Linear) and (name in targets or name.endswith(suffixes))
    ]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Parameters of a denoiser, and the bytes that they and what training adds take."""

    total: int
    trained: int
    stage: int  # of ZeRO
    rank_bytes: float  # weights, gradients and states of one rank
    checkpoint_bytes: float  # all ranks' files of one checkpoint
    export_bytes: float


def memory(recipe: Recipe, denoiser: nn.Module, lora_targets: Sequence[str], world_size: int) -> Memory:
    """Estimate for a denoiser, which may be on the meta device; `lora_targets` are its family's."""
    total = sum(parameter.numel() for parameter in denoiser.parameters())
    trained, added = total, 0
    if recipe.lora is not None:
        trained = added = lora_parameters(denoiser, recipe.lora.target_modules or lora_targets, recipe.lora.rank)
    stage = read_config(find_config(recipe.engine.deepspeed)).get("zero_optimization", {}).get("stage", 0)
    compute = BYTES[recipe.model.dtype]
    weights = (total + added) * compute / (world_size if stage == 3 else 1)
    # Summed in float32 at every stage (engine/accumulation.py), and cut over the ranks from ZeRO-2 on.
    gradients = trained * 4 / (world_size if stage >= 2 else 1)
    # Master weights and two Adam moments in float32, and each further policy as a float32 copy cut like the masters.
    policies = rl_policies(recipe) if recipe.is_rl else frozenset[str]()
    copies = int(recipe.ema is not None) + len(policy_copies(policies, lora=recipe.lora is not None))
    states = trained * 4 * (3 + copies)
    return Memory(
        total=total,
        trained=trained,
        stage=stage,
        rank_bytes=weights + gradients + states / world_size,
        checkpoint_bytes=states,
        export_bytes=trained * (4 if recipe.lora is not None else compute),
    )


def memory_lines(recipe: Recipe, denoiser: nn.Module, lora_targets: Sequence[str], world_size: int) -> list[str]:
    """Estimated memory per rank of the denoiser's states, as lines for `--check`."""
    found = memory(recipe, denoiser, lora_targets, world_size)
    return [
        f"denoiser parameters        {found.total:,}, trained {found.trained:,}",
        f"memory a rank, estimated   {found.rank_bytes / GIB:.2f} GiB for weights, gradients and states "
        f"(ZeRO stage {found.stage}); activations, text encoders and VAE come on top",
    ]
