"""Tokens per second of a language step, compared with transformers' Trainer: `python -m benchmarks.language [--rounds
30]`.

A random Qwen3-VL with the proportions of the released 2B model (vocabulary head, vision tower, MLPs, grouped key-value
heads) is trained in float32 with AdamW on the same conversations in one process: with our loop, including data order,
metrics and checkpoint checks, and with transformers' Trainer. The Trainer's dataset uses our reader, so only the steps
differ. All variants take turns, one step each, in an order that reverses every round. Everything runs on one core.
Seconds are processor seconds, and include the read-ahead threads of a step. Tokens are those of conversations, without
padding.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.language_data import write_conversations, write_reasoner
from benchmarks.language_peers import OURS, THEIRS, Side, make_our_side, make_trainer_side
from benchmarks.overhead import median_interval, wait_until_idle

WARM_UP = 2  # steps of each
MILLION = 1e6
# Our variant and the Trainer's variant to compare with. Either each conversation is one forward pass, or a step is one
# forward pass: the Trainer pads it to the longest conversation, our loop concatenates or packs the conversations.
PAIRS = {"one by one": "one by one", "side by side": "padded", "packed": "padded"}


def run_in_turn(sides: Mapping[str, Side], rounds: int) -> dict[str, list[tuple[float, int, int]]]:
    """Return the processor seconds, tokens and labelled tokens of each side's step in each round."""
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in sides}
    for side in sides.values():
        for _ in range(WARM_UP):
            side.step()
        side.counts.clear()
    for number in range(rounds):
        names = list(sides)
        for name in names if number % 2 == 0 else reversed(names):
            gc.collect()
            counts, began = sides[name].counts, wait_until_idle()
            tokens, labelled = counts["tokens"], counts["labelled"]
            sides[name].step()
            seconds = wait_until_idle() - began
            found[name].append((seconds, counts["tokens"] - tokens, counts["labelled"] - labelled))
    return found


def side_row(name: str, side: Side, steps: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    """Return the speeds of one side, and counts of its forward passes."""
    counts, tokens = side.counts, side.counts["tokens"]
    return {
        "steps": name,
        "tokens/s": statistics.median(tokens / seconds for seconds, tokens, _ in steps),
        "labelled/s": statistics.median(labelled / seconds for seconds, _, labelled in steps),
        "tokens a step": tokens / len(steps),
        "forwards a step": counts["forwards"] / len(steps),
        "padding": counts["computed"] / tokens - 1,
        "head MFLOP a token": counts["head_flops"] / MILLION / tokens,
    }


def compare_speeds(ours: Sequence[tuple[float, int, int]], theirs: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    """Return the ratio of our tokens per second to the Trainer's: the median over the rounds and its interval."""
    ratios = [(a / s) / (b / t) for (s, a, _), (t, b, _) in zip(ours, theirs, strict=True)]
    low, high = median_interval(ratios)
    return {"ratio": statistics.median(ratios), "from": low, "to": high}


def measure_sides(rounds: int, *, small: bool) -> list[dict[str, Any]]:
    import torch

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as held:
        folder = Path(temporary)
        write_reasoner(folder / "model", small=small)
        write_conversations(folder / "data")
        sides = {f"ours, {name}": make_our_side(folder, name, held) for name in OURS}
        sides |= {f"Trainer, {name}": make_trainer_side(folder, name, held) for name in THEIRS}
        found = run_in_turn(sides, rounds)
        rows = {name: side_row(name, side, found[name]) for name, side in sides.items()}
    for ours, theirs in PAIRS.items():
        rows[f"ours, {ours}"] |= {
            "beside": theirs,
            **compare_speeds(found[f"ours, {ours}"], found[f"Trainer, {theirs}"]),
        }
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each variant, at least 6")
    parser.add_argument(
        "--quick", action="store_true", help="a test with a model that is too small for meaningful speeds"
    )
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    args = parser.parse_args(argv)
    rows = measure_sides(args.rounds, small=args.quick)
    sys.stdout.write(report.format_table(rows) + "\n")
    if args.write:
        report.write_results("language", report.describe_machine(), rows, rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
