"""Decodes samples, submits them to the reward service, and gathers their scores on every rank.

Every sample gets a Score for every reward: a finite number, or a failure with a reason.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.world import World
from wfm_ds.errors import RewardError
from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
from wfm_ds.transport.arrays import append_sound, pack_arrays
from wfm_ds.transport.client import PipeClient, TaskOutcome
from wfm_ds.transport.keys import KeyFileError, load_client_keys
from wfm_ds.transport.sockets import PipeError
from wfm_ds.types import FIRST_FRAME, IMAGE_INPUTS, MEDIA_INPUTS, MediaBatch, Prompt, Score

if TYPE_CHECKING:
    from wfm_ds.runs.job import Job

MAX_RUN_CHARS = 100  # maximum length of the run's name in the service's log
DEADLINE_SLACK_S = 10.0  # the client's own deadline expires first, with the more specific message
NOT_FINITE = "latents are not finite"
LATENTS = "latents"  # name in the failed Scores of runs without rewards
NUM_REASONS = 5  # maximum number of failure reasons in one log line
Scores = dict[str, dict[str, Score]]
"""{sample id: {reward name: Score}}."""
References: TypeAlias = Sequence[npt.NDArray[np.uint8] | str | None]
"""One item per sample: the recorded frames [T,H,W,3] that it should show, the reason why they are missing, or None."""


@dataclass(frozen=True, slots=True)
class _RewardTask:
    reward: str
    sample_ids: tuple[str, ...]
    deadline_s: float  # on the clock of PipeClient.now_s


class RewardClient:
    """Submits samples for scoring and collects their scores. Each rank has one client. Not thread-safe."""

    def __init__(
        self, endpoint: str, reward: RewardRecipe, run: str, client: str, *, lost_after_s: float = 60.0
    ) -> None:
        """Connect to the reward service.

        endpoint: path of a pipes.json, or an ipc:// or tcp:// address.
        run, client: names that identify this client in the log of the service.
        lost_after_s: seconds of silence after which the service counts as lost and submitted tasks fail.
        Raises RewardError if the keys are unusable, or if the service does not answer within reward.start_timeout_s,
        lacks a reward of the recipe, or has other options for a reward.
        """
        self._reward = reward
        self.names = [function.name for function in reward.functions]
        self.reference_rewards: list[str] = []  # rewards that compare samples with recordings
        self.sound_rewards: list[str] = []  # rewards that hear the sound of videos
        self.image_rewards: list[str] = []  # rewards that look at input images
        self._lost_after_s = lost_after_s
        # Unique: the service treats tasks with equal ids as the same work, also across sessions of a run.
        self._client_id = f"{client}-{uuid.uuid4().hex[:12]}"
        self._num_submitted = 0
        self._pending_tasks: dict[str, _RewardTask] = {}
        self._scores: dict[str, dict[str, Score]] = {}
        try:
            # A unique client name: runs with equal folder names may share a service.
            keys = None if reward.keys is None else load_client_keys(Path(reward.keys))
            self._pipe = PipeClient(endpoint, run=run[:MAX_RUN_CHARS], client=self._client_id, keys=keys)
        except (PipeError, KeyFileError) as error:
            raise RewardError(f"reward service: {error}") from error
        try:
            self._pipe.attach(reward.start_timeout_s)
            self._max_batch = {f.name: self._require_reward(f) for f in reward.functions}
        except PipeError as error:
            self.close()
            raise RewardError(f"reward service: {error}") from error
        except RewardError:
            self.close()
            raise

    def submit(self, batch: MediaBatch, failures: Mapping[str, str] = MappingProxyType({})) -> None:
        """Send a copy of the batch to the service, which computes all rewards. Does not wait for the scores.

        failures: {sample id: reason} of samples with unreadable recordings. Rewards that need a recording fail for
        these samples.
        """
        media, references = list(np.array(batch.media)), batch.references if self.reference_rewards else ()
        rows = [
            {"id": sample_id, "prompt": batch.prompts[i], "metadata": dict(batch.metadata[i]), "fps": batch.fps}
            | ({"inputs": pack_arrays(batch.inputs[i])} if batch.inputs and batch.inputs[i] else {})
            for i, sample_id in enumerate(batch.sample_ids)
        ]
        for i, reference in enumerate(references):
            if reference is not None:  # one array per row: the reference follows the video's own frames
                media[i], rows[i]["reference"] = np.concatenate([media[i], reference]), len(reference)
        for i, images in enumerate(batch.images if self.image_rewards else ()):
            if images:  # they follow the sample's own frames and the reference
                frames = media[i] if media[i].ndim == 4 else media[i][None]
                media[i], rows[i]["images"] = np.concatenate([frames, np.stack(list(images.values()))]), list(images)
        for i, sound in enumerate(batch.sounds if self.sound_rewards else ()):
            if sound is not None:  # it follows all frames
                media[i] = append_sound(media[i], sound)
                rows[i] |= {"sound": list(sound.shape), "sound_rate": batch.sound_rate}
        deadline_s = self._pipe.now_s() + self._reward.timeout_s
        for sample_id, reason in failures.items():
            for name in self.reference_rewards:
                self._fail_task(_RewardTask(name, (sample_id,), deadline_s), reason)
        others = [name for name in self.names if name not in self.reference_rewards]
        for names, is_failed in ((self.names, False), (others, True)):
            chosen = [i for i, sample_id in enumerate(batch.sample_ids) if (sample_id in failures) == is_failed]
            if chosen and names:
                self._submit_rows([rows[i] for i in chosen], [media[i] for i in chosen], names, deadline_s)

    def _submit_rows(
        self,
        rows: Sequence[Mapping[str, Any]],
        media: Sequence[npt.NDArray[np.uint8]],
        names: Sequence[str],
        deadline_s: float,
    ) -> None:
        max_rows = {f"score:{name}": self._max_batch[name] for name in names}
        for piece in self._pipe.submit_rows(rows, media, max_rows, self._new_task_id, deadline_s + DEADLINE_SLACK_S):
            sample_ids = tuple(row["id"] for row in rows[piece.start : piece.stop])
            ticket = _RewardTask(piece.kind.removeprefix("score:"), sample_ids, deadline_s)
            if piece.failure is not None:
                self._fail_task(ticket, piece.failure)
            else:
                self._pending_tasks[piece.id] = ticket

    def wait(self) -> dict[str, dict[str, Score]]:
        """Wait for the scores of all samples submitted since the last call. Returns {sample id: {reward name: Score}}.

        Every sample has a Score for every reward. Failures and timeouts are failed Scores, not exceptions. Scores that
        are still missing reward.timeout_s seconds after their submission are timeouts.
        """
        while self._pending_tasks:
            LIVENESS.record_progress()
            timeout_s = min(task.deadline_s for task in self._pending_tasks.values()) - self._pipe.now_s()
            for outcome in self._pipe.take_outcomes(min(0.5, timeout_s)):  # 0.5 s: to detect a lost service quickly
                self._record_outcome(outcome)
            self._fail_overdue(self._pipe.now_s())
        scores, self._scores = self._scores, {}
        # The order of replies varies.
        return {sample_id: {name: by_name[name] for name in self.names} for sample_id, by_name in scores.items()}

    def close(self) -> None:
        self._pipe.close()

    def _require_reward(self, function: RewardFunction) -> int:
        """Return a reward's maximum batch size.

        Raises RewardError if the service lacks the reward, has other options, or does not pass input images to it.
        """
        from wfm_reward import registry

        info = self._pipe.kinds.get(f"score:{function.name}")
        if info is None:
            offers = ", ".join(sorted(kind.removeprefix("score:") for kind in self._pipe.kinds))
            raise RewardError(
                f"the reward service at {self._pipe.endpoint} does not offer {function.name} of the recipe; it offers "
                f"{offers}"
            )
        if not self._reward.spawn and function.options and function.options != info.get("options"):
            raise RewardError(
                f"the reward service at {self._pipe.endpoint} computes {function.name} with the options "
                f"{info.get('options')}, but the recipe has {function.options}: change one of them"
            )
        if info.get("needs_reference"):
            self.reference_rewards.append(function.name)
        if info.get("needs_sound"):
            self.sound_rewards.append(function.name)
        if info.get("sees_images"):
            self.image_rewards.append(function.name)
        elif (known := registry.find_reward_class(function.name, is_local=False)) and known.sees_images:
            raise RewardError(
                f"the reward service at {self._pipe.endpoint} does not pass input images to {function.name}: restart "
                "it with this version of wfm_ds"
            )
        return int(info["max_batch"])

    def _new_task_id(self, kind: str) -> str:
        self._num_submitted += 1
        return f"{self._client_id}/{self._num_submitted}#{kind.removeprefix('score:')}"

    def _record_outcome(self, outcome: TaskOutcome) -> None:
        ticket = self._pending_tasks.pop(outcome.id, None)
        if ticket is None:
            return  # already failed
        if not outcome.ok:
            self._fail_task(ticket, outcome.reason)
            return
        try:
            scores = list(_parse_scores(ticket, outcome))
        except (KeyError, TypeError, ValueError) as error:
            self._fail_task(ticket, f"malformed reply of the reward service: {error}")
            return
        for score in scores:
            self._scores.setdefault(score.sample_id, {})[score.reward] = score

    def _fail_overdue(self, now_s: float) -> None:
        """Fail and cancel the tasks after their deadline, and all tasks if the service is lost."""
        silent_s = self._pipe.silence_s
        is_lost, silence = silent_s > self._lost_after_s, f"{self._pipe.problem} for {silent_s:.0f} s"
        cause = f" ({silence})" if silent_s > 10 else ""
        overdue = [i for i, task in self._pending_tasks.items() if is_lost or now_s >= task.deadline_s]
        for task_id in overdue:
            task = self._pending_tasks.pop(task_id)
            timeout = f"timeout after {self._reward.timeout_s:g} s in {task.reward}{cause}"
            self._fail_task(task, timeout if now_s >= task.deadline_s else f"reward service lost: {silence}")
        self._pipe.cancel(overdue)

    def _fail_task(self, task: _RewardTask, why: str) -> None:
        for sample_id in task.sample_ids:
            score = Score(sample_id=sample_id, reward=task.reward, failure=why)
            self._scores.setdefault(sample_id, {})[task.reward] = score


def _parse_scores(task: _RewardTask, outcome: TaskOutcome) -> Iterator[Score]:
    """Yield the scores in a reply. Raises KeyError, TypeError or ValueError if the reply is malformed."""
    seconds = outcome.seconds / len(task.sample_ids)
    for sample_id, (value, failure, parts) in zip(task.sample_ids, outcome.meta["scores"], strict=True):
        yield Score(sample_id=sample_id, reward=task.reward, value=value, failure=failure, seconds=seconds, parts=parts)


def decode_in_replica(job: Job, latents: Tensor) -> tuple[npt.NDArray[np.uint8], list[bool]]:
    """Decode latents [B, ...]. Returns (uint8 images, whether the latents of each sample are finite).

    All ranks of the replica must call this. Only the replica leader gets the images; other ranks get an empty array
    [0].
    """
    return ReplicaDecoding(job, latents).wait()


def decode_on_all_ranks(job: Job, latents: Tensor) -> tuple[npt.NDArray[np.uint8], list[bool]]:
    """Do the same as `decode_in_replica`, but return the images on all ranks of the replica."""
    images, is_finite = decode_in_replica(job, latents)
    shared = job.world.broadcast_tensor_in_replica(torch.from_numpy(images) if job.world.is_leader else None)
    return shared.cpu().numpy(), is_finite


def list_reference_rewards(reward: RewardRecipe | None) -> list[str]:
    """Return the rewards that compare samples with recordings, without a user's own rewards in another service."""
    from wfm_reward import registry

    if reward is None:
        return []
    classes = {f.name: registry.find_reward_class(f.name, is_local=reward.spawn) for f in reward.functions}
    return [name for name, known in classes.items() if known and known.needs_reference]


