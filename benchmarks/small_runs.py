"""Count the traffic of real training steps of a small SD3, and compare it with the formulas of volumes.py."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.volumes import Network, Setting, ulysses_bytes, zero_bytes

WORLDS = (1, 2, 4)
MICRO_STEPS = 2
CONTROL_BYTES = 64  # flags and norms
SIDE, TEXT = 10, 6  # side of latents, tokens of a text; shards of 4 ranks differ in size
WIDTH, HEADS, LAYERS, CHANNELS = 20, 4, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCase:
    """Settings for training the small model."""

    stage: int
    lora: bool
    dtype: str = "float32"
    checkpointing: bool = False
    sequence_parallel: int = 1

    @property
    def name(self) -> str:
        parts = [f"zero{self.stage}", "LoRA" if self.lora else "full", self.dtype]
        parts += ["checkpointing"] * self.checkpointing
        return " ".join(parts + [f"sp={self.sequence_parallel}"] * (self.sequence_parallel > 1))


CASES = [
    *(
        TrainingCase(stage=stage, lora=lora, dtype=dtype)
        for stage, lora, dtype in [
            (1, False, "float32"),
            (1, True, "bfloat16"),
            (2, False, "bfloat16"),
            (2, True, "float32"),
            (3, False, "float32"),
            (3, False, "bfloat16"),
            (3, True, "float32"),
        ]
    ),
    TrainingCase(stage=3, lora=False, checkpointing=True),
    TrainingCase(stage=3, lora=True, checkpointing=True),
    TrainingCase(stage=2, lora=False, sequence_parallel=2),
]


def small_denoiser() -> Any:
    """Return a random SD3. Four ranks cannot divide its parameters evenly."""
    import torch
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=SIDE,
        patch_size=2,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        joint_attention_dim=13,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=11,
        pos_embed_max_size=SIDE,
        dual_attention_layers=(0,),
    )


def write_config(folder: Path, stage: int) -> Path:
    """Write the shipped DeepSpeed JSON. At stage 3 gathered weights are not retained, as for models above its
    limits."""
    from wfm_ds.recipe.deepspeed import find_deepspeed_config, read_deepspeed_config

    config = read_deepspeed_config(find_deepspeed_config(f"zero{stage}"))
    if stage == 3:
        config["zero_optimization"] |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps(config))
    return path


def count_on_rank(config: str, **case: Any) -> dict[str, Any]:
    """Return the traffic of one rank in a steady-state step, and the sizes of the denoiser's parameters."""
    import torch

    from benchmarks.traffic import TrafficCounter
    from wfm_ds.distributed.world import World
    from wfm_ds.engine.engine import DenoiserEngine
    from wfm_ds.engine.preparation import DTYPES
    from wfm_ds.recipe.schema import Recipe

    wanted = TrainingCase(**case)
    recipe = Recipe.model_validate(
        {
            "run": {"output_dir": "unused", "steps": 2},
            "model": {"path": "unused", "dtype": wanted.dtype, "gradient_checkpointing": wanted.checkpointing},
            "engine": {"deepspeed": config, "sequence_parallel": wanted.sequence_parallel},
            "lora": {"rank": 3, "alpha": 3} if wanted.lora else None,
            "data": {"kind": "paired", "path": "unused"},
            "sampling": {"height": 80, "width": 80},
            "algorithm": {"name": "sft"},
        }
    )
    world = World.join().with_replicas(wanted.sequence_parallel)
    engine = DenoiserEngine.build(
        small_denoiser(),
        recipe,
        world,
        lora_targets=("to_q", "to_v"),
        policies=frozenset(),
        accumulation=MICRO_STEPS,
        total_updates=2,
    )
    dtype = DTYPES[wanted.dtype]
    arguments = {
        "hidden_states": torch.randn(1, CHANNELS, SIDE, SIDE, dtype=dtype),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, TEXT, 13, dtype=dtype),
        "pooled_projections": torch.randn(1, 11, dtype=dtype),
    }
    traffic = {}
    for _ in range(2):  # DeepSpeed learns the order of its gathers in the first step
        with TrafficCounter(CONTROL_BYTES) as counted:
            for _ in range(MICRO_STEPS):
                velocity = engine.forward_module(**arguments, return_dict=False)[0]
                engine.backward(velocity.float().square().mean(), num_terms=MICRO_STEPS * world.dp_size)
            engine.step()
        traffic = counted.traffic()
    named = [(name, p, getattr(p, "ds_numel", p.numel())) for name, p in engine.module.named_parameters()]
    return {
        "traffic": {kind: list(found) for kind, found in traffic.items()},
        "trained": [n for _, p, n in named if p.requires_grad],
        "frozen": [n for _, p, n in named if not p.requires_grad],
        "blocks": [n for name, _, n in named if name.startswith("transformer_blocks.")],
        "rank": world.rank,
    }


