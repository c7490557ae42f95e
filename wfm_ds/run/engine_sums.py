"""Memory of a DeepSpeed engine on one rank: weights, optimizer states, gradients and buffers."""

from __future__ import annotations

from typing import Any

from torch import nn

from wfm_ds.algorithms import engine_policies
from wfm_ds.recipe.deepspeed import find_config, policy_copies, read_config, with_overlap
from wfm_ds.recipe.schema import Recipe

BYTES = {"bfloat16": 2, "float32": 4}
FLOAT32 = 4
# Bytes per trained weight of the fp32 master and both moments. 8-bit moments have one scale per 256 elements.
MASTER_AND_MOMENTS = {"adamw": 3 * FLOAT32, "adamw8bit": FLOAT32 + 2 * (1 + FLOAT32 / 256)}
# DeepSpeed's defaults for keys missing in the JSON file.
REDUCE_BUCKET, PREFETCH_BUCKET, MAX_LIVE, MAX_REUSE_DISTANCE, SUB_GROUP = 500_000_000, 50_000_000, 10**9, 10**9, 10**9


class EngineSums:
    """Memory terms of a network on the meta device, with its adapters and requires_grad flags."""

    def __init__(self, recipe: Recipe, network: nn.Module, world_size: int, device: str) -> None:
        self.recipe, self.network, self.world_size, self.on_cuda = recipe, network, world_size, device == "cuda"
        settings = read_config(find_config(recipe.engine.deepspeed))["zero_optimization"]
        self.zero: dict[str, Any] = with_overlap(settings, lora=recipe.lora is not None)
        self.num_copies = len(policy_copies(engine_policies(recipe), lora=recipe.lora is not None))
        self.compute = BYTES[recipe.model.dtype]
        parameters = list(network.parameters())
        self.numel = sum(p.numel() for p in parameters)  # includes the adapters of all policies
        self.trained = sum(p.numel() for p in parameters if p.requires_grad)

    def states(self) -> dict[str, int]:
        """Return the bytes of weights, optimizer states and weight copies. Gradients are added in training."""
        shared = self.world_size if self.zero["stage"] == 3 else 1
        # Buffers (position tables, a quantized base) are not sharded.
        tables = sum(buffer.nbytes for buffer in self.network.buffers())
        weights = self.numel * self.compute // shared + tables
        if "zero_hpz_partition_size" in self.zero:  # one additional copy of the weights per node
            ranks = self.zero["zero_hpz_partition_size"]
            weights += self.numel * self.compute // (min(self.world_size, 8) if ranks == "auto" else ranks)
        parts = {"weights": weights}
        if not self.offloaded:  # else masters, moments, copies and gradients are on the host
            parts["policies"] = self.trained * FLOAT32 * self.num_copies // self.world_size
            parts["optimizer states"] = (
                int(self.trained * MASTER_AND_MOMENTS[self.recipe.optimizer.name]) // self.world_size
            )
        if self.zero["stage"] == 3:
            parts["gradients"] = self.gradients
            parts["DeepSpeed"] = self.bucket * FLOAT32
        return parts

    @property
    def offloaded(self) -> bool:
        """Whether the optimizer is offloaded from the GPU to the host."""
        return self.on_cuda and bool((self.zero.get("offload_optimizer") or {}).get("device", "none") != "none")

    @property
    def bucket(self) -> int:
        """Elements of one DeepSpeed reduction bucket."""
        return int(self.zero.get("reduce_bucket_size", REDUCE_BUCKET))

    @property
    def gradients(self) -> int:
        """Gradient bytes. Accumulated in float32 at every stage (engine/accumulation.py), sharded from ZeRO-2 on."""
        shared = self.world_size if self.zero["stage"] >= 2 else 1
        return 0 if self.offloaded else self.trained * FLOAT32 // shared

    def gathered(self, *, training: bool) -> dict[str, int]:
        """Return the bytes of weights gathered by ZeRO-3: prefetched ones, and in training the last ones of the forward
        pass, kept for the backward pass."""
        if self.zero["stage"] != 3:
            return {}
        ahead = int(self.zero.get("stage3_prefetch_bucket_size", PREFETCH_BUCKET))
        largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in self.network.modules())
        reused = int(self.zero.get("stage3_max_reuse_distance", MAX_REUSE_DISTANCE)) // 2 if training else 0
        live = min(self.numel, int(self.zero.get("stage3_max_live_parameters", MAX_LIVE)), ahead + largest + reused)
        return {"gathered weights": live * self.compute}

    def stepping(self) -> dict[str, int]:
        """Return the bytes of the optimizer step: flattened gradients and temporaries of an unfused AdamW."""
        share = 0 if self.offloaded else self.trained * FLOAT32 // self.world_size
        if self.zero["stage"] == 3:
            share = min(share, int(self.zero.get("sub_group_size", SUB_GROUP)) * FLOAT32)
        return {"gradients": self.gradients + share, "activations": 0 if self.on_cuda else share}

    def reducing(self) -> int:
        """Return the bytes of DeepSpeed's gradient reduction buffers in a backward pass."""
        reduced = min(self.bucket, self.trained) * FLOAT32
        if self.zero["stage"] == 3:
            return self.bucket * FLOAT32 + 2 * reduced
        size = self.compute if self.zero["stage"] == 2 else FLOAT32
        buffers = 2 if self.zero["overlap_comm"] else 1
        contiguous = buffers * self.bucket * size if self.zero.get("contiguous_gradients", True) else 0
        return contiguous + (reduced if self.compute != FLOAT32 else 0)

    def state_bytes(self) -> int:
        """Return the size of one checkpoint over all ranks."""
        num_states = {"adamw": 3, "adamw8bit": 5}[self.recipe.optimizer.name]  # master, moments and their scales
        return self.trained * FLOAT32 * (num_states + self.num_copies)

    def export_bytes(self) -> int:
        """Return the size of the exported weights."""
        return self.trained * (FLOAT32 if self.recipe.lora is not None else self.compute)