class ReplicaDecoding:
    """Decodes latents: each rank of a replica decodes a part of them, and the leader (first rank) gets all images."""

    def __init__(self, job: Job, latents: Tensor) -> None:
        """Start to decode this rank's shard of `latents`. All ranks of the replica must pass identical latents."""
        self._world, ranks = job.world, job.world.sp_size
        self._counts = [len(latents) // ranks + (rank < len(latents) % ranks) for rank in range(ranks)]
        first = sum(self._counts[: job.world.sp_rank])
        self._local_decoding = job.sampler.start_decoding(
            latents, slice(first, first + self._counts[job.world.sp_rank])
        )
        self.is_pending = self._local_decoding.is_pending

    def wait(self) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        """Wait, and return the same as `decode_in_replica`. All ranks of the replica must call this."""
        images, is_finite = self._local_decoding.wait()
        return self._world.gather_replica_rows(images, self._counts), is_finite


def submit_finite_samples(
    rewards: RewardClient,
    images: npt.NDArray[np.uint8],
    is_finite: Sequence[bool],
    sample_ids: Sequence[str],
    prompts: Sequence[Prompt],
    fps: float | None,
    references: References = (),
    sounds: npt.NDArray[np.float32] | None = None,
    sound_rate: int | None = None,
) -> Scores:
    """Submit the samples with finite latents for scoring. Returns failed Scores for the other samples.

    fps: frame rate of videos, None for images.
    references: recorded frames that the samples are compared with, one per sample, or empty.
    sounds: sound [B, channels, samples] of the samples, None without sound. sound_rate: its samples per second.
    """
    rows = [i for i, ok in enumerate(is_finite) if ok]
    failures = {sample_ids[i]: item for i in rows if references and isinstance(item := references[i], str)}
    known = [None if isinstance(item, str) else item for item in references]
    if rows and len(images):
        rewards.submit(
            MediaBatch(
                media=images[rows],
                sample_ids=[sample_ids[i] for i in rows],
                prompts=[prompts[i].text for i in rows],
                metadata=[prompts[i].metadata for i in rows],
                inputs=[drop_media(prompts[i].inputs) for i in rows],
                images=[resize_images(prompts[i].inputs, images.shape[-3:-1]) for i in rows],
                fps=fps,
                references=[known[i] for i in rows] if known else (),
                sounds=() if sounds is None else [sounds[i] for i in rows],
                sound_rate=sound_rate,
            ),
            failures,
        )
    failed = [sample_id for sample_id, ok in zip(sample_ids, is_finite, strict=True) if not ok]
    return {s: {name: Score(sample_id=s, reward=name, failure=NOT_FINITE) for name in rewards.names} for s in failed}


def drop_media(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float32]]:
    """Return the inputs that are not images or videos."""
    return {name: array for name, array in inputs.items() if name != FIRST_FRAME and name not in MEDIA_INPUTS}


