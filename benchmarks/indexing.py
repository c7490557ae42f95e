"""The cost of indexing a large paired folder at the start of a run: `python -m benchmarks.indexing [--samples 100000]`.

Two ranks on a CPU measure their processor time and memory until they have all samples:

    each rank reads    every rank scans the folder and reads all captions, without a cache
    first start        rank 0 scans, reads and caches the captions, and sends the samples to the other rank
    next start         rank 0 scans, and reads the captions of unchanged files from the cache

If the samples differ, the exit code is 1 and nothing is written.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.loading import resident_mib
from benchmarks.processes import run_ranks

PROGRAM = "benchmarks.indexing"  # not __name__, which is "__main__" in a subprocess
RANKS = 2
WAYS = ("each rank reads", "first start", "next start")
PER_FOLDER = 1000


def write_folder(folder: Path, samples: int) -> None:
    for i in range(samples):
        below = folder / f"{i // PER_FOLDER:04d}"
        below.mkdir(parents=True, exist_ok=True)
        (below / f"{i:08d}.png").touch()
        caption = {"prompt": f"a photograph of object number {i} on a table in the rain"}
        (below / f"{i:08d}.json").write_text(json.dumps(caption))


def measure_rank(folder: Path, way: str) -> dict[str, Any]:
    """Return the time, memory and sample digest of one rank."""
    from wfm_ds.data.broadcast import read_on_main
    from wfm_ds.data.captioned_folder import CaptionedFolder
    from wfm_ds.data.datasets import TrainingData
    from wfm_ds.distributed.world import World

    world, cache = World.join(), None if way == WAYS[0] else folder / "cache"

    def read_data() -> TrainingData:
        found = CaptionedFolder(folder / "media", max_bad_fraction=0.0, cache_dir=cache)
        return TrainingData(prompts=[], samples=found.samples, bad={}, held_out=[], validation_prompts=[])

    gc.collect()
    before_mib, before_s = resident_mib()[0], time.process_time()
    data = read_data() if way == WAYS[0] else read_on_main(world, read_data)
    seconds = time.process_time() - before_s
    gc.collect()
    digest = hashlib.sha256()
    for sample in data.samples:
        digest.update(f"{sample.id}\n{sample.media.name}\n{sample.prompt.text}\n".encode())
    return {"seconds": seconds, "MiB": resident_mib()[0] - before_mib, "digest": digest.hexdigest()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Measure the start with a large paired folder.")
    parser.add_argument("--samples", type=int, default=100_000, help="default 100000")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--rank", nargs=2, metavar=("FILE", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank:
        file = Path(options.rank[0])
        file.write_text(json.dumps(measure_rank(file.parent, options.rank[1])))
        return 0
    from wfm_ds.data.caption_cache import RECENT_S

    with tempfile.TemporaryDirectory(prefix="wfm-indexing-") as name:
        folder, rows, digests = Path(name), list[dict[str, Any]](), set[str]()
        write_folder(folder / "media", options.samples)
        threading.Event().wait(RECENT_S + 1)  # the cache ignores captions that were just written
        for way in WAYS:
            ranks = run_ranks(PROGRAM, [way], RANKS, folder)
            digests |= {rank["digest"] for rank in ranks}
            row: dict[str, Any] = {"way": way, "samples": options.samples}
            for number, rank in enumerate(ranks):
                row |= {f"rank {number}, CPU s": rank["seconds"], f"rank {number}, MiB": round(rank["MiB"])}
            rows.append(row)
    sys.stdout.write(report.format_table(rows) + "\n")
    if len(digests) != 1:
        sys.stderr.write("the samples differ; no result is written\n")
        return 1
    if not options.no_write:
        report.write_results("indexing", report.describe_machine(), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
