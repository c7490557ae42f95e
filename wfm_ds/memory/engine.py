"""Memory of a DeepSpeed engine on one rank: weights, optimizer states, gradients and buffers."""

from __future__ import annotations

from typing import Any

from torch import nn

from wfm_ds.algorithms import engine_policy_copies
from wfm_ds.recipe.deepspeed import add_overlap_default, find_deepspeed_config, policy_copies, read_deepspeed_config
from wfm_ds.recipe.schema import Recipe

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
FLOAT32_BYTES = 4
# Bytes per trained weight for the fp32 master weight and both moments. 8-bit moments have one scale per 256 elements.
OPTIMIZER_STATE_BYTES = {"adamw": 3 * FLOAT32_BYTES, "adamw8bit": FLOAT32_BYTES + 2 * (1 + FLOAT32_BYTES / 256)}
# DeepSpeed's defaults for keys missing in the JSON file.
REDUCE_BUCKET, PREFETCH_BUCKET, MAX_LIVE, MAX_REUSE_DISTANCE, SUB_GROUP = 500_000_000, 50_000_000, 10**9, 10**9, 10**9


class EngineMemory:
    """Memory of an engine on one rank.

    network: the network on the meta device, with adapters and requires_grad flags as in training.
    """

    def __init__(self, recipe: Recipe, network: nn.Module, world_size: int, device: str) -> None:
        self.recipe, self.network, self.world_size, self.on_cuda = recipe, network, world_size, device == "cuda"
        settings = read_deepspeed_config(find_deepspeed_config(recipe.engine.deepspeed))["zero_optimization"]
        self.zero_config: dict[str, Any] = add_overlap_default(settings, lora=recipe.lora is not None)
        self.num_copies = len(policy_copies(engine_policy_copies(recipe), lora=recipe.lora is not None))
        self.compute_bytes = DTYPE_BYTES[recipe.model.dtype]
        parameters = list(network.parameters())
        self.numel = sum(p.numel() for p in parameters)  # includes the adapters of all policies
        self.num_trained = sum(p.numel() for p in parameters if p.requires_grad)  # includes extra adapters
        # An extra adapter has the size of the exported adapter. It has no policy copies and is not exported, and each
        # optimizer step trains only one adapter.
        self.num_exported = self.num_trained // (1 + len(recipe.algorithm.extra_adapters))

    def state_parts(self) -> dict[str, int]:
        """Return {category: bytes} of memory that is never freed: weights, policy copies and optimizer states.

        With ZeRO stage 3, the gradients and the reduction bucket are never freed either.
        """
        shared = self.world_size if self.zero_config["stage"] == 3 else 1
        # Buffers (position tables, a quantized base) are not sharded.
        tables = sum(buffer.nbytes for buffer in self.network.buffers())
        weights = self.numel * self.compute_bytes // shared + tables
        if "zero_hpz_partition_size" in self.zero_config:  # one additional copy of the weights per node
            ranks = self.zero_config["zero_hpz_partition_size"]
            weights += self.numel * self.compute_bytes // (min(self.world_size, 8) if ranks == "auto" else ranks)
        parts = {"weights": weights}
        if not self.is_offloaded:  # otherwise master weights, moments, copies and gradients are on the host
            parts["policies"] = self.num_exported * FLOAT32_BYTES * self.num_copies // self.world_size
            parts["optimizer states"] = (
                int(self.num_trained * OPTIMIZER_STATE_BYTES[self.recipe.optimizer.name]) // self.world_size
            )
        if self.zero_config["stage"] == 3:
            parts["gradients"] = self.gradient_bytes
            parts["DeepSpeed"] = self.bucket_elements * FLOAT32_BYTES
        return parts

    @property
    def is_offloaded(self) -> bool:
        """Whether the optimizer states are in host memory, not in GPU memory."""
        return self.on_cuda and bool((self.zero_config.get("offload_optimizer") or {}).get("device", "none") != "none")

    @property
    def bucket_elements(self) -> int:
        return int(self.zero_config.get("reduce_bucket_size", REDUCE_BUCKET))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of this rank's float32 gradients, which are a shard of the gradients at ZeRO stages 2 and 3."""
        shared = self.world_size if self.zero_config["stage"] >= 2 else 1
        return 0 if self.is_offloaded else self.num_trained * FLOAT32_BYTES // shared

    def gather_memory(self, *, training: bool) -> dict[str, int]:
        """Return {category: bytes} of the unsharded weights that ZeRO stage 3 keeps in memory at the same time.

        Returns {} for other ZeRO stages.
        """
        if self.zero_config["stage"] != 3:
            return {}
        ahead = int(self.zero_config.get("stage3_prefetch_bucket_size", PREFETCH_BUCKET))
        largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in self.network.modules())
        reused = int(self.zero_config.get("stage3_max_reuse_distance", MAX_REUSE_DISTANCE)) // 2 if training else 0
        # Prefetched weights and, in training, the last weights of the forward pass. The backward pass needs them first.
        live = min(
            self.numel, int(self.zero_config.get("stage3_max_live_parameters", MAX_LIVE)), ahead + largest + reused
        )
        return {"gathered weights": live * self.compute_bytes}

    def optimizer_step_parts(self) -> dict[str, int]:
        """Return {category: bytes} of gradients and temporary tensors during an AdamW step without fused kernels."""
        share = 0 if self.is_offloaded else self.num_exported * FLOAT32_BYTES // self.world_size
        if self.zero_config["stage"] == 3:
            share = min(share, int(self.zero_config.get("sub_group_size", SUB_GROUP)) * FLOAT32_BYTES)
        return {"gradients": self.gradient_bytes + share, "activations": 0 if self.on_cuda else share}

    def reduction_bytes(self) -> int:
        """Return the bytes of the buffers in which DeepSpeed reduces gradients during a backward pass."""
        reduced = min(self.bucket_elements, self.num_exported) * FLOAT32_BYTES
        if self.zero_config["stage"] == 3:
            return self.bucket_elements * FLOAT32_BYTES + 2 * reduced
        size = self.compute_bytes if self.zero_config["stage"] == 2 else FLOAT32_BYTES
        buffers = 2 if self.zero_config["overlap_comm"] else 1
        contiguous = buffers * self.bucket_elements * size if self.zero_config.get("contiguous_gradients", True) else 0
        return contiguous + (reduced if self.compute_bytes != FLOAT32_BYTES else 0)

    def checkpoint_bytes(self) -> int:
        """Return the bytes of one checkpoint, summed over all ranks."""
        num_states = {"adamw": 3, "adamw8bit": 5}[self.recipe.optimizer.name]  # master, moments and their scales
        return FLOAT32_BYTES * (self.num_trained * num_states + self.num_exported * self.num_copies)

    def export_bytes(self) -> int:
        return self.num_exported * (FLOAT32_BYTES if self.recipe.lora is not None else self.compute_bytes)
