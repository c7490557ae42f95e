"""The supervised training loop (SFT, DPO) and its validation loss, on noisy images and videos."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.batch import Term
from wfm_ds.algorithms.sft import (
    NUM_BUCKETS,
    bucket_of,
    conditional_counts,
    density_bands,
    drawn_experts,
    training_sigmas,
    validation_sigmas,
)
from wfm_ds.algorithms.supervised import Supervised, velocity_errors
from wfm_ds.chunks import chunks
from wfm_ds.data.pixels import Framing
from wfm_ds.data.reading import Reader, TrainingSample
from wfm_ds.data.replica import read_once
from wfm_ds.data.samples import Sample
from wfm_ds.models.base import NegativeText
from wfm_ds.models.captions import Text, captioned
from wfm_ds.models.conditional_frames import MASK
from wfm_ds.pinned import columns, on_device, room
from wfm_ds.run.job import Job
from wfm_ds.sampling.noise import noised, noisy_latents, seeded_normal
from wfm_ds.seeds import derive_seed, uniform
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.first_frames import medium_latents
from wfm_ds.training.loop import Loop
from wfm_ds.training.micro import KEPT_ON_HOST, KEPT_SHARE, MicroBatches
from wfm_ds.training.outcome import StepReport, engine_metrics
from wfm_ds.training.validation import Validator
from wfm_ds.types import ConditionalFrames


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedBatch:
    """B samples of M images or videos each, with equal noise within a sample. Row m * B + b is item m of sample b.

    All tensors are float32 unless noted.
    """

    clean: Tensor  # [M*B, ...]
    noise: Tensor  # [M*B, ...], equal for all items of a sample
    latents: Tensor  # [M*B, ...], noisy latents
    sigma: Tensor  # [M*B]
    texts: Sequence[Text]  # [M*B], encoded at the forward pass
    inputs: Sequence[Mapping[str, npt.NDArray[np.float32]]]  # [M*B], further conditioning (actions, cameras)
    num_frames: Tensor | None  # [M*B] int64 on the host: number of conditioning frames; None if all are 0


class SftLoop(Loop):
    """Supervised training loop. One step is one optimizer step on a batch of `source`."""

    job: Job
    validator: Validator

    def __init__(
        self,
        job: Job,
        algorithm: Supervised,
        source: Reader,
        validator: Validator,
        exporter: Exporter,
        checkpoints: Checkpoints,
    ) -> None:
        super().__init__(job, validator, exporter, checkpoints)
        self.algorithm, self.source = algorithm, source
        self.settings = job.recipe.supervised
        self.shift = self.settings.flow_shift or job.model.flow_shift(job.recipe.sampling)
        self.bands = density_bands(self.settings, self.shift, job.model.sigma_ranges)

    def wait(self, step: int) -> bool:
        """Return True at once. Data is prefetched, and `train_step` waits for it."""
        return True

    def train_on(self, step: int) -> StepReport:
        job, world = self.job, self.job.world
        with job.timer("data_wait"):
            samples = read_once(world, lambda: self.source.batch(step, world.dp_rank, world.dp_size))
        micros = self.micro_batches(samples)
        job.texts.prepare(self.captions(samples))  # here, to not block the device later
        references = self.reference_errors(micros)
        with job.timer("train"):
            metrics = self.optimize(samples, micros, references)
        return StepReport(self.source.bad_counts(world.replica_sums), [metrics], job.derived.samples_per_step)

    def own_state(self) -> dict[str, Any]:
        """See the base class. Batches depend only on the step, or on the position in a stream (state of the source)."""
        return {"sources": self.job.world.replica_gather(self.source.state())}

    def restore_own(self, state: Mapping[str, Any]) -> None:
        self.source.restore_from_ranks(state["sources"], self.job.world.dp_rank, self.job.world.dp_size)

    def micro_batches(self, samples: Sequence[TrainingSample]) -> MicroBatches[Term]:
        """Split this replica's samples into micro-batches of one expert each, and draw a noise level per sample."""
        job = self.job
        rows = chunks(range(len(samples)), job.recipe.engine.micro_batch_size)
        # All ranks must train the same experts, because the collectives of an expert involve all ranks.
        experts = drawn_experts(self.bands, job.recipe.run.seed, self.step, job.derived.accumulation)
        cuts = [(self.terms(samples, part, expert), expert) for expert, part in zip(experts, rows, strict=True)]
        cache_bytes = room(job.world.device, KEPT_SHARE, KEPT_ON_HOST) if self.algorithm.settings.references else 0
        return MicroBatches(cuts, functools.partial(self.noised_batch, samples), cache_bytes)

    def terms(self, samples: Sequence[TrainingSample], rows: Sequence[int], expert: int) -> list[Term]:
        sigmas = training_sigmas(
            self.settings,
            self.shift,
            run_seed=self.job.recipe.run.seed,
            positions=[samples[row].position for row in rows],
            global_batch=self.job.derived.samples_per_step,
            band=self.bands[expert],
        )
        return [Term(row=row, sigma=sigma, weight=1.0) for row, sigma in zip(rows, sigmas.tolist(), strict=True)]

    def reference_errors(self, micros: MicroBatches[Term]) -> list[dict[str, Tensor]]:
        """Return the velocity errors [M, B] of the reference policies by micro-batch. Runs one policy after the other.

        Uses the batch size of training: a GPU may choose different kernels for another batch size, and equal policies
        would then give different errors.
        """
        errors_by_micro: list[dict[str, Tensor]] = [{} for _ in micros.cuts]
        for policy in self.algorithm.settings.references:
            with self.job.timer(f"{policy}_forward"), self.job.engine.policy(policy):
                for errors, micro in zip(errors_by_micro, micros.iterate(release=False), strict=True):
                    errors[policy] = errors_of(self.job, policy, micro.batch, micro.expert)
        return errors_by_micro

    def optimize(
        self,
        samples: Sequence[TrainingSample],
        micros: MicroBatches[Term],
        references: Sequence[Mapping[str, Tensor]],
    ) -> dict[str, float]:
        """Run one optimizer step on this replica's samples and return its metrics."""
        engine = self.job.engine
        engine.expect(micros.num_backwards)
        for micro, reference_errors in zip(micros.iterate(release=True), references, strict=True):
            errors = errors_of(self.job, "policy", micro.batch, micro.expert)
            sigma_B = micro.batch.sigma[: errors.shape[1]]
            loss_B, stats = self.algorithm.loss(errors, sigma_B, reference_errors)
            engine.backward(loss_B.sum(), num_terms=self.job.derived.samples_per_step)
            stats = loss_stats(self.algorithm.area, loss_B.detach(), sigma_B, self.shift) | stats
            self.meter.add(stats, torch.ones_like(sigma_B))
        result = engine.step()
        self.finite.watch(result, [sample.sample_id for sample in samples])
        if result.applied:
            engine.update_ema()
        return self.meter.collect(self.job.world) | engine_metrics(self.job, result)

    def noised_batch(self, samples: Sequence[TrainingSample], terms: Sequence[Term]) -> NoisedBatch:
        """Add noise to these samples at their noise levels. Deterministic. Collective in the replica."""
        seed, times = self.job.recipe.run.seed, self.settings.num_media
        rows = [samples[term.row] for term in terms]
        clean = clean_latents(self.job, list(media_of(rows)))
        (sigma,) = columns(clean.device, [term.sigma for term in terms] * times)
        seeds = [derive_seed(seed, "train_noise", sample.position) for sample in rows]
        noisy, noise = noised(clean, sigma, seeds * times)
        draws = [uniform(seed, "conditional_frames", sample.epoch, sample.sample_id) for sample in rows]
        return NoisedBatch(
            clean=clean,
            noise=noise,
            latents=noisy,
            sigma=sigma,
            texts=self.captions(rows, clean.shape[1:]) * times,
            inputs=[sample.prompt.inputs for sample in rows] * times,
            num_frames=given_counts(self.job, draws * times),
        )

    def captions(self, samples: Sequence[TrainingSample], shape: Sequence[int] | None = None) -> list[Text]:
        """Return the captions in the format of the model family.

        The format may include the image size: taken from `shape` (latents of one sample) if given, else from the
        sample's framing, else from the recipe section `sampling`.
        """
        sampler, texts = self.job.sampler, list[Text]()
        for sample in samples:
            framing = sample.framing
            size = (framing.height, framing.width) if framing and shape is None else sampler.pixel_size(shape)
            texts += captioned(self.job.model, [self.caption(sample)], size, sampler.settings.num_frames)
        return texts

    def caption(self, sample: TrainingSample) -> Text:
        """Return the sample's caption, or an empty one with probability data.caption_dropout."""
        dropped = uniform(self.job.recipe.run.seed, "caption_dropout", sample.epoch, sample.sample_id)
        return NegativeText("") if dropped < self.job.recipe.data.caption_dropout else sample.prompt.text


