"""Small supervised runs that commands start as processes, and the ends of these processes."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import psutil

from wfm_ds.demos.digits_data import write_digits

ROOT = Path(__file__).parent.parent.parent
NUM_IMAGES = 40
DEADLINE_S = 300.0
ENDLESS = ("run.steps=100000", "checkpoint.every=2")


def prepare_recipe(pipeline, tmp_path):
    """Write images to tmp_path. Return the arguments of wfm_ds.train that train the pipeline on them."""
    write_digits(tmp_path / "digits")
    folder = tmp_path / "digits" / "images"
    for file in sorted(folder.iterdir())[2 * NUM_IMAGES :]:  # each image has a caption file
        file.unlink()
    return [str(ROOT / "tests" / "recipes" / "sd3_sft_lora.yaml"), f"model.path={pipeline}", f"data.path={folder}"]


def run_training(recipe, overrides, limit=None):
    """Run wfm_ds.train to its end. limit: function that runs in the process before the command."""
    words = [sys.executable, "-m", "wfm_ds.train", recipe, *overrides]
    options = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "timeout": DEADLINE_S, "preexec_fn": limit, "text": True}
    return subprocess.run(words, capture_output=True, check=False, **options)


def result(folder):
    return json.loads((folder / "out" / "result.json").read_text())


def end(processes):
    """Kill processes that still run, with their descendants."""
    for process in processes:
        if process.poll() is None:
            command = psutil.Process(process.pid)
            for part in [command, *command.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # it may have exited already
                    part.kill()
        process.wait()
