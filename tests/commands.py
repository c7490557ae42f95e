"""Run commands of `wfm` in this process, and modules in a process of their own."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from wfm_ds.cli.main import main

ROOT = Path(__file__).parent.parent
CODE_PATH = f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'reward'}"  # for processes in other folders


def wfm_command(name):
    """Return a function that runs `wfm NAME WORD...` for a list of words and returns the exit code."""
    return lambda words: main([*name.split(), *map(str, words)])


def run_module(*words, ranks=0, cwd=ROOT, timeout_s=500, code=0, **environment):
    """Run `python -m WORD...`, or the command `deepspeed` with this number of ranks. Fails on another exit code."""
    script = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    process = subprocess.run(
        [*([script, "--num_gpus", str(ranks)] if ranks else [sys.executable]), "-m", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": CODE_PATH, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process


def run_command_of_report(report, *more):
    """Run the command `wfm generate` that a report of the quickstart shows."""
    (command,) = re.findall(r"wfm generate(?: .*\\\n)* .*", report)
    run_module("wfm_ds", *shlex.split(command.replace("\\\n", " "))[1:], *more)