def given_counts(job: Job, draws: Sequence[float]) -> Tensor | None:
    """Return the number of conditioning frames of each sample, [B] int64 on the host. draws: in [0, 1).

    None in runs without conditioning frames.
    """
    return conditional_counts(job.model.pinned(job.recipe.supervised.num_conditional_frames), draws)


def errors_of(job: Job, purpose: str, batch: NoisedBatch, expert: int) -> Tensor:
    """Predict with the active policy and return the velocity errors [M, B]."""
    frames = None if batch.num_frames is None else ConditionalFrames(batch.clean, batch.num_frames)
    inputs = job.sampler.besides_text(batch.inputs, frames, batch.clean.shape[1:])
    conditioning, mask = {**job.texts.encode(batch.texts), **inputs}, inputs.get(MASK)
    velocity = job.forward(purpose, batch.latents, batch.sigma, conditioning, expert)
    return velocity_errors(velocity, batch.clean, batch.noise, mask).view(job.recipe.supervised.num_media, -1)


def loss_stats(prefix: str, loss_B: Tensor, sigma_B: Tensor, shift: float) -> Stats:
    """Return the loss, and the loss by noise-level bucket, as statistics."""
    buckets = torch.arange(NUM_BUCKETS, device=sigma_B.device)
    masks = (bucket_of(sigma_B, shift) == buckets[:, None]).float().unbind()
    return {f"{prefix}/loss": loss_B, **{f"{prefix}/loss_bucket{j}": (loss_B, mask) for j, mask in enumerate(masks)}}


