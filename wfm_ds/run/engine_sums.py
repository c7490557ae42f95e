"""Memory of an engine on one rank, whatever it trains: weights, optimizer states, gradients and DeepSpeed's buffers."""

from __future__ import annotations

from typing import Any

from torch import nn

from wfm_ds.algorithms import engine_policies
from wfm_ds.recipe.deepspeed import find_config, policy_copies, read_config, with_overlap
from wfm_ds.recipe.schema import Recipe

BYTES = {"bfloat16": 2, "float32": 4}
FLOAT32 = 4
# Bytes of a trained weight's master and of both its moments; in eight bits 256 elements have a scale.
MASTER_AND_MOMENTS = {"adamw": 3 * FLOAT32, "adamw8bit": FLOAT32 + 2 * (1 + FLOAT32 / 256)}
# DeepSpeed's own defaults, for keys that a JSON file leaves out.
REDUCE_BUCKET, PREFETCH_BUCKET, MAX_LIVE, MAX_REUSE_DISTANCE, SUB_GROUP = 500_000_000, 50_000_000, 10**9, 10**9, 10**9


class EngineSums:
    """The terms that follow from a network on the meta device with its adapters and flags of what trains."""

    def __init__(self, recipe: Recipe, network: nn.Module, world_size: int, device: str) -> None:
        self.recipe, self.network, self.world_size, self.on_cuda = recipe, network, world_size, device == "cuda"
        stated = read_config(find_config(recipe.engine.deepspeed))["zero_optimization"]
        self.zero: dict[str, Any] = with_overlap(stated, lora=recipe.lora is not None)
        self.num_copies = len(policy_copies(engine_policies(recipe), lora=recipe.lora is not None))
        self.compute = BYTES[recipe.model.dtype]
        parameters = list(network.parameters())
        self.numel = sum(p.numel() for p in parameters)  # adapters of all policies among them
        self.trained = sum(p.numel() for p in parameters if p.requires_grad)

    def states(self) -> dict[str, int]:
        """Weights, optimizer states and copies; gradients come in training."""
        shared = self.world_size if self.zero["stage"] == 3 else 1
        # Tables of positions, and a base in fewer bits: not cut up.
        tables = sum(buffer.nbytes for buffer in self.network.buffers())
        weights = self.numel * self.compute // shared + tables
        if "zero_hpz_partition_size" in self.zero:  # and a copy of the weights in each node
            ranks = self.zero["zero_hpz_partition_size"]
            weights += self.numel * self.compute // (min(self.world_size, 8) if ranks == "auto" else ranks)
        parts = {"weights": weights}
        if not self.offloaded:  # else masters, moments, copies and gradients lie on the host
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
        """Tell if the optimizer works on the host, beside a GPU."""
        return self.on_cuda and bool((self.zero.get("offload_optimizer") or {}).get("device", "none") != "none")

    @property
    def bucket(self) -> int:
        """Elements of one of DeepSpeed's reduction buffers."""
        return int(self.zero.get("reduce_bucket_size", REDUCE_BUCKET))

    @property
    def gradients(self) -> int:
        """Summed in float32 at every stage (engine/accumulation.py), and cut over the ranks from ZeRO-2 on."""
        shared = self.world_size if self.zero["stage"] >= 2 else 1
        return 0 if self.offloaded else self.trained * FLOAT32 // shared

    def gathered(self, *, training: bool) -> dict[str, int]:
        """Weights that ZeRO-3 has brought together: ahead of their use, and, in training, the last ones of the forward
        pass, with which the backward pass begins."""
        if self.zero["stage"] != 3:
            return {}
        ahead = int(self.zero.get("stage3_prefetch_bucket_size", PREFETCH_BUCKET))
        largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in self.network.modules())
        reused = int(self.zero.get("stage3_max_reuse_distance", MAX_REUSE_DISTANCE)) // 2 if training else 0
        live = min(self.numel, int(self.zero.get("stage3_max_live_parameters", MAX_LIVE)), ahead + largest + reused)
        return {"gathered weights": live * self.compute}

    def stepping(self) -> dict[str, int]:
        """The optimizer step: the gradients, flattened once more, and what an unfused AdamW needs meanwhile."""
        share = 0 if self.offloaded else self.trained * FLOAT32 // self.world_size
        if self.zero["stage"] == 3:
            share = min(share, int(self.zero.get("sub_group_size", SUB_GROUP)) * FLOAT32)
        return {"gradients": self.gradients + share, "activations": 0 if self.on_cuda else share}

    def reducing(self) -> int:
        """Buffers in which DeepSpeed sums gradients over the ranks during a backward pass."""
        reduced = min(self.bucket, self.trained) * FLOAT32
        if self.zero["stage"] == 3:
            return self.bucket * FLOAT32 + 2 * reduced
        size = self.compute if self.zero["stage"] == 2 else FLOAT32
        buffers = 2 if self.zero["overlap_comm"] else 1
        contiguous = buffers * self.bucket * size if self.zero.get("contiguous_gradients", True) else 0
        return contiguous + (reduced if self.compute != FLOAT32 else 0)

    def state_bytes(self) -> int:
        """All ranks' files of one checkpoint."""
        kept = {"adamw": 3, "adamw8bit": 5}[self.recipe.optimizer.name]  # master, moments, and scales of theirs
        return self.trained * FLOAT32 * (kept + self.num_copies)

    def export_bytes(self) -> int:
        """The weights that training changes, as they are exported."""
        return self.trained * (FLOAT32 if self.recipe.lora is not None else self.compute)
