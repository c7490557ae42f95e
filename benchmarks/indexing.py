"""The cost of finding a large paired folder at a start: `python -m benchmarks.indexing [--samples 100000]`.

Two ranks on a CPU each measure the processor time and the memory of their own until they have all samples:

    each rank reads    every rank scans the folder and reads all captions, without a cache
    first start        rank 0 does so and keeps the captions; the other has the samples from it
    next start         rank 0 scans, and takes the captions of unchanged files from the cache

Exit code 1 if the samples differ; nothing is written then.
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

PROGRAM = "benchmarks.indexing"  # not __name__, which is another when it is run
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


def measure(folder: Path, way: str) -> dict[str, Any]:
    """One rank."""
    from wfm_ds.data.broadcast import read_on_main
    from wfm_ds.data.captioned_folder import CaptionedFolder
    from wfm_ds.data.datasets import TrainingData
    from wfm_ds.distributed.world import World

    world, cache = World.join(), None if way == WAYS[0] else folder / "cache"

    def read() -> TrainingData:
        found = CaptionedFolder(folder / "media", max_bad_fraction=0.0, cache_dir=cache)
        return TrainingData(prompts=[], samples=found.samples, bad={}, held_out=[], validation_prompts=[])

    gc.collect()
    before_mib, before_s = resident_mib()[0], time.process_time()
    data = read() if way == WAYS[0] else read_on_main(world, read)
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
        file.write_text(json.dumps(measure(file.parent, options.rank[1])))
        return 0
    from wfm_ds.data.caption_cache import RECENT_S

    with tempfile.TemporaryDirectory(prefix="wfm-indexing-") as name:
        folder, rows, digests = Path(name), list[dict[str, Any]](), set[str]()
        write_folder(folder / "media", options.samples)
        threading.Event().wait(RECENT_S + 1)  # captions that have just been written are not kept
        for way in WAYS:
            ranks = run_ranks(PROGRAM, [way], RANKS, folder)
            digests |= {rank["digest"] for rank in ranks}
            row: dict[str, Any] = {"way": way, "samples": options.samples}
            for number, rank in enumerate(ranks):
                row |= {f"rank {number}, CPU s": rank["seconds"], f"rank {number}, MiB": round(rank["MiB"])}
            rows.append(row)
    sys.stdout.write(report.table(rows) + "\n")
    if len(digests) != 1:
        sys.stderr.write("the ways found different samples: nothing is reported\n")
        return 1
    if not options.no_write:
        report.write("indexing", report.machine(), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
