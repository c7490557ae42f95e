"""Start the ranks of a benchmark: each is a new process of the same program, which writes its result as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wfm_ds.distributed.accelerator import find_free_port


def run_ranks(module: str, arguments: Sequence[str], ranks: int, folder: Path) -> list[Any]:
    """Run `python -m MODULE --rank FILE ARGUMENTS` as ranks on a CPU. Return the content of each rank's file, by rank.

    Raises SystemExit if one of them fails.
    """
    files = [folder / f"rank_{rank}.json" for rank in range(ranks)]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    world["MASTER_PORT"] = str(find_free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, "--rank", str(file), *arguments],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=sys.stderr,
        )
        for rank, file in enumerate(files)
    ]
    if any([process.wait() for process in processes]):  # a list: waits for all ranks, also after a failure
        raise SystemExit("a rank failed")
    return [json.loads(file.read_text()) for file in files]
