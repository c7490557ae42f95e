"""Evaluation: images or videos at fixed prompts and seeds, their rewards or the validation loss, deterministic."""

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
    def measure(self) -> dict[str, float]:
        """Metrics of the evaluation weights; it chooses the policies itself."""
        ...


class Validator:
    """Samples with the evaluation weights: every (prompt, seed) pair for rewards, else those that are shown; measures
    rewards, a loss, or both.

    Every rank calls every method at the same step; leaves the training weights and their active adapter untouched.
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
        """judges: rewards that are held out. rollout_plan: of an RL step's rollouts. Given with `rewards`, samples of
        it are scored beside the others. frames: what samples of these prompts begin with."""
        settings = job.recipe.validation
        self.job, self.rewards, self.judges, self.loss, self.rollout_plan = job, rewards, judges, loss, rollout_plan
        self.frames = frames
        chosen = prompts[: settings.num_prompts]
        # Seed-major: the first samples are one of each prompt.
        items = [(prompt, seed) for seed in settings.seeds for prompt in chosen]
        self.asked = [
            (client, [function.name for function in reward.functions])
            for client, reward in ((rewards, job.recipe.reward), (judges, job.recipe.judging))
            if client is not None and reward is not None
        ]
        self.alarm = Alarm([[prompt.id for prompt in chosen], settings.seeds, sorted(j.name for j in settings.judges)])
        self.items = items if self.asked else items[: job.recipe.logging.num_samples]  # else for show alone
        self.last: dict[str, float] = {}
        self._evaluated_at = -1
        self._broken: Scores = {}  # failures of this rank since scores were last collected

    def at_start(self, step: int) -> None:
        """Evaluate before the first step; `step`: the last one done, more than 0 in a run that is continued."""
        if self.job.recipe.validation.at_start and step == 0 and self._evaluated_at != 0:
            self.evaluate(0)
        self.job.timer.restart()
        self.job.forward.clear()
        self.job.engine.forget_work()

    def state(self) -> dict[str, Any]:
        """The last evaluation, as JSON."""
        return {"evaluated_at": self._evaluated_at, "metrics": self.last, "alarm": self.alarm.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._evaluated_at, self.last = state["evaluated_at"], state["metrics"]
        self.alarm.restore(state.get("alarm", {}))

    def after_step(self, step: int) -> None:
        """Evaluate or only show samples, when the recipe says so."""
        if due(step, self.job.recipe.validation.every):
            self.evaluate(step)
        elif due(step, self.job.recipe.logging.sample_every):
            self.show(step, self.items[: self.job.recipe.logging.num_samples])

    def at_end(self, step: int) -> dict[str, float]:
        """Evaluate the final weights, unless that was just done."""
        if self._evaluated_at != step:
            self.evaluate(step)
        return self.last

    def evaluate(self, step: int) -> None:
        job = self.job
        with job.timer("validation"), job.engine.policy(job.evaluation_policy), torch.no_grad():
            media = self.sample(self.items, job.sampler.evaluation_plan(), scored_as=f"val/{step}", by=self.asked)
            if self.rollout_plan is not None:
                as_rollout = self.rollout_plan(max(step, 1))
                self.sample(self.items, as_rollout, scored_as=f"val/{step}/rollout", by=self.asked[:1])
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
        """Images uint8 [H,W,3] or videos [T,H,W,3] of the first `logging.num_samples` items, on rank 0; all items are
        scored by these clients, item k under the id `<scored_as>/k`."""
        job, world = self.job, self.job.world
        share = math.ceil(len(items) / world.dp_size)
        mine = range(world.dp_rank * share, (world.dp_rank + 1) * share)
        wanted = min(job.recipe.logging.num_samples, len(items))
        shown: list[npt.NDArray[np.uint8]] = []
        for part in chunks(mine, job.recipe.engine.max_forward_batch):
            chosen = [items[k % len(items)] for k in part]
            prompts, seeds = [prompt for prompt, _ in chosen], [seed for _, seed in chosen]
            given = None if self.frames is None else self.frames.of(prompts)
            latents = job.sampler.generate("validation", prompts, seeds, plan, conditional_frames=given).clean
            media, finite = decoded(job, latents)
            # Items beyond the last are repeats that keep replicas equal: scored under ids that nobody asks for.
            ids, fps = [f"{scored_as}/{k}" for k in part], job.recipe.sampling.fps if job.model.video else None
            for client, names in by:
                broken = submit_media(client, names, media, finite, ids, prompts, fps)
                self._broken = joined(self._broken, broken)
            shown += list(media[: min(wanted, share) - len(shown)])
        if wanted <= share or not world.is_leader:  # rank 0 has them all; what the others return is not used
            return shown
        return [item for part in world.replica_gather_arrays(np.stack(shown)) for item in part][:wanted]

    def collect_scores(self) -> Scores:
        """Scores of all ranks' samples on every rank."""
        if not self.asked:
            return {}
        mine = self._broken
        for client, _ in self.asked:
            mine = joined(mine, client.wait())
        gathered = gather_scores(self.job.world, mine)
        self._broken = {}
        return gathered

    def score_metrics(self, step: int, scores: Sequence[Mapping[str, Score]]) -> dict[str, float]:
        """Metrics of rewards and judges, and of the alarm, which is logged if it is raised."""
        if not scores:
            return {}
        recipe, num_seeds = self.job.recipe, len(self.job.recipe.validation.seeds)
        samples = prompt_by_prompt(scores, num_seeds)
        judges = [judge.name for judge in recipe.validation.judges]
        metrics = reward_metrics(samples, num_seeds, judges)
        if judges:
            found = by_reward(samples, num_seeds)
            total = None if recipe.reward is None else totals(samples, num_seeds, recipe.reward)
            metrics |= self.alarm.look(total, {name: found[name] for name in judges})
            if self.alarm.fell and self.job.world.is_main:
                log.warning("%s step %d: %s", ALARM, step, self.alarm.sentence())
        return metrics

    def scores_of(self, scored_as: str, gathered: Scores) -> list[Mapping[str, Score]]:
        """The scores of the items that were sampled under these ids, in item order; none if nothing was scored."""
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
    return every > 0 and step % every == 0


