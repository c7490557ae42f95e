"""A rollout worker that generates images without a model: `python -m benchmarks.soak.worker`. Started by host.py.

Everything else is the worker of an async run: leases, waiting for scores, results, exit.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak import samples
from wfm_ds.recipe import file as recipe_file
from wfm_ds.rollout import TASK_KIND
from wfm_ds.rollout.remote import worker
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.worker import LeasedTask, ReportProgress, TaskResult
from wfm_ds.types import MediaBatch


class NoiseLanes(worker.WorkerLanes):
    """Generates the images of a chunk, with a delay of `seconds` for each, like a model."""

    journal: Path

    def generate_chunk(self, rewards: RewardClient, task: LeasedTask, progress: ReportProgress) -> TaskResult:
        ids, seconds = task.rows[0]["samples"], task.rows[0]["seconds"]
        images = []
        for number, sample_id in enumerate(ids, start=1):
            threading.Event().wait(seconds)
            images.append(samples.make_image(sample_id))
            progress(number, len(ids))
        samples.append_count(self.journal, len(ids))
        prompts, media = [samples.make_prompt(sample_id) for sample_id in ids], np.stack(images)
        rewards.submit(MediaBatch(media=media, sample_ids=ids, prompts=prompts, metadata=[{}] * len(ids)))
        scores = rewards.wait()
        packed = {i: {name: [s.value, s.failure] for name, s in scores[i].items()} for i in ids}
        return TaskResult({"scores": packed}, [("pictures", media)])


def main(arguments: Sequence[str] | None = None) -> int:
    args = worker.parser().parse_intermixed_args(arguments)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    recipe = recipe_file.load_recipe(args.recipe, args.overrides)
    client = PipeClient(args.connect, run="workers", client=args.name)
    try:
        client.attach(worker.ATTACH_S)
        generator: Any = None  # only `generate_chunk` would use it
        lanes = NoiseLanes(recipe, generator, client, None, client.kinds[TASK_KIND], args)
        lanes.journal = recipe.run.output_dir / "made"
        return lanes.run(stop)
    finally:
        client.close()


if __name__ == "__main__":
    sys.exit(main())
