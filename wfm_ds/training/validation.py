"""Evaluation during training: samples for fixed prompts and seeds, their rewards, and the validation loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from wfm_ds.chunks import split_into_chunks
from wfm_ds.distributed.progress import show_wait
from wfm_ds.evaluation.paired_statistics import estimate_mean
from wfm_ds.evaluation.results import scores_by_reward, total_rewards
from wfm_ds.monitoring.run_data import ALARM_PREFIX
from wfm_ds.monitoring.samples import GeneratedSample, write_samples
from wfm_ds.rollout.rewards import RewardClient, Scores, decode_in_replica, gather_scores, submit_finite_samples
from wfm_ds.runs.job import Job
from wfm_ds.sampling.denoise import SamplingPlan
from wfm_ds.training.reward_alarm import RewardAlarm
from wfm_ds.training.validation_frames import ValidationFrames
from wfm_ds.types import Prompt, Score

log = logging.getLogger(__name__)


class LossMetric(Protocol):
    def measure_loss(self) -> dict[str, float]:
        """Return the loss metrics of the evaluation weights."""
        ...


class Validator:
    """Generates samples with the evaluation weights and computes rewards, a validation loss, or both.

    In a run with rewards, it generates a sample for each (prompt, seed) pair. In other runs, it generates only the
    samples to log. The training weights do not change. All methods are collective.
    """

    def __init__(
        self,
        job: Job,
        prompts: Sequence[Prompt],
        *,
        rewards: RewardClient | None = None,
        held_out_rewards: RewardClient | None = None,
        loss: LossMetric | None = None,
        rollout_plan: Callable[[int], SamplingPlan] | None = None,
        frames: ValidationFrames | None = None,
    ) -> None:
        """frames: conditioning frames of the prompts.

        rollout_plan: function that returns the sampling plan of rollouts for an RL step. If it is given, the validator
        also generates and scores samples with this plan.
        """
        settings = job.recipe.validation
        self.job, self.loss, self.rollout_plan, self.frames = job, loss, rollout_plan, frames
        chosen = prompts[: settings.num_prompts]
        # Seed-major: the first samples have different prompts.
        items = [(prompt, seed) for seed in settings.seeds for prompt in chosen]
        self.scorers = [client for client in (rewards, held_out_rewards) if client is not None]
        held_out_names = sorted(reward.name for reward in settings.held_out_rewards)
        self.alarm = RewardAlarm([[prompt.id for prompt in chosen], settings.seeds, held_out_names])
        self.items = items if self.scorers else items[: job.recipe.logging.num_samples]  # else only to show
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
        """Return the metrics of the final weights, and evaluate these weights first if necessary."""
        if self._evaluated_at != step:
            self.evaluate(step)
        return self.last_metrics

    def evaluate(self, step: int) -> None:
        """Generate and score samples, compute the validation loss, and write metrics and samples."""
        job, policy = self.job, self.job.evaluation_policy
        wait = show_wait("generating validation samples")
        with job.timer("validation"), wait, job.engine.use_policy(policy), torch.no_grad():
            media = self.generate_samples(
                self.items, job.sampler.evaluation_plan(), id_prefix=f"val/{step}", scorers=self.scorers
            )
            if self.rollout_plan is not None:
                plan = self.rollout_plan(max(step, 1))
                self.generate_samples(self.items, plan, id_prefix=f"val/{step}/rollout", scorers=self.scorers[:1])
        with job.timer("validation"), show_wait("computing the validation loss"):
            metrics = self.loss.measure_loss() if self.loss is not None else {}
        gathered = self.collect_scores()
        scores = self.select_scores(f"val/{step}", gathered)
        metrics |= self.score_metrics(step, scores)
        if self.rollout_plan is not None:
            prompts = [prompt.id for prompt, _ in self.items]
            metrics |= correlation_metrics(scores, self.select_scores(f"val/{step}/rollout", gathered), prompts)
        self._write_samples(step, self.items, media, scores)
        if metrics:
            job.monitor.log_scalars(step * job.run_sizes.updates_per_step, metrics)
            shown = [n for n in metrics if n in ("val/loss", "val/accuracy") or n.endswith("/mean")]
            if shown:
                job.monitor.log_message(f"step {step}: " + ", ".join(f"{n} {metrics[n]:.4f}" for n in shown))
        self.last_metrics, self._evaluated_at = metrics, step

    def generate_and_write(self, step: int, items: Sequence[tuple[Prompt, int]]) -> None:
        job = self.job
        with job.timer("validation"), job.engine.use_policy(job.evaluation_policy), torch.no_grad():
            media = self.generate_samples(items, job.sampler.evaluation_plan())
        self._write_samples(step, items, media, [])

    def generate_samples(
        self,
        items: Sequence[tuple[Prompt, int]],
        plan: SamplingPlan,
        *,
        id_prefix: str = "",
        scorers: Sequence[RewardClient] = (),
    ) -> list[npt.NDArray[np.uint8]]:
        """Generate a sample for each item, submit the samples to the reward clients, and return some of them on rank 0.

        Returns the first `logging.num_samples` samples, as uint8 images [H,W,3] or videos [T,H,W,3].
        items: (prompt, seed) pairs. Item k is scored under the sample id `<id_prefix>/<k>`.
        """
        job, world = self.job, self.job.world
        shard_size = math.ceil(len(items) / world.dp_size)
        shard = range(world.dp_rank * shard_size, (world.dp_rank + 1) * shard_size)
        num_shown = min(job.recipe.logging.num_samples, len(items))
        shown: list[npt.NDArray[np.uint8]] = []
        for part in split_into_chunks(shard, job.recipe.engine.max_forward_batch):
            chosen = [items[k % len(items)] for k in part]
            prompts, seeds = [prompt for prompt, _ in chosen], [seed for _, seed in chosen]
            frames = None if self.frames is None else self.frames.load_frames(prompts)
            latents = job.sampler.generate("validation", prompts, seeds, plan, conditional_frames=frames).clean_latents
            media, finite = decode_in_replica(job, latents)
            # Repeat items, so that all replicas run the same forward passes. Scores of repeated items are not read.
            ids, fps = [f"{id_prefix}/{k}" for k in part], job.recipe.sampling.fps if job.model.is_video else None
            for client in scorers:
                failed = submit_finite_samples(client, media, finite, ids, prompts, fps)
                self._failed_scores = merge_scores(self._failed_scores, failed)
            shown += list(media[: min(num_shown, shard_size) - len(shown)])
        if num_shown <= shard_size or not world.is_leader:  # rank 0 has all of them; other ranks' results are unused
            return shown
        return [item for part in world.gather_leader_arrays(np.stack(shown)) for item in part][:num_shown]

    def collect_scores(self) -> Scores:
        """Wait for outstanding scores and return the scores of all ranks, on every rank. Collective."""
        if not self.scorers:
            return {}
        local_scores = self._failed_scores
        for client in self.scorers:
            local_scores = merge_scores(local_scores, client.wait())
        gathered = gather_scores(self.job.world, local_scores)
        self._failed_scores = {}
        return gathered

    def score_metrics(self, step: int, scores: Sequence[Mapping[str, Score]]) -> dict[str, float]:
        """Return the metrics of rewards and held-out rewards. Logs a warning if the reward-hacking alarm goes off."""
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

    def select_scores(self, id_prefix: str, gathered: Scores) -> list[Mapping[str, Score]]:
        """Return the scores of the samples `<id_prefix>/<k>` in the order of `self.items`, or [] without scores."""
        return [gathered[f"{id_prefix}/{k}"] for k in range(len(self.items))] if gathered else []

    def _write_samples(
        self,
        step: int,
        items: Sequence[tuple[Prompt, int]],
        media: Sequence[npt.NDArray[np.uint8]],
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
            )
            for k, ((prompt, seed), item) in enumerate(zip(items, media, strict=False))
        ]
        write_samples(Path(self.job.recipe.run.output_dir) / "samples" / f"step_{step}", samples)
        self.job.monitor.log_samples(step * self.job.run_sizes.updates_per_step, "samples", samples)


def partial_scores(scores: Mapping[str, Score]) -> dict[str, float]:
    """Return {`reward/part`: value} for the partial scores of one sample."""
    return {f"{name}/{part}": value for name, score in scores.items() for part, value in score.parts.items()}


def is_due(step: int, every: int) -> bool:
    """Return whether an action that runs every `every` steps is due after this step. `every` = 0 means never."""
    return every > 0 and step % every == 0


def merge_scores(first: Scores, second: Scores) -> Scores:
    """Merge two dicts {sample: {reward name: score}}. The two dicts may contain different rewards of a sample."""
    return {sample: {**first.get(sample, {}), **second.get(sample, {})} for sample in {**first, **second}}


def order_by_prompt(scores: Sequence[Mapping[str, Score]], num_seeds: int) -> list[Mapping[str, Score]]:
    """Reorder scores from seed-major to prompt-major order.

    Seed-major order starts with all prompts of the first seed, prompt-major order with all seeds of the first prompt.
    """
    num_prompts = len(scores) // num_seeds
    return [scores[seed * num_prompts + prompt] for prompt in range(num_prompts) for seed in range(num_seeds)]


def reward_metrics(
    samples: Sequence[Mapping[str, Score]], num_seeds: int, held_out_rewards: Collection[str] = ()
) -> dict[str, float]:
    """Return `val/reward/<name>/mean`, `val/reward/<name>/ci95` and `val/reward/<name>/failed` for each reward.

    `ci95` is half the width of the 95 % confidence interval of the mean over prompts. `failed` is the number of failed
    scores. Held-out rewards have the prefix `val/held_out/<name>/` instead. samples: scores in prompt-major order.
    """
    metrics: dict[str, float] = {}
    for tag, values in sorted(scores_by_reward(samples, num_seeds).items()):
        kind = "held_out" if any(tag == name or tag.startswith(f"{name}/") for name in held_out_rewards) else "reward"
        mean = estimate_mean(values)
        if mean is not None:
            metrics[f"val/{kind}/{tag}/mean"] = mean.value
        if mean is not None and mean.half_width is not None:
            metrics[f"val/{kind}/{tag}/ci95"] = mean.half_width
        if tag in samples[0]:
            metrics[f"val/{kind}/{tag}/failed"] = float(sum(s[tag].failure is not None for s in samples))
    return metrics


def correlation_metrics(
    evaluated: Sequence[Mapping[str, Score]], rolled_out: Sequence[Mapping[str, Score]], prompts: Sequence[str]
) -> dict[str, float]:
    """Compare the rewards of evaluation samples with those of rollout samples for the same prompts and seeds.

    Returns three metrics per reward, with the prefix `val/reward/<name>/`. `rollout_mean` is the mean reward of the
    rollout samples. `rank_correlation` is computed over all pairs of samples. `rank_correlation_within_prompts` is
    computed per prompt and then averaged. Training depends on the last metric, because advantages compare samples of
    one prompt.
    """
    metrics: dict[str, float] = {}
    for name in sorted(rolled_out[0]):  # held-out rewards do not score rollouts
        values = [(e[name].value, r[name].value, p) for e, r, p in zip(evaluated, rolled_out, prompts, strict=True)]
        pairs = [(a, b, prompt) for a, b, prompt in values if a is not None and b is not None]
        if not pairs:
            continue
        by_prompt = [[(a, b) for a, b, other in pairs if other == prompt] for prompt in dict.fromkeys(prompts)]
        within_prompts = [rho for part in by_prompt if (rho := rank_correlation(part)) is not None]
        overall = rank_correlation([(a, b) for a, b, _ in pairs])
        metrics[f"val/reward/{name}/rollout_mean"] = float(np.mean([b for _, b, _ in pairs]))
        if overall is not None:
            metrics[f"val/reward/{name}/rank_correlation"] = overall
        if within_prompts:
            metrics[f"val/reward/{name}/rank_correlation_within_prompts"] = float(np.mean(within_prompts))
    return metrics


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation of (x, y) pairs. Equal values get the mean of their ranks.

    Returns None for fewer than two pairs, and if all x or all y are equal.
    """
    if len(pairs) < 2:
        return None
    first, second = (mean_ranks(side) for side in np.asarray(pairs, np.float64).T)
    if first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def mean_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the rank of each value, starting at 1. Equal values get the mean of their ranks."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[index]
    return ranks