def resize_images(inputs: Mapping[str, npt.NDArray[Any]], size: Sequence[int]) -> dict[str, npt.NDArray[np.uint8]]:
    """Return the input images of a sample, resized (bicubic) to its size (height, width)."""
    height, width = size
    return {
        name: array
        if array.shape[:2] == (height, width)
        else np.asarray(Image.fromarray(array).resize((width, height), Image.Resampling.BICUBIC))
        for name, array in inputs.items()
        if name in IMAGE_INPUTS
    }


def gather_scores(world: World, local_scores: Mapping[str, Mapping[str, Score]]) -> Scores:
    """Return the scores of all replicas on every rank. All ranks must call this. local_scores: read on leaders only."""
    parts = world.gather_from_leaders(pack_scores(local_scores))
    return {sample_id: scores for part in parts for sample_id, scores in unpack_scores(part).items()}


def summarize_failures(scores: Sequence[Mapping[str, Score]]) -> str:
    """Return the first NUM_REASONS different failure reasons as a log line, or "" if no score failed."""
    failed = {
        f"{score.reward}: {score.failure}" for by_reward in scores for score in by_reward.values() if score.failure
    }
    return "; ".join(sorted(failed)[:NUM_REASONS])


def pack_scores(scores: Mapping[str, Mapping[str, Score]], max_failure_chars: int | None = None) -> list[Any]:
    """Return the scores as JSON, with failure reasons of at most `max_failure_chars` characters."""
    return [
        [
            sample_id,
            [
                [s.reward, s.value, s.failure and s.failure[:max_failure_chars], s.seconds, dict(s.parts)]
                for s in by_reward.values()
            ],
        ]
        for sample_id, by_reward in scores.items()
    ]


def unpack_scores(packed: Sequence[Any]) -> Scores:
    return {
        sample_id: {
            reward: Score(
                sample_id=sample_id, reward=reward, value=value, failure=failure, seconds=seconds, parts=parts
            )
            for reward, value, failure, seconds, parts in by_reward
        }
        for sample_id, by_reward in packed
    }
