"""Rollouts by other processes: rank 0 coordinates and publishes, the leader of each replica fetches its samples."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.errors import RunError
from wfm_ds.pipes.client import PipeClient, TaskOutcome
from wfm_ds.pipes.hub import Hub
from wfm_ds.pipes.keys import ClientKeys
from wfm_ds.pipes.messages import MAX_ROWS
from wfm_ds.pipes.sockets import PipeError
from wfm_ds.pipes.unfinished import TaskRequest
from wfm_ds.pipes.wire import Message, WireError
from wfm_ds.rollout import KIND
from wfm_ds.rollout.coordinator import Chunk, Closed, Coordinator
from wfm_ds.rollout.gathering import gathered_frames
from wfm_ds.rollout.groups import Group, GroupSource
from wfm_ds.rollout.identity import identity
from wfm_ds.rollout.members import RolloutSample, StepRollouts, rolled_out, step_members
from wfm_ds.rollout.packing import ChunkWork, nothing, require_stored, unpack_trajectory
from wfm_ds.rollout.publisher import Publisher, remove_publications
from wfm_ds.rollout.scores import unpack_scores
from wfm_ds.rollout.service import RolloutService, trainer_keys
from wfm_ds.run.job import Job
from wfm_ds.types import Rollout, Score

log = logging.getLogger(__name__)

MAX_CHUNK = 32  # samples: their scores fit the head of one message
ATTACH_S = 60.0
FETCH_S = 120.0  # without any of the payloads that are waited for
ROUND_S = 2.0  # how long ranks wait before they agree whether to go on
LOOK_S = 0.2  # between looks at the workers
TASK_S = 7 * 86400.0  # the hub gives up a task after it; the run itself does long before


@dataclass(frozen=True, slots=True)
class _Planned:
    """A chunk of the step, as every rank hears of it."""

    first: int  # of its samples among those of the step
    stop: int
    task_id: str
    staleness: int | None  # in publications; None: there are no samples
    reason: str
    layout: Mapping[str, Any]
    scores: Sequence[Any]


_Arrays = Mapping[str, Tensor]
"""The tensors of one chunk by name, float32."""


def _arrays(payload: Message) -> _Arrays:
    """The arrays of a payload in host memory. Raises WireError if they were damaged on the way."""
    tensors = zip(payload.specs, payload.tensors(), strict=True)
    return {spec.name: torch.from_numpy(array) for spec, array in tensors}


class AsyncSource:
    """The samples of each step in the order of the prompt stream; see coordinator.py for what may be how old."""

    def __init__(
        self,
        job: Job,
        groups: GroupSource,
        algorithm: RlAlgorithm,
        endpoint: str,
        keys: ClientKeys | None,
        service: RolloutService | None,
    ) -> None:
        """Collective. `service`: on rank 0."""
        self.job, self.groups, self.algorithm = job, groups, algorithm
        self.settings, self.service = job.recipe.rl.rollout, service
        self.life = str(job.world.broadcast(uuid.uuid4().hex[:12]))
        run = job.recipe.run.output_dir.name[:100].replace("/", "_")
        self.client = PipeClient(endpoint, run=f"{run}-{self.life}", client=f"rank{job.world.rank}", keys=keys)
        self.publisher = Publisher(job, algorithm.rollout_policy, self.life, service.hub if service else None)
        self.lead = _Lead(job, self.life, self.client, service) if service is not None else None
        self._groups: dict[int, list[Group]] = {}  # of admitted steps
        self._scores: dict[str, dict[str, Score]] = {}
        self._stats: dict[str, float] = {}

    def attach(self) -> None:
        """Raises PipeError if the hub does not answer."""
        self.client.attach(ATTACH_S)

    def publish(self, step: int) -> None:
        """Collective. After the last step no more samples are needed, and the workers may leave."""
        if step >= self.job.recipe.run.steps:
            if self.service is not None:
                self.service.hub.dismiss_workers("the run is complete")
            return
        with self.job.timer("publish"):
            self.publisher.publish(step)
        admitted = self.lead.admitted(step) if self.lead is not None else None
        for later in self.job.world.broadcast(admitted):
            self._groups[later] = self.groups.groups(later)
            told = gathered_frames(self.job, self._groups[later])
            if self.lead is not None:
                self.lead.submit(later, told)

    def wait(self, step: int) -> bool:
        """Collective. False if a rank is asked to stop before the step's samples are there. Raises RunError on all
        ranks when nothing is finished for rollout.timeout_s."""
        ready, error = False, ""
        with self.job.timer("rollout_wait"):
            while not ready:
                if self.lead is not None:
                    ready, error = self.lead.gather(step, ROUND_S)
                ready, error = self.job.world.broadcast([ready, error])
                if error:
                    raise RunError(error)
                if not ready and self.job.should_stop():
                    return False
        return True

    def next(self, step: int) -> StepRollouts:
        """Collective; `wait` has returned. Raises RunError on all ranks if a sample cannot be fetched or read."""
        job = self.job
        samples = step_members(
            self._groups.pop(step),
            group_size=self.settings.group_size,
            step=step,
            run_seed=job.recipe.run.seed,
            same_noise=job.recipe.sampling.same_noise,
        )
        planned = [_Planned(*line) for line in job.world.broadcast(self.lead.plan(step) if self.lead else None)]
        count = job.derived.samples_per_rank
        first = job.world.dp_rank * count
        here = [chunk for chunk in planned if chunk.first < first + count and chunk.stop > first]
        fetched: Mapping[str, _Arrays] = {}
        error = ""
        try:
            if job.world.is_leader:
                fetched = self._fetched(here, step)
        except (PipeError, WireError, KeyError, IndexError, TypeError, ValueError) as raised:
            error = f"rank {job.world.rank} does not have the samples of step {step}: {type(raised).__name__} {raised}"
        errors = [e for e in job.world.gather(error) if e]
        if errors:  # before the first collective of the step: no rank enters it alone
            raise RunError("; ".join(errors))
        if self.lead is not None:
            self.client.release([chunk.task_id for chunk in planned])
        mine: list[Rollout] = []
        for chunk in here:
            rows = range(max(chunk.first, first), min(chunk.stop, first + count))
            mine += self._rollouts(chunk, fetched.get(chunk.task_id), samples, rows, step)
        self._scores = self._all_scores(planned, samples)
        self._stats = self._measured(planned)
        return StepRollouts(members=samples, mine=mine, first=first, broken={})

    def scores(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        return [self._scores[s.sample_id] for s in rollouts.members]

    def stats(self) -> dict[str, float]:
        return self.groups.stats() | self._stats

    def close(self) -> None:
        self.client.close()

    def _fetched(self, chunks: Sequence[_Planned], step: int) -> dict[str, _Arrays]:
        """The arrays of these chunks, by task, where there are any. Raises ValueError unless they are what the step's
        plan stores of this many samples."""
        plan, shape = self.algorithm.plan(step), self.job.sampler.latent_shape
        whole = {chunk.task_id: chunk for chunk in chunks if chunk.staleness is not None}
        arrays = {task_id: _arrays(message) for task_id, message in self.client.fetch(whole, FETCH_S).items()}
        for task_id, chunk in whole.items():
            try:
                found = unpack_trajectory(chunk.layout, arrays[task_id])
                require_stored(found, chunk.stop - chunk.first, plan, shape)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ValueError(f"{task_id} is not what its step stores: {type(error).__name__} {error}") from error
        return arrays

    def _rollouts(
        self, chunk: _Planned, arrays: _Arrays | None, samples: Sequence[RolloutSample], rows: range, step: int
    ) -> list[Rollout]:
        """Give these rows of the step to each rank of the replica, whose leader alone has the chunk's arrays.

        The hub sends them once, and the ranks have the faster network. Collective in the replica.
        """
        world, plan = self.job.world, self.algorithm.plan(step)
        if chunk.staleness is None:
            return [nothing(samples[i], plan, self.job.sampler.latent_shape, world.device) for i in rows]
        names = world.share(None if arrays is None else list(arrays))
        found = {name: world.share_tensor(None if arrays is None else arrays[name].to(world.device)) for name in names}
        trajectory = unpack_trajectory(chunk.layout, found)
        return [rolled_out(samples[i], trajectory, i - chunk.first, broken=False) for i in rows]

    def _all_scores(self, planned: Sequence[_Planned], samples: Sequence[RolloutSample]) -> dict[str, dict[str, Score]]:
        names = [function.name for function in self.job.recipe.rl.reward.functions]
        scores: dict[str, dict[str, Score]] = {}
        for chunk in planned:
            scores |= unpack_scores(chunk.scores)
            if chunk.staleness is None:
                for s in samples[chunk.first : chunk.stop]:
                    failed = {n: Score(sample_id=s.sample_id, reward=n, failure=chunk.reason) for n in names}
                    scores[s.sample_id] = failed
        return scores

    def _measured(self, planned: Sequence[_Planned]) -> dict[str, float]:
        ages = [c.staleness for c in planned for _ in range(c.stop - c.first) if c.staleness is not None]
        counts = [float(self.lead.coordinator.dropped_stale), float(len(self.lead.hub.workers()))] if self.lead else []
        dropped, lanes = self.job.world.broadcast(counts)
        return {
            "rollout/staleness_mean": sum(ages) / max(1, len(ages)),
            "rollout/staleness_max": float(max(ages, default=0)),
            "rollout/dropped_stale": dropped,
            "rollout/workers": lanes / self.settings.in_flight,
        }


class _Lead:
    """Rank 0's part: admits groups, books what is finished, and says when a step is whole."""

    def __init__(self, job: Job, life: str, client: PipeClient, service: RolloutService) -> None:
        self.job, self.client, self.service = job, client, service
        self.hub: Hub = service.hub
        self.life = life
        self._coordinator: Coordinator | None = None
        self._samples: dict[int, list[RolloutSample]] = {}  # of admitted steps, with the frames that they are given
        self._admitted: dict[int, list[tuple[Chunk, str]]] = defaultdict(list)  # by step, not submitted yet
        self._results: dict[str, Mapping[str, Any]] = {}  # meta by task id
        self._finished_at_s = self.client.now_s()

    @property
    def coordinator(self) -> Coordinator:
        assert self._coordinator is not None, "nothing is published"
        return self._coordinator

    def admitted(self, step: int) -> list[int]:
        """The hub knows the policy after `step`: return the steps that may be generated with it, to be submitted."""
        recipe = self.job.recipe
        if self._coordinator is None:  # where the run begins, or goes on
            self._coordinator = Coordinator(
                life=self.life,
                groups_per_step=recipe.rl.rollout.prompts_per_step,
                group_size=recipe.rl.rollout.group_size,
                chunk_size=min(recipe.engine.max_forward_batch, MAX_CHUNK),
                max_staleness=recipe.rl.rollout.max_staleness,
                first_step=step + 1,
                last_step=recipe.run.steps,
            )
        self.coordinator.publish(step)
        self._finished_at_s = self.client.now_s()
        for chunk, task_id in self.coordinator.admit():
            self._admitted[chunk.step].append((chunk, task_id))
        return sorted(self._admitted)

    def submit(self, step: int, groups: Sequence[Group]) -> None:
        """Send an admitted step to the workers. groups: all of it, with their frames."""
        recipe = self.job.recipe
        self._samples[step] = step_members(
            groups,
            group_size=recipe.rl.rollout.group_size,
            step=step,
            run_seed=recipe.run.seed,
            same_noise=recipe.sampling.same_noise,
        )
        admitted = self._admitted.pop(step)
        for at in range(0, len(admitted), MAX_ROWS):
            self._submit(admitted[at : at + MAX_ROWS])

    def gather(self, step: int, patience_s: float) -> tuple[bool, str]:
        """Book what finishes until the step is whole, at most so long. (whether it is, why the run cannot go on)"""
        until_s = self.client.now_s() + patience_s
        while True:
            for outcome in self.client.take(0.0 if self.coordinator.ready(step) else LOOK_S):
                self._finished_at_s = self.client.now_s()
                self._book(outcome)
            if self.coordinator.ready(step):
                return True, ""
            now_s = self.client.now_s()
            if why := self._hopeless(step, now_s):
                return False, why
            if now_s > until_s:
                return False, ""

    def plan(self, step: int) -> list[list[Any]]:
        """The chunks of a step, as JSON of _Planned."""
        del self._samples[step]
        return [self._line(closed) for closed in self.coordinator.plan(step)]

    def _line(self, closed: Closed) -> list[Any]:
        chunk, base = closed.chunk, closed.chunk.group * self.job.recipe.rl.rollout.group_size
        meta = self._results.pop(closed.task_id, {"layout": {}, "scores": []})
        age = None if closed.publication is None else chunk.step - 1 - closed.publication
        span = [base + chunk.first, base + chunk.stop]
        return [*span, closed.task_id, age, closed.reason, meta["layout"], meta["scores"]]

    def _hopeless(self, step: int, now_s: float) -> str:
        limit_s, here = self.job.recipe.rl.rollout.timeout_s, self.hub.workers()
        if why := self.service.alone():
            return why
        if not self.hub.alive():
            return f"the rollout hub has failed: {self.hub.error}"
        if now_s - self._finished_at_s > limit_s:
            waiting = f"step {step} waits for {self.coordinator.waiting(step)} chunks"
            who = f"the workers are {', '.join(here)}" if here else "no worker is connected"
            return f"no chunk was finished for rollout.timeout_s = {limit_s:g} s: {waiting}, {who}"
        return ""

    def _book(self, outcome: TaskOutcome) -> None:
        if not outcome.ok:
            self.coordinator.give_up(outcome.id, outcome.reason)
            return
        meta, chunk = outcome.meta, self.coordinator.chunk_of(outcome.id)
        try:
            publication = int(meta["publication"])
            if meta["life"] != self.life:
                publication = -1
            wanted = {s.sample_id for s in self._chunk_samples(chunk)}
            if unpack_scores(meta["scores"]).keys() != wanted or not isinstance(meta["layout"], dict):
                raise ValueError("it is about other samples")
        except (KeyError, TypeError, ValueError) as error:
            self.client.release([outcome.id])
            self.coordinator.give_up(outcome.id, f"its worker's answer cannot be read: {error}")
            return
        again = self.coordinator.result(outcome.id, publication)
        if again is None:
            self._results[outcome.id] = meta
            return
        log.info("%s came of publication %d, which is too old: it is made again", outcome.id, publication)
        self.client.release([outcome.id])
        self._submit([(chunk, again)])

    def _submit(self, tasks: Sequence[tuple[Chunk, str]]) -> None:
        """A chunk that no message holds is given up by itself: this rank must not leave the others alone."""
        works = [ChunkWork(chunk.step, self._chunk_samples(chunk)) for chunk, _ in tasks]
        of_works, arrays = [work.rows() for work in works], [array for work in works for array in work.arrays()]
        rows = list(itertools.chain(*of_works))
        until_s, requests, start = self.client.now_s() + TASK_S, list[TaskRequest](), 0
        for (_, task_id), of_work in zip(tasks, of_works, strict=True):
            requests.append(TaskRequest(task_id, KIND, start, start + len(of_work), until_s))
            start += len(of_work)
        try:
            self.client.submit(rows, arrays, requests)
        except WireError as error:
            if len(tasks) == 1:
                log.error("%s cannot be sent: %s", tasks[0][1], error)
                self.coordinator.give_up(tasks[0][1], f"cannot be sent: {error}")
                return
            half = len(tasks) // 2  # long prompts or large frames: a message has limits
            self._submit(tasks[:half])
            self._submit(tasks[half:])

    def _chunk_samples(self, chunk: Chunk) -> list[RolloutSample]:
        base = chunk.group * self.job.recipe.rl.rollout.group_size
        return self._samples[chunk.step][base + chunk.first : base + chunk.stop]


def async_source(
    job: Job, groups: GroupSource, algorithm: RlAlgorithm, rewards: str, resources: ExitStack
) -> AsyncSource:
    """Collective: start the hub and the workers of the recipe on rank 0, attach all ranks. `resources` ends them.

    Raises UserError on all ranks where that cannot be."""
    world, settings = job.world, job.recipe.rl.rollout

    def start() -> RolloutService:
        return RolloutService(job.recipe, identity(job.recipe, job.model), rewards, world.size)

    service: RolloutService | None = world.checked(start, on="main")
    if service is not None:
        resources.callback(remove_publications, job.recipe)  # after the next line's: in reverse order
        resources.callback(service.stop)
    endpoint = world.broadcast(service.endpoint if service is not None else None)
    keys = world.checked(lambda: trainer_keys(settings))
    source = AsyncSource(job, groups, algorithm, endpoint, keys and keys.insider, service)
    resources.callback(source.close)
    world.checked(source.attach)
    return source
