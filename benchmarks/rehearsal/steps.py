"""Waits for the device, and copies with their bytes, in one training step, by phase.

The counted step is a warm one: all texts are cached, and the optimizer has its states.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.rehearsal.fake_machine import fake_gpus
from benchmarks.rehearsal.record import Record

WARM_STEPS = 2
# 2 ranks of one replica each, bfloat16, ZeRO-2; an RL step has 16 samples in 2 groups.
COMMON = ("model.dtype=bfloat16", "engine.deepspeed=zero2", "engine.micro_batch_size=2", "engine.max_forward_batch=4")
RL = ("rollout.prompts_per_step=2", "rollout.group_size=8", "sampling.guidance_scale=2.0")
STEPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "SFT, LoRA": ("sd3_sft_lora", ("engine.gradient_accumulation=4",)),
    "NFT, LoRA": ("sd3_nft", RL),
    "NFT, full": ("sd3_nft_full", RL),
    "Flow-GRPO, LoRA": ("sd3_flow_grpo", RL),
    "Flow-GRPO-Fast, LoRA": ("sd3_flow_grpo_fast", RL),
    "DanceGRPO, full": ("sd3_dance_grpo", RL),
    "DDRL, LoRA": ("sd3_ddrl", ("rollout.prompts_per_step=2", "rollout.group_size=8")),
}


def count_step(name: str, world_size: int = 2) -> Record:
    """Return the record of one warm step."""
    recipe, own = STEPS[name]
    with fake_gpus(world_size=world_size) as record, tempfile.TemporaryDirectory() as temporary:
        from benchmarks.rehearsal import runs

        folder = Path(temporary)
        overrides = [*COMMON, *own, *runs.data_overrides(recipe, folder)]
        with runs.open_loop(record, recipe, overrides, folder) as loop:
            loop.start()
            for _ in range(WARM_STEPS):
                loop.run_step()
            record.clear()
            loop.run_step()
    return record


def step_rows(name: str, record: Record) -> list[dict[str, Any]]:
    """Return one row for each phase and window of a step, and one for all."""
    found: dict[str, dict[str, Any]] = {}
    for e in record.events:
        for where in (f"{e.phase or 'end of step'}{', ' if e.window else ''}{e.window}", "all"):
            row = found.setdefault(where, {"step": name, "phase": where, **dict.fromkeys(COLUMNS, 0)})
            if e.kind == "sync":
                row["waits"] += 1
            else:
                prefix = "" if e.blocking else "non-"
                row[f"{prefix}blocking copies"] += 1
                row[f"{prefix}blocking bytes"] += e.num_bytes
    return [*(row for where, row in found.items() if where != "all"), found["all"]]


COLUMNS = ("waits", "blocking copies", "blocking bytes", "non-blocking copies", "non-blocking bytes")


def list_sites(record: Record) -> list[dict[str, Any]]:
    """Return the code positions of events, most frequent first."""
    counts: dict[tuple[str, ...], list[int]] = {}
    for e in record.events:
        key = (e.phase or "end of step", e.window, e.what, "" if e.blocking else "non-blocking", e.place)
        counts.setdefault(key, []).append(e.num_bytes)
    names = ("phase", "window", "what", "how", "where")
    return [
        {"times": len(sizes), "bytes": sum(sizes), **dict(zip(names, key, strict=True))}
        for key, sizes in sorted(counts.items(), key=lambda item: -len(item[1]))
    ]
