"""The quickstart: SFT and DiffusionNFT of the digits demo, and the reward before and after. With `--steps`, a rehearsal
of a few steps."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wfm_ds.cli import quickstart
from wfm_ds.demos.base import load_evaluations
from wfm_ds.demos.digits import REWARD
from wfm_ds.distributed.logs import quiet_libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="steps of both runs (default: as in the demo's recipes)")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    demo = quickstart.load_demo("digits")
    (name,) = demo.rl_recipes
    overrides = [] if args.steps is None else [f"run.steps={args.steps}", "validation.num_prompts=1"]
    # After a few steps of SFT, no image is a digit. Without differences between rewards, nothing would be trained.
    uneven = [] if args.steps is None else ["reward.functions=[{name: digits, max_batch: 64}, {name: mock}]"]
    with tempfile.TemporaryDirectory(prefix="wfm-quickstart-") as temporary:
        folder = Path(temporary)
        (folder / quickstart.MARKER_FILE).touch()
        quiet_libraries()
        quickstart.prepare_folder(demo, folder)
        began = time.monotonic()
        sft = quickstart.run_sft(demo, folder, folder / "sft", 0, *overrides)
        yield {"run": "sft", "steps": sft["step"], "s": time.monotonic() - began}
        began = time.monotonic()
        rl = quickstart.run_rl(demo, folder, folder / name, sft, 0, *overrides, *uneven)
        row = {"run": name, "steps": rl["step"], "s": time.monotonic() - began}
        rewards = [metrics[REWARD] for _, metrics in load_evaluations(folder / name, REWARD)]
    row |= {"reward before": rewards[0], "reward after": rewards[-1]}
    learns = args.steps is not None or rewards[-1] > rewards[0]
    yield row if learns else row | {"error": "the reward did not increase"}
