"""The client of a soak: handles samples like a trainer, but does not train.

`python -m benchmarks.soak.client PIPES_JSON`. Admits, takes, fetches and releases steps like an async run with
staleness 1, and compares each sample with its expected content. Prints the number of finished samples to stdout. Exits
with 1 and a message at the first lost, duplicate or wrong sample.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.soak import samples
from benchmarks.soak.samples import CHUNK, GROUP_SIZE, GROUPS, PER_STEP
from wfm_ds.rollout import TASK_KIND
from wfm_ds.rollout.remote.coordinator import ClosedChunk, Coordinator, GroupChunk
from wfm_ds.transport.client import PipeClient, TaskOutcome
from wfm_ds.transport.submissions import TaskRequest
from wfm_ds.transport.wire import Message

ATTACH_S, FETCH_S = 60.0, 120.0
PATIENCE_S = 300.0  # limit without a finished chunk
TASK_S = 86400.0


class WrongSample(Exception):
    """A sample is lost, duplicate or wrong."""


class Trainer:
    def __init__(self, pipe: PipeClient, steps: int, seconds: float) -> None:
        """seconds: time of a worker for each sample."""
        self.pipe, self.steps, self.seconds = pipe, steps, seconds
        self.coordinator = Coordinator(
            session_id="soak", groups_per_step=GROUPS, group_size=GROUP_SIZE, chunk_size=CHUNK, max_staleness=1,
            first_step=1, last_step=steps,
        )  # fmt: skip
        self.scores: dict[str, Any] = {}  # by task id, until its step is checked
        self.finished = 0
        self.seen = bytearray(steps * PER_STEP)

    def run(self) -> None:
        """Run all steps. Raises WrongSample, and PipeError or WireError if a fetch fails."""
        for step in range(1, self.steps + 1):
            self.coordinator.record_publication(step - 1)
            self._submit_chunks(self.coordinator.admit_chunks())
            last_outcome_s = time.monotonic()
            while not self.coordinator.is_complete(step):
                outcomes = self.pipe.take_outcomes(1.0)
                for outcome in outcomes:
                    self._record_outcome(outcome)
                if outcomes:
                    last_outcome_s = time.monotonic()
                    sys.stdout.write(f"{self.finished}\n")
                    sys.stdout.flush()
                elif time.monotonic() - last_outcome_s > PATIENCE_S:
                    waiting = self.coordinator.num_waiting(step)
                    raise WrongSample(
                        f"step {step} waits for {waiting} chunks, and none finished within {PATIENCE_S:g} s"
                    )
            plan = self.coordinator.pop_step(step)
            payloads = self.pipe.fetch_results([closed.task_id for closed in plan], FETCH_S)
            for closed in plan:
                self._check_chunk(closed, payloads[closed.task_id])
            self.pipe.release_results([closed.task_id for closed in plan])
        if missing := self.seen.count(0):
            raise WrongSample(f"{missing} samples are missing")

    def _submit_chunks(self, admitted: Sequence[tuple[GroupChunk, str]]) -> None:
        until_s = time.monotonic() + TASK_S
        for at in range(0, len(admitted), GROUPS):
            some = admitted[at : at + GROUPS]
            rows = [{"samples": samples.sample_ids(*chunk), "seconds": self.seconds} for chunk, _ in some]
            self.pipe.submit(rows, [], [TaskRequest(i, TASK_KIND, n, n + 1, until_s) for n, (_, i) in enumerate(some)])

    def _record_outcome(self, outcome: TaskOutcome) -> None:
        if not outcome.ok:
            raise WrongSample(f"chunk {outcome.id} is lost: {outcome.reason}")
        try:
            chunk = self.coordinator.find_chunk(outcome.id)
        except KeyError as error:
            raise WrongSample(f"chunk {outcome.id} finished twice") from error
        self.coordinator.record_result(outcome.id, self.coordinator.last_publication)
        self.scores[outcome.id] = outcome.meta["scores"]
        self.finished += chunk.stop - chunk.first

    def _check_chunk(self, closed: ClosedChunk, payload: Message) -> None:
        (images,), scores, chunk = payload.read_tensors(), self.scores.pop(closed.task_id), closed.chunk
        for row, (number, sample_id) in enumerate(
            zip(range(chunk.first, chunk.stop), samples.sample_ids(*chunk), strict=True)
        ):
            want = samples.make_image(sample_id)
            if not np.array_equal(images[row], want):
                raise WrongSample(f"sample {sample_id} has wrong pixels")
            expected = {name: [value, None] for name, value in samples.compute_scores(sample_id, want).items()}
            if scores[sample_id] != expected:
                raise WrongSample(f"sample {sample_id} has the scores {scores[sample_id]}, expected {expected}")
            index = samples.sample_index(chunk.step, chunk.group, number)
            if self.seen[index]:
                raise WrongSample(f"sample {sample_id} arrived twice")
            self.seen[index] = 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.soak.client", description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args(arguments)
    pipe = PipeClient(args.endpoint, run="soak", client="trainer")
    try:
        pipe.attach(ATTACH_S)
        Trainer(pipe, args.steps, args.seconds).run()
    except WrongSample as wrong:
        sys.stderr.write(f"error: {wrong}\n")
        return 1
    finally:
        pipe.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