def media_of(samples: Sequence[TrainingSample]) -> Iterator[TrainingSample]:
    """Yield the (chosen) item of each sample, then the rejected items of pairs. Only the replica leader has items."""
    yield from samples
    yield from (sample.rejected for sample in samples if sample.rejected is not None)


def clean_latents(job: Job, samples: Sequence[TrainingSample]) -> Tensor:
    """Return the clean latents [B, ...] float32 on every rank of the replica. Collective in the replica."""
    return job.world.share_tensor(encoded(job, samples) if job.world.is_leader else None)


def encoded(job: Job, samples: Sequence[TrainingSample]) -> Tensor:
    """Return the latents [B, ...] float32 of loaded samples: cached, or encoded and written to the cache (if any)."""
    pixels = {i: sample.pixels for i, sample in enumerate(samples) if sample.pixels is not None}
    if job.latents is None:
        return job.model.encode_media(list(pixels.values()))
    # Encode one by one, as in the text cache: the last bits must not depend on the content of the cache.
    encoded_now = {i: job.model.encode_media([array])[0] for i, array in pixels.items()}
    for i, latents in encoded_now.items():
        media, framing = samples[i].media, samples[i].framing
        assert media is not None
        assert framing is not None
        job.latents.write(media, framing, latents)
    rows = [encoded_now.get(i, sample.latents) for i, sample in enumerate(samples)]
    return torch.stack([on_device(row, job.world.device) for row in rows])


