"""Evaluation: images or videos at fixed prompts and seeds, their rewards or the validation loss, deterministic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from wfm_ds.chunks import chunks
from wfm_ds.monitoring.samples import ShownSample, write_samples
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.rollout.scores import Scores, decoded, gather_scores, submit_pictures
from wfm_ds.run.job import Job
from wfm_ds.types import Prompt, Score


class Loss(Protocol):
    def measure(self) -> dict[str, float]: ...


class Validator:
    """Samples with the evaluation weights: every (prompt, seed) pair for rewards, else those that are shown; measures
    rewards, a loss, or both.

    Every rank calls every method at the same step; leaves the training weights and their active adapter untouched.
    """

    def __init__(
        self, job: Job, prompts: Sequence[Prompt], *, rewards: RewardClient | None = None, loss: Loss | None = None
    ) -> None:
        settings = job.recipe.validation
        self.job, self.rewards, self.loss = job, rewards, loss
        chosen = prompts[: settings.num_prompts]
        # Seed-major: the first samples are one of each prompt.
        items = [(prompt, seed) for seed in settings.seeds for prompt in chosen]
        self.items = items if rewards is not None else items[: job.recipe.logging.num_samples]  # else for show alone
        self.last: dict[str, float] = {}
        self._evaluated_at = -1
        self._broken: Scores = {}  # failures of this rank since scores were last collected

    def at_start(self, step: int) -> None:
        """Evaluate before the first step; `step`: the last one done, more than 0 in a run that is continued."""
        if self.job.recipe.validation.at_start and step == 0 and self._evaluated_at != 0:
            self.evaluate(0)
        self.job.timer.restart()
        self.job.forward.counts.clear()
        self.job.engine.forget_work()

    def state(self) -> dict[str, Any]:
        """The last evaluation, as JSON."""
        return {"evaluated_at": self._evaluated_at, "metrics": self.last}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._evaluated_at, self.last = state["evaluated_at"], state["metrics"]

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
            media = self.sample(self.items, step, scored=self.rewards is not None)
            metrics = self.loss.measure() if self.loss is not None else {}
        scores = self.collect_scores(step) if self.rewards is not None else {}
        metrics |= reward_metrics(list(scores.values()))
        self._write(step, self.items, media, scores)
        if metrics:
            job.monitor.scalars(step * job.derived.updates_per_step, metrics)
            shown = [n for n in metrics if n == "val/loss" or n.endswith("/mean")]
            job.monitor.message(f"step {step}: " + ", ".join(f"{n} {metrics[n]:.4f}" for n in shown))
        self.last, self._evaluated_at = metrics, step

    def show(self, step: int, items: Sequence[tuple[Prompt, int]]) -> None:
        job = self.job
        with job.timer("validation"), job.engine.policy(job.evaluation_policy), torch.no_grad():
            media = self.sample(items, step, scored=False)
        self._write(step, items, media, {})

    def sample(self, items: Sequence[tuple[Prompt, int]], step: int, *, scored: bool) -> list[npt.NDArray[np.uint8]]:
        """Images uint8 [H,W,3] or videos [T,H,W,3] of the first `logging.num_samples` items, on rank 0; all items are
        scored."""
        job, world = self.job, self.job.world
        share = math.ceil(len(items) / world.dp_size)
        mine = range(world.dp_rank * share, (world.dp_rank + 1) * share)
        wanted = min(job.recipe.logging.num_samples, len(items))
        shown: list[npt.NDArray[np.uint8]] = []
        plan = job.sampler.evaluation_plan()
        for part in chunks(mine, job.recipe.engine.max_forward_batch):
            chosen = [items[k % len(items)] for k in part]
            prompts, seeds = [prompt for prompt, _ in chosen], [seed for _, seed in chosen]
            latents = job.sampler.generate("validation", prompts, seeds, plan).clean
            if scored:
                assert self.rewards is not None
                # Items beyond the last are repeats that keep replicas equal: scored under ids that nobody asks for.
                ids = [f"val/{step}/{k}" for k in part]
                media, broken = submit_pictures(job, self.rewards, latents, ids, prompts)
                self._broken |= broken
            else:
                media, _ = decoded(job, latents)
            shown += list(media[: min(wanted, share) - len(shown)])
        if wanted <= share or not world.is_leader:  # rank 0 has them all; what the others return is not used
            return shown
        return [item for part in world.replica_gather_arrays(np.stack(shown)) for item in part][:wanted]

    def collect_scores(self, step: int) -> Scores:
        """Scores of all ranks' samples, in item order, on every rank."""
        assert self.rewards is not None
        gathered = gather_scores(self.job.world, self.rewards.wait() | self._broken)
        self._broken = {}
        wanted = [f"val/{step}/{k}" for k in range(len(self.items))]
        return {sample_id: gathered[sample_id] for sample_id in wanted}

    def _write(
        self,
        step: int,
        items: Sequence[tuple[Prompt, int]],
        media: Sequence[npt.NDArray[np.uint8]],
        scores: Mapping[str, Mapping[str, Score]],
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
                rewards={name: score.value for name, score in scores.get(f"val/{step}/{k}", {}).items()},
            )
            for k, ((prompt, seed), item) in enumerate(zip(items, media, strict=False))
        ]
        write_samples(Path(self.job.recipe.run.output_dir) / "samples" / f"step_{step}", samples)
        self.job.monitor.samples(step * self.job.derived.updates_per_step, "samples", samples)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def reward_metrics(scores: Sequence[Mapping[str, Score]]) -> dict[str, float]:
    """`val/reward/<f>/mean`, its 95 % interval and its parts, over the samples that were scored."""
    metrics: dict[str, float] = {}
    for name in sorted(scores[0]) if scores else ():
        series = {name: [value for s in scores if (value := s[name].value) is not None]}
        for part in {p for s in scores for p in s[name].parts}:
            series[f"{name}/{part}"] = [s[name].parts[part] for s in scores if part in s[name].parts]
        for tag, values in sorted(series.items()):
            if values:
                metrics[f"val/reward/{tag}/mean"] = float(np.mean(values))
            if len(values) > 1:
                metrics[f"val/reward/{tag}/ci95"] = float(1.96 * np.std(values, ddof=1) / math.sqrt(len(values)))
        metrics[f"val/reward/{name}/failed"] = float(sum(s[name].failure is not None for s in scores))
    return metrics
