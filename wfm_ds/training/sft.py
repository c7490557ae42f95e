"""Supervised fine-tuning, top to bottom: velocity matching on captioned images or videos."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wfm_ds.algorithms.sft import (
    NUM_BUCKETS,
    bucket_of,
    conditional_counts,
    density_bands,
    drawn_experts,
    flow_loss,
    training_sigmas,
    validation_sigmas,
)
from wfm_ds.chunks import chunks
from wfm_ds.data.media import load_media
from wfm_ds.data.order import BatchSource, TrainingSample
from wfm_ds.data.pixels import Framing, centre
from wfm_ds.data.replica import read_once
from wfm_ds.data.samples import Sample
from wfm_ds.models.base import NegativeText
from wfm_ds.models.conditional_frames import MASK, with_conditional_frames
from wfm_ds.monitoring.meter import Meter
from wfm_ds.recipe.algorithms import SftAlgorithm
from wfm_ds.run.job import Job
from wfm_ds.sampling.noise import noisy_latents, seeded_normal
from wfm_ds.seeds import derive_seed, uniform
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.loop import Loop
from wfm_ds.training.outcome import StepReport, engine_metrics
from wfm_ds.training.validation import Validator


class SftLoop(Loop):
    """One step is one optimizer step on a batch of `source`."""

    def __init__(
        self, job: Job, source: BatchSource, validator: Validator, exporter: Exporter, checkpoints: Checkpoints
    ) -> None:
        super().__init__(job, validator, exporter, checkpoints)
        self.source = source
        self.settings = job.recipe.sft
        self.shift = self.settings.flow_shift or job.model.flow_shift
        self.bands = density_bands(self.settings, self.shift, job.model.sigma_ranges)

    def wait(self, step: int) -> bool:
        """Return at once: the data are read ahead, and `train_on` waits for them."""
        return True

    def train_on(self, step: int) -> StepReport:
        job, world = self.job, self.job.world
        with job.timer("data_wait"):
            samples = read_once(world, lambda: self.source.batch(step, world.dp_rank, world.dp_size))
        with job.timer("train"):
            metrics = self.optimize(samples)
        return StepReport(self.source.bad_counts(world.replica_sums), [metrics], job.derived.samples_per_step)

    def own_state(self) -> dict[str, Any]:
        """The batches follow from the step alone."""
        return {"sources": self.job.world.replica_gather(self.source.state())}

    def restore_own(self, state: Mapping[str, Any]) -> None:
        self.source.restore_from_ranks(state["sources"], self.job.world.dp_rank, self.job.world.dp_size)

    def optimize(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """One optimizer step on this replica's samples."""
        engine = self.job.engine
        micros = chunks(samples, self.job.recipe.engine.micro_batch_size)
        # The same experts on all ranks: each of their collectives needs all of them.
        experts = drawn_experts(self.bands, self.job.recipe.run.seed, self.step, self.job.derived.accumulation)
        engine.expect(len(experts))
        for expert, micro in zip(experts, micros, strict=True):
            loss_B, sigma_B = self.loss(micro, expert)
            engine.backward(loss_B.sum(), num_terms=self.job.derived.samples_per_step)
            self.meter.add({"sft/loss": loss_B.detach()}, torch.ones_like(loss_B))
            for name, mask_B in loss_buckets("sft", sigma_B, self.shift).items():
                self.meter.add({name: loss_B.detach()}, mask_B)
        result = engine.step()
        self.finite.watch(result, [sample.sample_id for sample in samples])
        if result.applied:
            engine.update_ema()
        return self.meter.collect(self.job.world) | engine_metrics(self.job, result)

    def loss(self, samples: Sequence[TrainingSample], expert: int) -> tuple[Tensor, Tensor]:
        """Losses and noise levels, all of one expert, of these samples, both [B]; with gradient."""
        job, seed = self.job, self.job.recipe.run.seed
        positions = [sample.position for sample in samples]
        clean = clean_latents(job, samples)
        noise = seeded_normal([derive_seed(seed, "train_noise", p) for p in positions], clean.shape[1:], clean.device)
        sigma_B = training_sigmas(
            self.settings,
            self.shift,
            run_seed=seed,
            positions=positions,
            global_batch=job.derived.samples_per_step,
            band=self.bands[expert],
        ).to(clean.device)
        conditioning = job.texts.encode([self.caption(sample) for sample in samples])
        draws = [uniform(seed, "conditional_frames", sample.epoch, sample.sample_id) for sample in samples]
        conditioning, conditional_mask = with_drawn_frames(self.settings, conditioning, clean, draws)
        velocity = job.forward("policy", noisy_latents(clean, noise, sigma_B), sigma_B, conditioning, expert)
        weighting = self.settings.loss_weighting
        return flow_loss(velocity, clean, noise, sigma_B, weighting, conditional_mask=conditional_mask), sigma_B

    def caption(self, sample: TrainingSample) -> str | NegativeText:
        dropped = uniform(self.job.recipe.run.seed, "caption_dropout", sample.epoch, sample.sample_id)
        return NegativeText("") if dropped < self.job.recipe.data.caption_dropout else sample.prompt.text


def loss_buckets(prefix: str, sigma_B: Tensor, shift: float) -> dict[str, Tensor]:
    """Masks [B] of the equal parts of q that the noise levels fall into, by metric name."""
    index_B = bucket_of(sigma_B, shift)
    return {f"{prefix}/loss_bucket{j}": (index_B == j).float() for j in range(NUM_BUCKETS)}


def clean_latents(job: Job, samples: Sequence[TrainingSample]) -> Tensor:
    """Latents [B, ...] float32 of these samples, from the leader of the replica; collective."""
    return job.world.share_tensor(encoded(job, samples) if job.world.is_leader else None)


def encoded(job: Job, samples: Sequence[TrainingSample]) -> Tensor:
    """Latents [B, ...] float32 of samples that were read, kept where the run keeps latents."""
    pixels = {i: sample.pixels for i, sample in enumerate(samples) if sample.pixels is not None}
    if job.latents is None:
        return job.model.encode_media(list(pixels.values()))
    # One by one, as in the text cache: the last bits must not depend on what happens to be cached.
    fresh = {i: job.model.encode_media([array])[0] for i, array in pixels.items()}
    for i, latents in fresh.items():
        media, framing = samples[i].media, samples[i].framing
        assert media is not None
        assert framing is not None
        job.latents.write(media, framing, latents)
    rows = [fresh.get(i, sample.latents) for i, sample in enumerate(samples)]
    return torch.stack([row.to(job.world.device) for row in rows])


def with_drawn_frames(
    settings: SftAlgorithm, conditioning: dict[str, Tensor], clean: Tensor, draws: Sequence[float]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The conditioning with as many first frames of `clean` [B, ...] as these draws in [0, 1) say, and their mask."""
    if settings.max_num_conditional_frames == 0:
        return conditioning, None
    conditioning = with_conditional_frames(conditioning, clean, conditional_counts(settings, draws))
    return conditioning, conditioning[MASK]


class ValidationLoss:
    """The training loss on held-out media at fixed noise: equal for equal weights, at any step and world size.

    Noise depends on (sample, j) alone and sigma_j = shift((j + .5) / M), M = 8: every evaluation sees the same terms.
    """

    def __init__(self, job: Job, samples: Sequence[Sample], framings: Sequence[Framing]) -> None:
        """`framings`: of each sample."""
        self.job, self.samples, self.framings = job, samples, framings
        self.settings = job.recipe.sft
        self.shift = self.settings.flow_shift or job.model.flow_shift
        self.sigmas = validation_sigmas(self.shift).tolist()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """`val/loss` and its buckets under the engine's active policy; every rank calls, each does the same number of
        forwards (missing samples are repeats of weight 0)."""
        model, meter = self.job.model, Meter()
        for expert in range(len(model.sigma_ranges)):
            levels = [j for j, sigma in enumerate(self.sigmas) if model.expert_of(sigma) == expert]
            for framing in dict.fromkeys(self.framings):
                of_size = [i for i, other in enumerate(self.framings) if other == framing]
                self.add([(i, j) for i in of_size for j in levels], expert, meter)
        return meter.collect(self.job.world)

    def add(self, terms: Sequence[tuple[int, int]], expert: int, meter: Meter) -> None:
        """Measure these terms of one expert and one size."""
        world = self.job.world
        share = math.ceil(len(terms) / world.dp_size)
        mine = range(world.dp_rank * share, (world.dp_rank + 1) * share)
        clean: dict[int, Tensor] = {}  # of the last forward's samples: the other levels of one follow
        for part in chunks(mine, self.job.recipe.engine.max_forward_batch):
            weight_B = torch.tensor([float(k < len(terms)) for k in part], device=world.device)
            chosen = [terms[k % len(terms)] for k in part]
            clean = {i: clean[i] if i in clean else self.latents(i) for i in dict.fromkeys(i for i, _ in chosen)}
            loss_B, sigma_B = self.loss(chosen, clean, expert)
            meter.add({"val/loss": loss_B}, weight_B)
            for name, mask_B in loss_buckets("val", sigma_B, self.shift).items():
                meter.add({name: loss_B}, mask_B * weight_B)

    def loss(
        self, terms: Sequence[tuple[int, int]], clean_by_index: Mapping[int, Tensor], expert: int
    ) -> tuple[Tensor, Tensor]:
        job = self.job
        samples = [self.samples[i] for i, _ in terms]
        clean = torch.stack([clean_by_index[i] for i, _ in terms])
        seeds = [derive_seed(0, "validation_noise", s.id, j) for s, (_, j) in zip(samples, terms, strict=True)]
        noise = seeded_normal(seeds, clean.shape[1:], clean.device)
        sigma_B = torch.tensor([self.sigmas[j] for _, j in terms], dtype=torch.float32, device=clean.device)
        conditioning = job.texts.encode([s.prompt.text for s in samples])
        draws = [uniform(0, "validation_conditional_frames", s.id, j) for s, (_, j) in zip(samples, terms, strict=True)]
        conditioning, conditional_mask = with_drawn_frames(self.settings, conditioning, clean, draws)
        velocity = job.forward("validation", noisy_latents(clean, noise, sigma_B), sigma_B, conditioning, expert)
        return flow_loss(velocity, clean, noise, sigma_B, conditional_mask=conditional_mask), sigma_B

    def latents(self, index: int) -> Tensor:
        """Clean latents [...] of this sample, from the leader of the replica; collective."""
        world = self.job.world
        return world.share_tensor(self.encoded(index) if world.is_leader else None)

    def encoded(self, index: int) -> Tensor:
        """Clean latents [...] of this sample, read and encoded unless the run keeps them.

        Raises DataError, on this rank alone, if the file can no longer be read: replicas read different numbers of
        samples, so they have no moment to agree on it.
        """
        cache, media, framing = self.job.latents, self.samples[index].media, self.framings[index]
        latents = None if cache is None else cache.read(media, framing)
        if latents is None:
            latents = self.job.model.encode_media([load_media(media, framing, centre)])[0]
            if cache is not None:
                cache.write(media, framing, latents)
        return latents.to(self.job.world.device)