def formula_bytes(case: TrainingCase, world: int, found: dict[str, Any]) -> dict[str, int]:
    """Return the bytes by formula for the traffic that `count_on_rank` counts."""
    weight_bytes = {"float32": 4, "bfloat16": 2}[case.dtype]
    network = Network(trained=found["trained"], frozen=found["frozen"], blocks=found["blocks"])
    setting = Setting(
        stage=case.stage,
        world=world,
        weight_bytes=weight_bytes,
        micro_steps=MICRO_STEPS,
        checkpointing=case.checkpointing,
    )
    sent = zero_bytes(network, setting)
    if case.sequence_parallel > 1:
        sent["all-to-all"] = exchange_bytes(case, weight_bytes, found["rank"])
    return sent


def exchange_bytes(case: TrainingCase, element_bytes: int, rank: int) -> int:
    """Return the bytes of the attention exchanges of the small SD3: joint attention in every block, and image attention
    in the first."""
    from wfm_ds.ulysses.exchange import shard_sizes

    ranks = case.sequence_parallel
    image, text = (SIDE // 2) ** 2, TEXT
    own_image, own_text = (shard_sizes(n, ranks, "tokens")[rank % ranks] for n in (image, text))
    heads = shard_sizes(HEADS, ranks, "heads")[rank % ranks]
    return ulysses_bytes(
        [*[(own_image + own_text, image + text)] * LAYERS, (own_image, image)],
        WIDTH,
        WIDTH // HEADS * heads,
        own_image * 4 * CHANNELS,
        ranks=ranks,
        element_bytes=element_bytes,
        micro_steps=MICRO_STEPS,
    )


def count_rows(world: int, cases: Sequence[TrainingCase], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rank 0's traffic of each case and the formulas' bytes: one row for each kind."""
    rows = []
    for case, counted in zip(cases, found, strict=True):
        formulas = formula_bytes(case, world, counted)
        for kind in sorted({*formulas, *counted["traffic"]}):
            calls, num_bytes = counted["traffic"].get(kind, (0, 0))
            rows.append(
                {
                    "ranks": world,
                    "training": case.name,
                    "parameters": sum(counted["trained"]) + sum(counted["frozen"]),
                    "trained": sum(counted["trained"]),
                    "kind": kind,
                    "calls": calls,
                    "bytes counted": num_bytes,
                    "bytes by formula": formulas.get(kind),
                }
            )
    return rows


def count_all_cases(folder: Path) -> list[dict[str, Any]]:
    for stage in (1, 2, 3):
        write_config(folder, stage)
    rows = []
    for world in WORLDS:
        cases = [case for case in CASES if world % case.sequence_parallel == 0]
        found = run_ranks(world, folder)[0]
        rows += count_rows(world, cases, found)
    return rows


def run_ranks(ranks: int, folder: Path) -> list[Any]:
    """Run `python -m benchmarks.scaling` as ranks on a CPU. Return what each rank wrote (`rank_main`), by rank.

    Raises SystemExit if one of them fails.
    """
    from wfm_ds.distributed.accelerator import find_free_port

    files = [folder / f"rank_{rank}.json" for rank in range(ranks)]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    world["MASTER_PORT"] = str(find_free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scaling", "--rank", str(file), str(folder), str(ranks)],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=sys.stderr,
        )
        for rank, file in enumerate(files)
    ]
    if any([process.wait() for process in processes]):  # a list: waits for all ranks, also after a failure
        raise SystemExit("a rank failed")
    return [json.loads(file.read_text()) for file in files]


def rank_main(file: Path, folder: Path, world: int) -> None:
    cases = [case for case in CASES if world % case.sequence_parallel == 0]
    found = [count_on_rank(str(folder / f"zero{case.stage}.json"), **dataclasses.asdict(case)) for case in cases]
    file.write_text(json.dumps(found))
