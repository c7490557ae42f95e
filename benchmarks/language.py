"""Tokens a second of a language step beside transformers' Trainer: `python -m benchmarks.language [--rounds 30]`.

A Qwen3-VL of random weights with the proportions of the released 2B (vocabulary head, vision tower, MLPs, shared heads
of keys and values, each to the whole), in float32, trained by AdamW on the same conversations in one process: by our
loop with its order, metrics and checkpoints that are not due, and by transformers' Trainer, whose data set reads them
with our reader too, so that the difference is the steps'. All variants take turns, a step each, in an order that
turns round from round to round. One core; seconds are of processor time, and what a step's threads read ahead is in it.
Tokens are those of conversations, never padding.
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
from benchmarks.language_peers import OURS, THEIRS, Side, our_side, their_side
from benchmarks.overhead import median_interval, settled

WARM_UP = 2  # steps of each
MILLION = 1e6
# Ours, and the Trainer's variant that it is compared with: a forward a conversation, and a forward for all of a step,
# which the Trainer pads to the longest of its conversations and ours puts side by side or packs.
PAIRS = {"one by one": "one by one", "side by side": "padded", "packed": "padded"}


def in_turn(sides: Mapping[str, Side], rounds: int) -> dict[str, list[tuple[float, int, int]]]:
    """Processor seconds, tokens and labelled tokens of each side's step in each round."""
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in sides}
    for side in sides.values():
        for _ in range(WARM_UP):
            side.step()
        side.counts.clear()
    for number in range(rounds):
        names = list(sides)
        for name in names if number % 2 == 0 else reversed(names):
            gc.collect()
            counts, began = sides[name].counts, settled()
            tokens, labelled = counts["tokens"], counts["labelled"]
            sides[name].step()
            seconds = settled() - began
            found[name].append((seconds, counts["tokens"] - tokens, counts["labelled"] - labelled))
    return found


def row_of(name: str, side: Side, steps: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    """Speeds of one side, and what its forwards were made of."""
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


def compared(ours: Sequence[tuple[float, int, int]], theirs: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    """The ratio of ours to theirs in tokens a second: the median over the rounds, and the interval that holds it."""
    ratios = [(a / s) / (b / t) for (s, a, _), (t, b, _) in zip(ours, theirs, strict=True)]
    low, high = median_interval(ratios)
    return {"ratio": statistics.median(ratios), "from": low, "to": high}


def measured(rounds: int, *, small: bool) -> list[dict[str, Any]]:
    import torch

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as held:
        folder = Path(temporary)
        write_reasoner(folder / "model", small=small)
        write_conversations(folder / "data")
        sides = {f"ours, {name}": our_side(folder, name, held) for name in OURS}
        sides |= {f"Trainer, {name}": their_side(folder, name, held) for name in THEIRS}
        found = in_turn(sides, rounds)
        rows = {name: row_of(name, side, found[name]) for name, side in sides.items()}
    for ours, theirs in PAIRS.items():
        rows[f"ours, {ours}"] |= {"beside": theirs, **compared(found[f"ours, {ours}"], found[f"Trainer, {theirs}"])}
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each, at least 6")
    parser.add_argument("--quick", action="store_true", help="a model too small to say anything, to see that it runs")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results/")
    args = parser.parse_args(argv)
    rows = measured(args.rounds, small=args.quick)
    sys.stdout.write(report.table(rows) + "\n")
    if args.write:
        report.write("language", report.machine(), rows, rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
