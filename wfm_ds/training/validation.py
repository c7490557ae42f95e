"""Evaluation during training: samples at fixed prompts and seeds, their rewards, and the validation loss.

Deterministic.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from wfm_ds.chunks import chunks
from wfm_ds.evaluation.paired import mean_of
from wfm_ds.evaluation.scores import by_reward, totals
from wfm_ds.monitoring.run_data import ALARM
from wfm_ds.monitoring.samples import ShownSample, write_samples
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.rollout.scores import Scores, decoded, gather_scores, submit_media
from wfm_ds.run.job import Job
from wfm_ds.sampling.denoise import Plan
from wfm_ds.training.alarm import Alarm
from wfm_ds.training.first_frames import FirstFrames
from wfm_ds.types import Prompt, Score

log = logging.getLogger(__name__)


class Loss(Protocol):
    """A validation loss."""

    def measure(self) -> dict[str, float]:
        """Return metrics of the evaluation weights. Selects the policies itself."""
        ...


class Validator:
    """Evaluates the evaluation weights: generates samples, and computes rewards, a loss, or both.

    With rewards all (prompt, seed) pairs are sampled, otherwise only the ones to show. All methods are collective. The
    training weights and the active adapter are not changed.
    """

    def __init__(
        self,
        job: Job,
        prompts: Sequence[Prompt],
        *,
        rewards: RewardClient | None = None,
        judges: RewardClient | None = None,
        loss: Loss | None = None,
        rollout_plan: Callable[[int], Plan] | None = None,
        frames: FirstFrames | None = None,
    ) -> None:
        """held_out_rewards: client of the held-out rewards. rollout_plan: sampling plan of an RL step; if set, samples
        of this plan are scored too. frames: conditioning frames of the prompts."""
        settings = job.recipe.validation
        self.job, self.rewards, self.judges, self.loss, self.rollout_plan = job, rewards, judges, loss, rollout_plan
        self.frames = frames
        chosen = prompts[: settings.num_prompts]
        # Seed-major: the first samples have different prompts.
        items = [(prompt, seed) for seed in settings.seeds for prompt in chosen]
        self.asked = [
            (client, [function.name for function in reward.functions])
            for client, reward in ((rewards, job.recipe.reward), (judges, job.recipe.judging))
            if client is not None and reward is not None
        ]
        held_out_names = sorted(reward.name for reward in settings.held_out_rewards)
        self.alarm = Alarm([[prompt.id for prompt in chosen], settings.seeds, held_out_names])
        self.items = items if self.asked else items[: job.recipe.logging.num_samples]  # else only to show
        self.last: dict[str, float] = {}
        self._evaluated_at = -1
        self._broken: Scores = {}  # failed samples of this rank since the last collection of scores

    def at_start(self, step: int) -> None:
        """Evaluate before the first step. step: last completed step, above 0 in a resumed run."""
        if self.job.recipe.validation.at_start and step == 0 and self._evaluated_at != 0:
            self.evaluate(0)
        self.job.timer.restart()
        self.job.forward.clear()
        self.job.engine.forget_work()

    def state(self) -> dict[str, Any]:
        """Return the last evaluation and the state of the alarm, as JSON."""
        return {"evaluated_at": self._evaluated_at, "metrics": self.last, "alarm": self.alarm.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._evaluated_at, self.last = state["evaluated_at"], state["metrics"]
        self.alarm.restore(state.get("alarm", {}))

    def after_step(self, step: int) -> None:
        """Evaluate, or only write samples, if scheduled."""
        if due(step, self.job.recipe.validation.every):
            self.evaluate(step)
        elif due(step, self.job.recipe.logging.sample_every):
            self.show(step, self.items[: self.job.recipe.logging.num_samples])

    def at_end(self, step: int) -> dict[str, float]:
        """Evaluate the final weights unless this step is already evaluated. Returns the metrics."""
        if self._evaluated_at != step:
            self.evaluate(step)
        return self.last

    def evaluate(self, step: int) -> None:
        """Generate and score samples, compute the loss, and write metrics and samples."""
        job = self.job
        with job.timer("validation"), job.engine.policy(job.evaluation_policy), torch.no_grad():
            media = self.sample(self.items, job.sampler.evaluation_plan(), scored_as=f"val/{step}", by=self.asked)
            if self.rollout_plan is not None:
                plan = self.rollout_plan(max(step, 1))
                self.sample(self.items, plan, scored_as=f"val/{step}/rollout", by=self.asked[:1])
        with job.timer("validation"):
            metrics = self.loss.measure() if self.loss is not None else {}
        gathered = self.collect_scores()
        scores = self.scores_of(f"val/{step}", gathered)
        metrics |= self.score_metrics(step, scores)
        if self.rollout_plan is not None:
            prompts = [prompt.id for prompt, _ in self.items]
            metrics |= correlation_metrics(scores, self.scores_of(f"val/{step}/rollout", gathered), prompts)
        self._write(step, self.items, media, scores)
        if metrics:
            job.monitor.scalars(step * job.derived.updates_per_step, metrics)
            shown = [n for n in metrics if n in ("val/loss", "val/accuracy") or n.endswith("/mean")]
            job.monitor.message(f"step {step}: " + ", ".join(f"{n} {metrics[n]:.4f}" for n in shown))
        self.last, self._evaluated_at = metrics, step

    def show(self, step: int, items: Sequence[tuple[Prompt, int]]) -> None:
        """Generate samples and write them without scores."""
        job = self.job
        with job.timer("validation"), job.engine.policy(job.evaluation_policy), torch.no_grad():
            media = self.sample(items, job.sampler.evaluation_plan())
        self._write(step, items, media, [])

    def sample(
        self,
        items: Sequence[tuple[Prompt, int]],
        plan: Plan,
        *,
        scored_as: str = "",
        by: Sequence[tuple[RewardClient, list[str]]] = (),
    ) -> list[npt.NDArray[np.uint8]]:
        """Generate all items, submit them to the reward clients, and return the first `logging.num_samples` on rank 0.

        Returns images uint8 [H,W,3] or videos [T,H,W,3]. Item k is scored under the id `<id_prefix>/k`.
        """
        job, world = self.job, self.job.world
        shard_size = math.ceil(len(items) / world.dp_size)
        shard = range(world.dp_rank * shard_size, (world.dp_rank + 1) * shard_size)
        num_shown = min(job.recipe.logging.num_samples, len(items))
        shown: list[npt.NDArray[np.uint8]] = []
        for part in chunks(shard, job.recipe.engine.max_forward_batch):
            chosen = [items[k % len(items)] for k in part]
            prompts, seeds = [prompt for prompt, _ in chosen], [seed for _, seed in chosen]
            frames = None if self.frames is None else self.frames.of(prompts)
            latents = job.sampler.generate("validation", prompts, seeds, plan, conditional_frames=frames).clean
            media, finite = decoded(job, latents)
            # Indices beyond the last item repeat items to keep replicas equal. Their scores are never read.
            ids, fps = [f"{scored_as}/{k}" for k in part], job.recipe.sampling.fps if job.model.video else None
            for client, names in by:
                failed = submit_media(client, names, media, finite, ids, prompts, fps)
                self._broken = joined(self._broken, failed)
            shown += list(media[: min(num_shown, shard_size) - len(shown)])
        if num_shown <= shard_size or not world.is_leader:  # rank 0 has all of them; other ranks' results are unused
            return shown
        return [item for part in world.replica_gather_arrays(np.stack(shown)) for item in part][:num_shown]

    def collect_scores(self) -> Scores:
        """Wait for outstanding scores and gather them. Identical on every rank. Collective."""
        if not self.asked:
            return {}
        local_scores = self._broken
        for client, _ in self.asked:
            local_scores = joined(local_scores, client.wait())
        gathered = gather_scores(self.job.world, local_scores)
        self._broken = {}
        return gathered

    def score_metrics(self, step: int, scores: Sequence[Mapping[str, Score]]) -> dict[str, float]:
        """Return metrics of rewards, held-out rewards and the alarm. Logs the alarm if it is raised."""
        if not scores:
            return {}
        recipe, num_seeds = self.job.recipe, len(self.job.recipe.validation.seeds)
        samples = prompt_by_prompt(scores, num_seeds)
        held_out = [reward.name for reward in recipe.validation.held_out_rewards]
        metrics = reward_metrics(samples, num_seeds, held_out)
        if held_out:
            values = by_reward(samples, num_seeds)
            total = None if recipe.reward is None else totals(samples, num_seeds, recipe.reward)
            metrics |= self.alarm.look(total, {name: values[name] for name in held_out})
            if self.alarm.fell and self.job.world.is_main:
                log.warning("%s step %d: %s", ALARM, step, self.alarm.sentence())
        return metrics

    def scores_of(self, scored_as: str, gathered: Scores) -> list[Mapping[str, Score]]:
        """Return the scores with this id prefix in item order; empty if nothing was scored."""
        return [gathered[f"{scored_as}/{k}"] for k in range(len(self.items))] if gathered else []

    def _write(
        self,
        step: int,
        items: Sequence[tuple[Prompt, int]],
        media: Sequence[npt.NDArray[np.uint8]],
        scores: Sequence[Mapping[str, Score]],
    ) -> None:
        if not self.job.world.is_main:
            return
        samples = [
            ShownSample(
                prompt=prompt.text,
                prompt_id=prompt.id,
                seed=seed,
                media=item,
                fps=self.job.recipe.sampling.fps if self.job.model.video else None,
                rewards={name: score.value for name, score in scores[k].items()} if scores else {},
            )
            for k, ((prompt, seed), item) in enumerate(zip(items, media, strict=False))
        ]
        write_samples(Path(self.job.recipe.run.output_dir) / "samples" / f"step_{step}", samples)
        self.job.monitor.samples(step * self.job.derived.updates_per_step, "samples", samples)


def due(step: int, every: int) -> bool:
    """Return whether something with this interval is scheduled after the step. every: 0 for never."""
    return every > 0 and step % every == 0


def joined(first: Scores, second: Scores) -> Scores:
    """Merge scores by sample and reward. Each argument may have some of the rewards of a sample."""
    return {sample: {**first.get(sample, {}), **second.get(sample, {})} for sample in {**first, **second}}


def prompt_by_prompt(scores: Sequence[Mapping[str, Score]], num_seeds: int) -> list[Mapping[str, Score]]:
    """Reorder seed-major scores to prompt-major."""
    num_prompts = len(scores) // num_seeds
    return [scores[seed * num_prompts + prompt] for prompt in range(num_prompts) for seed in range(num_seeds)]


def reward_metrics(
    samples: Sequence[Mapping[str, Score]], num_seeds: int, judges: Collection[str] = ()
) -> dict[str, float]:
    """Return `val/reward/<f>/mean`, `ci95` (half of the 95 % interval over prompts) and `failed`, over scored samples.

    Held-out rewards use the prefix `val/judge/<f>/`. samples: prompt-major.
    """
    metrics: dict[str, float] = {}
    for tag, values in sorted(by_reward(samples, num_seeds).items()):
        kind = "judge" if any(tag == name or tag.startswith(f"{name}/") for name in judges) else "reward"
        mean = mean_of(values)
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
    """Compare rewards of evaluation samples and rollout samples with equal prompts and seeds.

    Returns in `val/reward/<f>/`: `rollout_mean` (mean reward of the rollout samples), `rank_correlation` over all
    pairs, and `rank_correlation_within_prompts`, averaged over prompts. Advantages depend on the ranks within prompts.
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
    """Return Spearman's rho: Pearson's correlation of the mean ranks. None if undefined (fewer than two pairs, or all
    values of one side equal)."""
    if len(pairs) < 2:
        return None
    first, second = (mean_ranks(side) for side in np.asarray(pairs, np.float64).T)
    if first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def mean_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ranks from 1. Equal values get the mean of their ranks."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[index]
    return ranks
