"""Count bytes between ranks, and predict the time of a step on many GPUs: `python -m benchmarks.scaling`.

    python -m benchmarks.scaling count                       real steps of a small SD3 on 1, 2 and 4 CPU ranks
    python -m benchmarks.scaling predict [--model wan14b]    the time of a step on 8 to 1024 GPUs

`count` compares every collective of a training step with the formulas of volumes.py. `predict` combines these formulas
for a released model with its FLOPs (benchmarks/flops.py) and the bandwidths of hardware.yaml. It is a model, not a
measurement, and prints its assumptions.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import report
from benchmarks.small_runs import count_all_cases, rank_main
from benchmarks.volumes import Network, Setting, wire_bytes, zero_bytes

HARDWARE = Path(__file__).parent / "hardware.yaml"
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Cluster:
    """hardware.yaml with the assumed efficiencies applied. In bytes, seconds and FLOPs."""

    name: str
    gpus_per_node: int
    flops: float
    nvlink: float
    network: float
    overlap: float
    latency: float
    latency_per_doubling: float

    @classmethod
    def read(cls, path: Path) -> Cluster:
        known = yaml.safe_load(path.read_text())
        assumed = known["assumed"]
        return cls(
            name=known["name"],
            gpus_per_node=known["gpus_per_node"],
            flops=1e12 * known["peak_tflops"] * assumed["compute_share"],
            nvlink=1e9 * known["nvlink_gb_s"] * assumed["nvlink_share"],
            network=1e9 * known["network_gb_s"] * assumed["network_share"],
            overlap=assumed["overlap"],
            latency=1e-6 * assumed["latency_us"],
            latency_per_doubling=1e-6 * assumed["latency_per_doubling_us"],
        )

    def seconds(self, kind: str, payload: float, calls: float, ranks: int) -> float:
        """Return the seconds of `calls` collectives over `ranks` GPUs with `payload` bytes in total.

        Within a node they run at NVLink's speed. Over several nodes, each GPU of a node has a ring that uses that GPU's
        adapter, so bytes pass between two nodes at the speed of all adapters together, unless NVLink is slower.
        """
        nodes = math.ceil(ranks / self.gpus_per_node)
        bandwidth = self.nvlink if nodes == 1 else min(self.nvlink, self.network * self.gpus_per_node)
        latency = self.latency + self.latency_per_doubling * math.log2(nodes)
        return wire_bytes(kind, payload, ranks) / bandwidth + calls * latency

    def lines(self) -> list[str]:
        """Return the assumptions of a prediction, as lines of text."""
        return [
            f"{self.name}, {self.gpus_per_node} GPUs in each node; each GPU reaches {self.flops / 1e12:.0f} TFLOP/s, "
            f"{self.nvlink / 1e9:.0f} GB/s of NVLink and {self.network / 1e9:.0f} GB/s of network",
            f"{self.overlap:.0%} of ZeRO's collectives can overlap with computation, and none of Ulysses",
            f"a collective starts after {1e6 * self.latency:.0f} us and {1e6 * self.latency_per_doubling:.0f} us more "
            "for each doubling of nodes; ZeRO-3 has one collective for each block and pass",
            "every GPU does the same work at any number of GPUs (the batch grows with them); not included: text "
            "encoders, VAE, rewards, the optimizer's arithmetic, stragglers and memory limits",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of one GPU in a step, independent of the number of GPUs."""

    title: str
    network: Network
    flops: float
    micro_steps: int  # with gradient
    updates: int  # optimizer steps
    forwards: int  # without gradient
    num_blocks: int
    checkpointing: bool
    stage: int

    def collectives(self, world: int) -> dict[str, tuple[float, float]]:
        """Return (bytes, calls) of a step on one rank, by kind."""
        setting = Setting(
            stage=self.stage,
            world=world,
            weight_bytes=2,
            micro_steps=self.micro_steps // self.updates,
            checkpointing=self.checkpointing,
            forwards=self.forwards // self.updates,
        )
        passes = self.micro_steps * (3 if self.checkpointing else 2) + self.forwards
        calls = {1: self.updates, 2: self.micro_steps, 3: passes * self.num_blocks}[self.stage]
        return {kind: (self.updates * n, calls) for kind, n in zero_bytes(self.network, setting).items()}


def load_work(model: str, algorithm: str, stage: int, lora_rank: int | None) -> Work:
    """Return the work of a released model with an algorithm's published batch, counted by benchmarks.flops for eight
    GPUs."""
    from benchmarks.flops import CountedModel, RecipeCost, cost_rows, make_published_recipe
    from benchmarks.released import RELEASED
    from wfm_ds.recipe.run_sizes import derive_run_sizes

    recipe = make_published_recipe(algorithm, RELEASED[model])
    if lora_rank is not None:
        lora = None if lora_rank == 0 else {"rank": lora_rank, "alpha": lora_rank}
        recipe = type(recipe).model_validate({**recipe.model_dump(exclude_unset=True), "lora": lora})
    subject = CountedModel.from_released(RELEASED[model])
    counted = RecipeCost.from_recipe(recipe, subject, 8)
    *purposes, total = cost_rows(counted.steps, counted.flops, 8)
    by_purpose = {row["purpose"]: row["forwards a rank"] for row in purposes}
    denoiser = subject.model.unwrapped_denoiser
    blocks = [part for part in denoiser.modules() if isinstance(part, subject.model.block_classes)]
    updates = derive_run_sizes(recipe, 8).updates_per_step
    return Work(
        title=f"{counted.title}, {algorithm}, {'LoRA' if recipe.lora else 'all weights'}, ZeRO-{stage}",
        network=Network(
            trained=[p.numel() for p in denoiser.parameters() if p.requires_grad],
            frozen=[p.numel() for p in denoiser.parameters() if not p.requires_grad],
            blocks=[p.numel() for block in blocks for p in block.parameters()],
        ),
        flops=(total["forward FLOP"] + total["backward FLOP"]) / 8,
        micro_steps=round(by_purpose["policy"]),
        updates=updates,
        forwards=round(sum(n for purpose, n in by_purpose.items() if purpose != "policy")),
        num_blocks=len(blocks),
        checkpointing=bool(recipe.model.gradient_checkpointing),
        stage=stage,
    )


def predict_step(work: Work, cluster: Cluster, world: int) -> dict[str, Any]:
    """Return the seconds of a step on `world` GPUs."""
    compute = work.flops / cluster.flops
    times = {
        kind: cluster.seconds(kind, num_bytes, calls, world)
        for kind, (num_bytes, calls) in work.collectives(world).items()
    }
    communication = sum(times.values())
    hidden = min(cluster.overlap * communication, compute)
    return {
        "GPUs": world,
        "step, s": compute + communication - hidden,
        "computing, s": compute,
        **{f"{kind}, s": seconds for kind, seconds in times.items()},
        "not hidden, s": communication - hidden,
    }


def predict_rows(work: Work, cluster: Cluster) -> list[dict[str, Any]]:
    rows = [predict_step(work, cluster, world) for world in GPUS]
    for row in rows:
        row["speed a GPU, of that on 8"] = rows[0]["step, s"] / row["step, s"]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.released import RELEASED

    parser = argparse.ArgumentParser(prog="benchmarks.scaling", description="Count traffic, predict step times.")
    parser.add_argument("what", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=RELEASED, default="wan14b", help="model to predict for (default: wan14b)")
    parser.add_argument("--algo", choices=("sft", "nft", "grpo", "ddrl"), default="sft", help="default: sft")
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=3, help="stage (default: 3)")
    parser.add_argument(
        "--lora", type=int, help="rank of the LoRA; 0: all weights (default: as published with the algorithm)"
    )
    parser.add_argument("--hardware", type=Path, default=HARDWARE, help="a YAML like benchmarks/hardware.yaml")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank:
        rank_main(options.rank, Path(options.what[0]), int(options.what[1]))
        return 0
    if options.what not in ([], ["count"], ["predict"]):
        parser.error("use count or predict, or neither for both")
    if options.what != ["predict"]:
        with tempfile.TemporaryDirectory(prefix="wfm-scaling-") as name:
            rows = count_all_cases(Path(name))
        report.print_results("traffic", rows, write=not options.no_write)
    if options.what != ["count"]:
        work, cluster = (
            load_work(options.model, options.algo, options.zero, options.lora),
            Cluster.read(options.hardware),
        )
        sys.stdout.write("\n".join(["", work.title, "", *(f"* {line}" for line in cluster.lines()), "", ""]))
        stage = f"scaling-{options.model}-{options.algo}"
        report.print_results(stage, predict_rows(work, cluster), write=not options.no_write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