def joined(one: Scores, other: Scores) -> Scores:
    """The scores of both, of which each may have some rewards of a sample."""
    return {sample: {**one.get(sample, {}), **other.get(sample, {})} for sample in {**one, **other}}


def prompt_by_prompt(scores: Sequence[Mapping[str, Score]], num_seeds: int) -> list[Mapping[str, Score]]:
    """Scores that come seed by seed, prompt by prompt instead."""
    num_prompts = len(scores) // num_seeds
    return [scores[seed * num_prompts + prompt] for prompt in range(num_prompts) for seed in range(num_seeds)]


def reward_metrics(
    samples: Sequence[Mapping[str, Score]], num_seeds: int, judges: Collection[str] = ()
) -> dict[str, float]:
    """`val/reward/<f>/mean`, half of its 95 % interval over prompts, and its parts, over the samples that were scored;
    of judges `val/judge/<f>/mean` and so on. samples: prompt by prompt."""
    metrics: dict[str, float] = {}
    for tag, values in sorted(by_reward(samples, num_seeds).items()):
        kind = "judge" if any(tag == name or tag.startswith(f"{name}/") for name in judges) else "reward"
        found = mean_of(values)
        if found is not None:
            metrics[f"val/{kind}/{tag}/mean"] = found.value
        if found is not None and found.half_width is not None:
            metrics[f"val/{kind}/{tag}/ci95"] = found.half_width
        if tag in samples[0]:
            metrics[f"val/{kind}/{tag}/failed"] = float(sum(s[tag].failure is not None for s in samples))
    return metrics


def correlation_metrics(
    evaluated: Sequence[Mapping[str, Score]], rolled_out: Sequence[Mapping[str, Score]], prompts: Sequence[str]
) -> dict[str, float]:
    """Compare the rewards of the same prompts and seeds, sampled for evaluation and as rollouts are. In
    `val/reward/<f>/`: `rollout_mean` of the latter, `rank_correlation` over all pairs, and the mean over prompts of
    that of their own pairs, which is what advantages are made of."""
    metrics: dict[str, float] = {}
    for name in sorted(rolled_out[0]):  # which no judge looks at
        values = [(e[name].value, r[name].value, p) for e, r, p in zip(evaluated, rolled_out, prompts, strict=True)]
        pairs = [(a, b, prompt) for a, b, prompt in values if a is not None and b is not None]
        if not pairs:
            continue
        by_prompt = [[(a, b) for a, b, of in pairs if of == prompt] for prompt in dict.fromkeys(prompts)]
        within = [found for part in by_prompt if (found := rank_correlation(part)) is not None]
        whole = rank_correlation([(a, b) for a, b, _ in pairs])
        metrics[f"val/reward/{name}/rollout_mean"] = float(np.mean([b for _, b, _ in pairs]))
        metrics |= {} if whole is None else {f"val/reward/{name}/rank_correlation": whole}
        metrics |= {f"val/reward/{name}/rank_correlation_within_prompts": float(np.mean(within))} if within else {}
    return metrics


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rho: Pearson's correlation of the ranks, equal values sharing the mean of theirs. None for fewer than
    two pairs, or where all of one side are equal."""
    if len(pairs) < 2:
        return None
    first, second = (mean_ranks(side) for side in np.asarray(pairs, np.float64).T)
    if first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def mean_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Ranks from 1, the mean of their places for values that are equal."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks
