"""Evaluation during training: samples for fixed prompts and seeds, their rewards, and the validation loss."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from wfm_ds.chunks import split_into_chunks
from wfm_ds.distributed.progress import show_wait
from wfm_ds.evaluation.clip_curves import average_clips
from wfm_ds.evaluation.recordings import Recordings
from wfm_ds.evaluation.results import scores_by_reward, total_rewards
from wfm_ds.models.clips import generate_clips
from wfm_ds.monitoring.run_data import ALARM_PREFIX
from wfm_ds.monitoring.samples import GeneratedSample, select_images, write_samples
from wfm_ds.rollout.rewards import RewardClient, Scores, decode_in_replica, decode_on_all_ranks, gather_scores
from wfm_ds.runs.job import Job
from wfm_ds.sampling.denoise import SamplingPlan
from wfm_ds.training.clip_scoring import ClipScoring, GeneratedClip, clip_id, merge_scores
from wfm_ds.training.reward_alarm import RewardAlarm
from wfm_ds.training.validation_frames import ValidationSamples
from wfm_ds.training.validation_metrics import clip_metrics, correlation_metrics, order_by_prompt, reward_metrics
from wfm_ds.types import Prompt, Score

log = logging.getLogger(__name__)


class LossMetric(Protocol):
    def measure_loss(self) -> dict[str, float]: ...


class Validator:
    """Generates samples with the evaluation weights and computes rewards, a validation loss, or both.

    A run with rewards generates a sample for each (prompt, seed) pair. Other runs generate only the samples to log. All
    ranks must call every method.
    """

    def __init__(
        self,
        job: Job,
        samples: ValidationSamples,
        *,
        rewards: RewardClient | None = None,
        held_out_rewards: RewardClient | None = None,
        loss: LossMetric | None = None,
        rollout_plan: Callable[[int], SamplingPlan] | None = None,
    ) -> None:
        """rollout_plan: function that returns the sampling plan of rollouts for an RL step.

        If it is given, the validator also generates and scores samples with this plan.
        """
        settings = job.recipe.validation
        self.job, self.samples, self.loss, self.rollout_plan = job, samples, loss, rollout_plan
        self.num_clips = settings.clips
        chosen = samples.prompts[: settings.num_prompts]
        # Seed-major: the first samples have different prompts.
        items = [(prompt, seed) for seed in settings.seeds for prompt in chosen]
        self.scorers = [client for client in (rewards, held_out_rewards) if client is not None]
        held_out_names = sorted(reward.name for reward in settings.held_out_rewards)
        clips = [self.num_clips] if self.num_clips > 1 else []
        self.alarm = RewardAlarm([[prompt.id for prompt in chosen], settings.seeds, held_out_names, *clips])
        # Recordings are measured only clip by clip: a single clip stays close to its conditioning frames.
        self.recordings = samples.recordings if self.num_clips > 1 else None
        is_scored = bool(self.scorers or self.recordings)
        self.items = items if is_scored else items[: job.recipe.logging.num_samples]  # otherwise only samples to log
        self.last_metrics: dict[str, float] = {}
        self._evaluated_at = -1
        self._failed_scores: Scores = {}  # failed samples of this rank since the last collection of scores

    def evaluate_at_start(self, step: int) -> None:
        """Evaluate a new run if validation.at_start is set. step: last completed step, 0 in a new run."""
        if self.job.recipe.validation.at_start and step == 0 and self._evaluated_at != 0:
            self.evaluate(0)
        self.job.timer.restart()
        self.job.forward.reset_counts()
        self.job.engine.discard_flop_count()

    def state_dict(self) -> dict[str, Any]:
        return {"evaluated_at": self._evaluated_at, "metrics": self.last_metrics, "alarm": self.alarm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._evaluated_at, self.last_metrics = state["evaluated_at"], state["metrics"]
        self.alarm.load_state_dict(state.get("alarm", {}))

    def after_step(self, step: int) -> None:
        """Run the evaluation if it is due after this step. If only logged samples are due, generate and write them."""
        if is_due(step, self.job.recipe.validation.every):
            self.evaluate(step)
        elif is_due(step, self.job.recipe.logging.sample_every):
            self.generate_and_write(step, self.items[: self.job.recipe.logging.num_samples])

    def evaluate_at_end(self, step: int) -> dict[str, float]:
        """Return the metrics of the final weights. Evaluates the weights first if this was not done after the step."""
        if self._evaluated_at != step:
            self.evaluate(step)
        return self.last_metrics

    def evaluate(self, step: int) -> None:
        job, policy = self.job, self.job.evaluation_policy
        with job.timer("validation"), job.engine.use_policy(policy), torch.no_grad():
            media, sounds = self.generate_samples(
                self.items,
                job.sampler.evaluation_plan(),
                id_prefix=f"val/{step}",
                scorers=self.scorers,
                recordings=self.recordings,
            )
            if self.rollout_plan is not None:
                plan = self.rollout_plan(max(step, 1))
                self.generate_samples(self.items, plan, id_prefix=f"val/{step}/rollout", scorers=self.scorers[:1])
        with job.timer("validation"), show_wait("computing the validation loss"):
            metrics = self.loss.measure_loss() if self.loss is not None else {}
        gathered = self.collect_scores()
        clips = self.select_scores(f"val/{step}", gathered)
        scores = [average_clips(sample) for sample in zip(*clips, strict=True)]
        metrics |= self.score_metrics(step, scores)
        if self.num_clips > 1:
            metrics |= self.clip_metrics(clips)
        if self.rollout_plan is not None:
            rolled_out = zip(*self.select_scores(f"val/{step}/rollout", gathered), strict=True)
            prompts = [prompt.id for prompt, _ in self.items]
            metrics |= correlation_metrics(scores, [average_clips(sample) for sample in rolled_out], prompts)
        self._write_samples(step, self.items, media, sounds, scores)
        if metrics:
            job.monitor.log_scalars(step * job.run_sizes.updates_per_step, metrics)
            shown = [n for n in metrics if n in ("val/loss", "val/accuracy") or n.endswith("/mean")]
            if shown:
                job.monitor.log_message(f"step {step}: " + ", ".join(f"{n} {metrics[n]:.4f}" for n in shown))
        self.last_metrics, self._evaluated_at = metrics, step

    def generate_and_write(self, step: int, items: Sequence[tuple[Prompt, int]]) -> None:
        job = self.job
        with job.timer("validation"), job.engine.use_policy(job.evaluation_policy), torch.no_grad():
            media, sounds = self.generate_samples(items, job.sampler.evaluation_plan())
        self._write_samples(step, items, media, sounds, [])

    def generate_samples(
        self,
        items: Sequence[tuple[Prompt, int]],
        plan: SamplingPlan,
        *,
        id_prefix: str = "",
        scorers: Sequence[RewardClient] = (),
        recordings: Recordings | None = None,
    ) -> tuple[list[npt.NDArray[np.uint8]], list[npt.NDArray[np.float32]]]:
        """Generate a sample for each item, submit the samples to the reward clients, and return some of them on rank 0.

        Returns the first `logging.num_samples` samples, as uint8 images [H,W,3] or videos [T,H,W,3] of all clips, and
        their sound [channels, samples], or [] if the model has no sound.
        items: (prompt, seed) pairs. Item k is scored under the sample id `<id_prefix>/<k>`.
        recordings: recordings that the samples are compared with.
        """
        job, world, layout = self.job, self.job.world, self.samples.layout
        shard_size = math.ceil(len(items) / world.dp_size)
        shard = range(world.dp_rank * shard_size, (world.dp_rank + 1) * shard_size)
        num_shown = min(job.recipe.logging.num_samples, len(items))
        decode = decode_in_replica if self.num_clips == 1 else decode_on_all_ranks
        scoring = ClipScoring(sampler=job.sampler, layout=layout, scorers=scorers, recordings=recordings)
        shown: list[npt.NDArray[np.uint8]] = []
        sounds: list[npt.NDArray[np.float32]] = []
        with show_wait("generating validation samples", len(shard)) as display:
            for part in split_into_chunks(shard, job.recipe.engine.max_forward_batch):
                chosen = [items[k % len(items)] for k in part]
                prompts, seeds = [prompt for prompt, _ in chosen], [seed for _, seed in chosen]
                frames = None if self.samples.frames is None else self.samples.frames.load_frames(prompts)
                recorded = self._load_recordings(prompts, scoring)
                clips = generate_clips(
                    *(job.sampler, "validation", prompts, seeds, plan, layout, self.num_clips, frames),
                    decode=lambda latents: decode(job, latents),
                )
                videos = []
                for clip, generated in enumerate(clips):
                    # Repeat items, so that all replicas run the same forward passes. Scores of repeated items are
                    # not read.
                    if world.is_leader:
                        made = [
                            GeneratedClip(
                                sample_id=f"{id_prefix}/{k}",
                                clip=clip,
                                prompt=generated.prompts[i],
                                pixels=generated.pixels[i],
                                is_finite=generated.is_finite[i],
                                recorded=recorded[i],
                                sound=None if generated.sound is None else generated.sound[i],
                            )
                            for i, k in enumerate(part)
                        ]
                        self._failed_scores = merge_scores(self._failed_scores, scoring.submit(made))
                    videos.append(generated.pixels)
                missing = min(num_shown, shard_size) - len(shown)
                shown += list(layout.join(videos)[:missing])
                sounds += [] if generated.sound is None else list(generated.sound[:missing])
                display.advance(len(part))
        if num_shown <= shard_size or not world.is_leader:  # rank 0 has all of them; other ranks' results are unused
            return shown, sounds
        videos_of_all = world.gather_leader_arrays(np.stack(shown))
        sounds_of_all = world.gather_leader_arrays(np.stack(sounds)) if sounds else []
        return list(itertools.chain(*videos_of_all))[:num_shown], list(itertools.chain(*sounds_of_all))[:num_shown]

    def _load_recordings(
        self, prompts: Sequence[Prompt], scoring: ClipScoring
    ) -> Sequence[npt.NDArray[np.uint8] | str | None]:
        """Return for each prompt the recording, or the reason why it cannot be read.

        Returns None for each prompt if recordings are not needed, and on ranks that are not replica leaders.
        """
        known = self.samples.recordings
        if known is None or not scoring.needs_recordings or not self.job.world.is_leader:
            return [None] * len(prompts)
        loaded = {prompt_id: known.load(prompt_id) for prompt_id in {prompt.id for prompt in prompts}}
        return [loaded[prompt.id] for prompt in prompts]

    def collect_scores(self) -> Scores:
        """Wait for outstanding scores and return the scores of all ranks, on every rank. All ranks must call this."""
        if not (self.scorers or self.recordings):
            return {}
        local_scores = self._failed_scores
        for client in self.scorers:
            local_scores = merge_scores(local_scores, client.wait())
        gathered = gather_scores(self.job.world, local_scores)
        self._failed_scores = {}
        return gathered

    def score_metrics(self, step: int, scores: Sequence[Mapping[str, Score]]) -> dict[str, float]:
        if not scores:
            return {}
        recipe, num_seeds = self.job.recipe, len(self.job.recipe.validation.seeds)
        samples = order_by_prompt(scores, num_seeds)
        held_out = [reward.name for reward in recipe.validation.held_out_rewards]
        metrics = reward_metrics(samples, num_seeds, held_out)
        if held_out:
            values = scores_by_reward(samples, num_seeds)
            total = None if recipe.reward is None else total_rewards(samples, num_seeds, recipe.reward)
            metrics |= self.alarm.update(total, {name: values[name] for name in held_out})
            if self.alarm.falling_rewards and self.job.world.is_main:
                log.warning("%s step %d: %s", ALARM_PREFIX, step, self.alarm.summary())
        return metrics

    def clip_metrics(self, clips: Sequence[Sequence[Mapping[str, Score]]]) -> dict[str, float]:
        """Return the metrics of each clip. clips: for each clip, the scores of all samples."""
        recipe, num_seeds = self.job.recipe, len(self.job.recipe.validation.seeds)
        held_out = [reward.name for reward in recipe.validation.held_out_rewards]
        ordered = [order_by_prompt(scores, num_seeds) for scores in clips if scores]
        return clip_metrics(ordered, num_seeds, held_out) if ordered else {}

    def select_scores(self, id_prefix: str, gathered: Scores) -> list[list[Mapping[str, Score]]]:
        """Return for each clip the scores of all samples, or [] if there are no scores.

        gathered: result of `collect_scores`.
        """
        numbers = range(len(self.items)) if gathered else ()
        return [[gathered[clip_id(f"{id_prefix}/{k}", clip)] for k in numbers] for clip in range(self.num_clips)]

    def _write_samples(
        self,
        step: int,
        items: Sequence[tuple[Prompt, int]],
        media: Sequence[npt.NDArray[np.uint8]],
        sounds: Sequence[npt.NDArray[np.float32]],
        scores: Sequence[Mapping[str, Score]],
    ) -> None:
        if not self.job.world.is_main:
            return
        samples = [
            GeneratedSample(
                prompt=prompt.text,
                prompt_id=prompt.id,
                seed=seed,
                pixels=item,
                fps=self.job.recipe.sampling.fps if self.job.model.is_video else None,
                rewards={name: score.value for name, score in scores[k].items()} if scores else {},
                parts=partial_scores(scores[k]) if scores else {},
                images=select_images(prompt),
                sound=sounds[k] if sounds else None,
                sound_rate=self.job.model.sound_rate,
            )
            for k, ((prompt, seed), item) in enumerate(zip(items, media, strict=False))
        ]
        write_samples(Path(self.job.recipe.run.output_dir) / "samples" / f"step_{step}", samples)
        self.job.monitor.log_samples(step * self.job.run_sizes.updates_per_step, "samples", samples)


def partial_scores(scores: Mapping[str, Score]) -> dict[str, float]:
    """Return {`reward/part`: value} for the entries of Score.parts. scores: {reward name: Score} of one sample."""
    return {f"{name}/{part}": value for name, score in scores.items() for part, value in score.parts.items()}


def is_due(step: int, every: int) -> bool:
    """Return whether an action that runs every `every` steps is due after this step. `every` = 0 means never."""
    return every > 0 and step % every == 0
