"""Start training runs and rollout workers as separate processes."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from faults import processes

ROOT = Path(__file__).parent.parent.parent
PROBES = ROOT / "tests" / "reward"
PATIENCE_S = 300  # long enough for a busy machine
until = partial(processes.until, patience_s=PATIENCE_S)


def start(stack, log, *words):
    """Start a module of this project as a process. It is killed at the end of the test if it still runs."""
    path = os.pathsep.join([str(PROBES), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], stdout=out, stderr=out, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT
        )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def start_training(stack, folder, model, *overrides):
    """Start a tiny run in `folder` that logs to `folder`.log."""
    return start(
        stack,
        folder.with_suffix(".log"),
        "wfm_ds.train",
        "tests/recipes/sd3_nft.yaml",
        *[f"run.output_dir={folder}", f"model.path={model}", "validation.at_start=false", "optimizer.eps=1e-4"],
        *["logging.console=false", "logging.tensorboard=false", *overrides],
    )


def train(stack, folder, where, model, *overrides, seconds):
    options = {"seconds": seconds, "journal": str(folder / f"{where}.journal")}
    reward = {"name": "probe_rewards:Brightness", "workers": 2, "max_batch": 2, "options": options}
    words = [f"reward.functions={json.dumps([reward])}", "run.steps=3", "engine.max_forward_batch=2", *overrides]
    return start_training(stack, folder / where, model, *words)


def has(log, text):
    return lambda: log.exists() and text in log.read_text(errors="replace")