class ValidationLoss:
    """The loss on held-out samples with fixed noise. Equal weights give equal losses, at any step and world size.

    Every evaluation uses the same noise levels sigma_j = shift((j + .5) / L), L = 8, and noise that depends only on
    (sample, j).
    """

    def __init__(self, job: Job, algorithm: Supervised, samples: Sequence[Sample], framings: Sequence[Framing]) -> None:
        """framings: one per sample."""
        self.job, self.algorithm, self.samples, self.framings = job, algorithm, samples, framings
        self.settings = job.recipe.supervised
        self.shift = self.settings.flow_shift or job.model.flow_shift(job.recipe.sampling)
        self.sigmas = validation_sigmas(self.shift).tolist()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Return `val/loss`, `val/loss_bucket<j>` and the algorithm's own metrics of the evaluation weights.

        Collective. All ranks run the same number of forward passes; repeated samples that fill up a rank do not count.
        """
        engine, references = self.job.engine, {}
        for policy in self.settings.references:
            with engine.policy(policy):
                references[policy] = self.errors()
        with engine.policy(self.job.evaluation_policy):
            errors = self.errors()
        loss_NL, sample_metrics = self.algorithm.held_out(errors, references)
        means = {"loss": loss_NL, **{f"loss_bucket{j}": loss_N for j, loss_N in enumerate(loss_NL.unbind(dim=1))}}
        return {f"val/{name}": float(values.mean()) for name, values in {**means, **sample_metrics}.items()}

    def errors(self) -> Tensor:
        """Return the velocity errors [M, N, L] of the active policy, float64 on the host. Identical on every rank."""
        world, model = self.job.world, self.job.model
        shape = (self.settings.num_media, len(self.samples), len(self.sigmas))
        errors = torch.zeros(shape, dtype=torch.float64, device=world.device)
        for expert in range(len(model.sigma_ranges)):
            levels = [j for j, sigma in enumerate(self.sigmas) if model.expert_of(sigma) == expert]
            for framing in dict.fromkeys(self.framings):
                indices = [i for i, other in enumerate(self.framings) if other == framing]
                self.add([(i, j) for i in indices for j in levels], expert, errors)
        # Each term is computed by one replica and 0 on the others: the sum is exact for any number of ranks.
        sums = world.replica_sums({str(k): error for k, error in enumerate(errors.flatten().tolist())})
        return torch.tensor(list(sums.values()), dtype=torch.float64).view(shape)

    def add(self, terms: Sequence[tuple[int, int]], expert: int, errors: Tensor) -> None:
        """Write the errors of this replica's shard of the terms into `errors` [M, N, L].

        terms: (sample, level) indices of one expert and one size.
        """
        world = self.job.world
        shard_size = math.ceil(len(terms) / world.dp_size)
        shard = range(world.dp_rank * shard_size, (world.dp_rank + 1) * shard_size)
        clean: dict[int, Tensor] = {}  # samples of the last forward pass: their other levels come next
        for part in chunks(shard, max(1, self.job.recipe.engine.max_forward_batch // self.settings.num_media)):
            chosen = [terms[k % len(terms)] for k in part]
            clean = {i: clean[i] if i in clean else self.latents(i) for i in dict.fromkeys(i for i, _ in chosen)}
            batch_errors = errors_of(self.job, "validation", self.noised_batch(chosen, clean), expert)
            count = sum(k < len(terms) for k in part)
            rows, levels = (list(column[:count]) for column in zip(*chosen, strict=True))
            errors[:, rows, levels] = batch_errors[:, :count].double()

    def noised_batch(self, terms: Sequence[tuple[int, int]], clean_by_index: Mapping[int, Tensor]) -> NoisedBatch:
        times, keys = self.settings.num_media, [(self.samples[i].id, j) for i, j in terms]
        samples = [self.samples[i] for i, _ in terms]
        clean = torch.stack([clean_by_index[i] for i, _ in terms], dim=1).flatten(0, 1)
        seeds = [derive_seed(0, "validation_noise", *key) for key in keys]
        noise = seeded_normal(seeds, clean.shape[1:], clean.device)
        noise = noise.repeat(times, *(1 for _ in clean.shape[1:]))
        sigmas = [self.sigmas[j] for _, j in terms] * times
        sigma = torch.tensor(sigmas, dtype=torch.float32, device=clean.device)
        draws = [uniform(0, "validation_conditional_frames", *key) for key in keys]
        return NoisedBatch(
            clean=clean,
            noise=noise,
            latents=noisy_latents(clean, noise, sigma),
            sigma=sigma,
            texts=self.job.sampler.captioned([sample.prompt.text for sample in samples], clean.shape[1:]) * times,
            inputs=[sample.prompt.inputs for sample in samples] * times,
            num_frames=given_counts(self.job, draws * times),
        )

    def latents(self, index: int) -> Tensor:
        """Return the clean latents [M, ...] of this sample on every rank of the replica. Collective in the replica."""
        world, sample = self.job.world, self.samples[index]
        if not world.is_leader:
            return world.share_tensor(None)
        rows = [medium_latents(self.job, media, self.framings[index]) for media in sample.all_media]
        return world.share_tensor(torch.stack(rows))
