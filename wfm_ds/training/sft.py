"""The supervised training loop (SFT, DPO) and its validation loss, on noisy images and videos."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.algorithms.base import LossTerm, Stats, choose_stream_weights
from wfm_ds.algorithms.sft import (
    NUM_BUCKETS,
    bucket_index,
    conditioning_frame_counts,
    density_bands,
    draw_experts,
    draw_training_sigmas,
    validation_sigmas,
)
from wfm_ds.algorithms.supervised import SupervisedAlgorithm, velocity_errors
from wfm_ds.chunks import split_into_chunks
from wfm_ds.data.batch_reader import BatchReader, TrainingSample, read_on_leader
from wfm_ds.data.pixels import Framing
from wfm_ds.data.samples import Sample
from wfm_ds.models.assets.text_cache import PromptText, Text, format_prompts, prompt_text
from wfm_ds.models.base import NegativeText
from wfm_ds.models.conditioning_frames import MASK_KEY
from wfm_ds.runs.job import Job
from wfm_ds.sampling.latents import StreamWeights, add_noise, draw_cpu_normal, noisy_latents
from wfm_ds.seeds import derive_seed, draw_uniform
from wfm_ds.tensor_memory import free_memory, lists_to_device
from wfm_ds.training.caches import load_clean_latents
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.loop import StepReport, TrainingLoop
from wfm_ds.training.micro_batches import GPU_BUFFER_FRACTION, HOST_CACHE_BYTES, MicroBatches
from wfm_ds.training.validation import Validator
from wfm_ds.training.validation_frames import load_media_latents
from wfm_ds.types import ConditioningFrames


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyBatch:
    """Noisy latents of B samples with M images or videos each: M is 2 for preference pairs, otherwise 1.

    Row m * B + b is image or video m of sample b. All rows of a sample have the same noise. Tensors are float32 unless
    noted.
    """

    items_per_sample: int  # M
    clean_latents: Tensor  # [M*B, ...]
    noise: Tensor  # [M*B, ...], the same for all items of a sample
    latents: Tensor  # [M*B, ...], noisy latents
    sigma: Tensor  # [M*B]
    texts: Sequence[Text]  # [M*B], encoded at the forward pass
    inputs: Sequence[Mapping[str, npt.NDArray[Any]]]  # [M*B], further conditioning (actions, cameras)
    num_conditioning_frames: Tensor | None  # [M*B] int64 on the host: number of conditioning frames; None if all are 0


class SftLoop(TrainingLoop):
    """Supervised training loop. Each step is one optimizer step on a batch of `source`."""

    job: Job
    validator: Validator

    def __init__(
        self,
        job: Job,
        algorithm: SupervisedAlgorithm,
        source: BatchReader,
        validator: Validator,
        exporter: Exporter,
        checkpoints: Checkpoints,
    ) -> None:
        super().__init__(job, validator, exporter, checkpoints)
        self.algorithm, self.source = algorithm, source
        self.settings = job.recipe.supervised_settings
        self.stream_weights = choose_stream_weights(
            self.settings.stream_weights, job.model.stream_sizes(job.recipe.sampling)
        )
        self.shift = self.settings.flow_shift or job.model.flow_shift(job.recipe.sampling)
        self.bands = density_bands(self.settings, self.shift, job.model.sigma_ranges)
        self.frame_range = job.model.clean_frame_range(self.settings.conditioning_frame_range)

    def wait_for_data(self, step: int) -> bool:
        return True  # data is prefetched, and train_step waits for it

    def train_step(self, step: int) -> StepReport:
        job, world = self.job, self.job.world
        with job.timer("data_wait"):
            samples = read_on_leader(world, lambda: self.source.read_batch(step, world.dp_rank, world.dp_size))
        micros = self.micro_batches(samples)
        job.text_cache.prepare(self.caption_texts(samples))  # now, so that it does not block the device later
        references = self.reference_errors(micros)
        with job.timer("train"):
            metrics = self.optimize(samples, micros, references)
        return StepReport(self.source.bad_counts(world.sum_over_replicas), [metrics], job.run_sizes.samples_per_step)

    def extra_state(self) -> dict[str, Any]:
        return {"sources": self.job.world.gather_from_leaders(self.source.state())}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self.source.restore_from_ranks(state["sources"], self.job.world.dp_rank, self.job.world.dp_size)

    def micro_batches(self, samples: Sequence[TrainingSample]) -> MicroBatches[LossTerm]:
        """Split this replica's samples into micro-batches of one expert each, and draw a noise level per sample."""
        job = self.job
        rows = split_into_chunks(range(len(samples)), job.recipe.engine.micro_batch_size)
        # All ranks must train the same experts, because the collectives of an expert involve all ranks.
        experts = draw_experts(self.bands, job.recipe.run.seed, self.step, job.run_sizes.accumulation)
        cuts = [(self.make_terms(samples, part, expert), expert) for expert, part in zip(experts, rows, strict=True)]
        cache_bytes = (
            free_memory(job.world.device, GPU_BUFFER_FRACTION, HOST_CACHE_BYTES)
            if self.algorithm.settings.reference_policies
            else 0
        )
        return MicroBatches(cuts, functools.partial(self.make_noisy_batch, samples), cache_bytes)

    def make_terms(self, samples: Sequence[TrainingSample], rows: Sequence[int], expert: int) -> list[LossTerm]:
        sigmas = draw_training_sigmas(
            self.settings,
            self.shift,
            run_seed=self.job.recipe.run.seed,
            positions=[samples[row].position for row in rows],
            global_batch=self.job.run_sizes.samples_per_step,
            band=self.bands[expert],
        )
        return [LossTerm(row=row, sigma=sigma, weight=1.0) for row, sigma in zip(rows, sigmas.tolist(), strict=True)]

    def reference_errors(self, micros: MicroBatches[LossTerm]) -> list[dict[str, Tensor]]:
        """Return {reference policy: velocity errors [M, B]} for each micro-batch.

        B is the number of samples in the micro-batch. M is 2 for preference pairs (chosen, rejected), otherwise 1.
        """
        # The batch size of training: with another one, a GPU may choose kernels that give different errors.
        errors_by_micro: list[dict[str, Tensor]] = [{} for _ in micros.splits]
        for policy in self.algorithm.settings.reference_policies:
            with self.job.timer(f"{policy}_forward"), self.job.engine.use_policy(policy):
                for errors, micro in zip(errors_by_micro, micros.iterate(release=False), strict=True):
                    errors[policy] = predict_errors(self.job, policy, micro.batch, micro.expert, self.stream_weights)
        return errors_by_micro

    def optimize(
        self,
        samples: Sequence[TrainingSample],
        micros: MicroBatches[LossTerm],
        references: Sequence[Mapping[str, Tensor]],
    ) -> dict[str, float]:
        engine = self.job.engine
        engine.expect_backwards(micros.num_backwards)
        for micro, reference_errors in zip(micros.iterate(release=True), references, strict=True):
            errors = predict_errors(self.job, "policy", micro.batch, micro.expert, self.stream_weights)
            sigma_B = micro.batch.sigma[: errors.shape[1]]
            loss_B, stats = self.algorithm.loss(errors, sigma_B, reference_errors)
            engine.backward(loss_B.sum(), num_terms=self.job.run_sizes.samples_per_step)
            stats = loss_stats(self.algorithm.area, loss_B.detach(), sigma_B, self.shift) | stats
            self.meter.add(stats, torch.ones_like(sigma_B))
        result = engine.step()
        self.nonfinite_limit.check(result, [sample.sample_id for sample in samples])
        if result.is_applied:
            engine.update_ema()
        return self.meter.collect(self.job.world) | result.metrics()

    def make_noisy_batch(self, samples: Sequence[TrainingSample], terms: Sequence[LossTerm]) -> NoisyBatch:
        """Add noise to each sample at the noise level of its loss term. All ranks of the replica must call this."""
        seed, times = self.job.recipe.run.seed, self.settings.items_per_sample
        rows = [samples[term.row] for term in terms]
        clean = load_clean_latents(self.job, list(iter_media(rows)))
        (sigma,) = lists_to_device(clean.device, [term.sigma for term in terms] * times)
        seeds = [derive_seed(seed, "train_noise", sample.position) for sample in rows]
        noisy, noise = add_noise(clean, sigma, seeds * times)
        draws = [draw_uniform(seed, "conditional_frames", sample.epoch, sample.sample_id) for sample in rows]
        return NoisyBatch(
            items_per_sample=times,
            clean_latents=clean,
            noise=noise,
            latents=noisy,
            sigma=sigma,
            texts=self.caption_texts(rows, clean.shape[1:]) * times,
            inputs=[sample.prompt.inputs for sample in rows] * times,
            num_conditioning_frames=conditioning_frame_counts(self.frame_range, draws * times),
        )

    def caption_texts(self, samples: Sequence[TrainingSample], shape: Sequence[int] | None = None) -> list[Text]:
        """Return the captions in the format of the model family, which may contain the image size.

        shape: latent shape of a sample, which determines the image size. None: the size comes from the sample's framing
        or, without framing, from the recipe.
        """
        sampler, texts = self.job.sampler, list[Text]()
        for sample in samples:
            framing = sample.framing
            size = (framing.height, framing.width) if framing and shape is None else sampler.pixel_size(shape)
            caption = format_prompts(self.job.model, [self.sample_caption(sample)], size, sampler.settings.num_frames)
            texts += self.job.model.attach_images(caption, [sample.prompt.inputs])
        return texts

    def sample_caption(self, sample: TrainingSample) -> PromptText:
        dropped = draw_uniform(self.job.recipe.run.seed, "caption_dropout", sample.epoch, sample.sample_id)
        return NegativeText("") if dropped < self.job.recipe.data.caption_dropout else prompt_text(sample.prompt)


def predict_errors(
    job: Job, purpose: str, batch: NoisyBatch, expert: int, stream_weights: StreamWeights | None
) -> Tensor:
    """Return the active policy's velocity errors [M, B] for a batch of B samples of M images or videos.

    purpose: name under which the forward passes are counted. stream_weights: weights of video and sound in the errors;
    None: all elements have equal weights.
    """
    frames = (
        None
        if batch.num_conditioning_frames is None
        else ConditioningFrames(batch.clean_latents, batch.num_conditioning_frames)
    )
    inputs = job.sampler.encode_inputs(batch.inputs, frames, batch.clean_latents.shape[1:])
    conditioning, mask = {**job.text_cache.encode(batch.texts), **inputs}, inputs.get(MASK_KEY)
    velocity = job.forward(purpose, batch.latents, batch.sigma, conditioning, expert)
    errors = velocity_errors(velocity, batch.clean_latents, batch.noise, mask, stream_weights)
    return errors.view(batch.items_per_sample, -1)


def loss_stats(prefix: str, loss_B: Tensor, sigma_B: Tensor, shift: float) -> Stats:
    """Return statistics of the losses of B loss terms, over all terms and per noise-level bucket.

    The result is {`<prefix>/loss`: loss [B], `<prefix>/loss_bucket<j>`: (loss [B], mask [B] of bucket j)}.
    """
    buckets = torch.arange(NUM_BUCKETS, device=sigma_B.device)
    masks = (bucket_index(sigma_B, shift) == buckets[:, None]).float().unbind()
    return {f"{prefix}/loss": loss_B, **{f"{prefix}/loss_bucket{j}": (loss_B, mask) for j, mask in enumerate(masks)}}


def iter_media(samples: Sequence[TrainingSample]) -> Iterator[TrainingSample]:
    """Yield all samples, then the rejected samples of preference pairs. Only replica leaders have rejected samples."""
    yield from samples
    yield from (sample.rejected for sample in samples if sample.rejected is not None)


class ValidationLoss:
    """The loss on held-out samples at 8 fixed noise levels with fixed noise, for any step and number of ranks."""

    def __init__(
        self, job: Job, algorithm: SupervisedAlgorithm, samples: Sequence[Sample], framings: Sequence[Framing]
    ) -> None:
        """framings: size and crop of each sample."""
        self.job, self.algorithm, self.samples, self.framings = job, algorithm, samples, framings
        self.settings = job.recipe.supervised_settings
        self.stream_weights = choose_stream_weights(
            self.settings.stream_weights, job.model.stream_sizes(job.recipe.sampling)
        )
        self.shift = self.settings.flow_shift or job.model.flow_shift(job.recipe.sampling)
        self.sigmas = validation_sigmas(self.shift).tolist()
        self.frame_range = job.model.clean_frame_range(self.settings.conditioning_frame_range)

    @torch.no_grad()
    def measure_loss(self) -> dict[str, float]:
        """Return `val/loss`, `val/loss_bucket<j>` and the algorithm's metrics of the evaluation weights.

        All ranks must call this.
        """
        engine, references = self.job.engine, {}
        for policy in self.settings.reference_policies:
            with engine.use_policy(policy):
                references[policy] = self.policy_errors()
        with engine.use_policy(self.job.evaluation_policy):
            errors = self.policy_errors()
        loss_NL, sample_metrics = self.algorithm.validation_loss(errors, references)
        means = {"loss": loss_NL, **{f"loss_bucket{j}": loss_N for j, loss_N in enumerate(loss_NL.unbind(dim=1))}}
        return {f"val/{name}": float(values.mean()) for name, values in {**means, **sample_metrics}.items()}

    def policy_errors(self) -> Tensor:
        """Return the active policy's velocity errors [M, N, L] as float64 on the CPU. All ranks must call this.

        M: images or videos per sample. N: number of samples. L: number of noise levels.
        """
        world, model = self.job.world, self.job.model
        shape = (self.settings.items_per_sample, len(self.samples), len(self.sigmas))
        errors = torch.zeros(shape, dtype=torch.float64, device=world.device)
        for expert in range(len(model.sigma_ranges)):
            levels = [j for j, sigma in enumerate(self.sigmas) if model.select_expert(sigma) == expert]
            for framing in dict.fromkeys(self.framings):
                indices = [i for i, other in enumerate(self.framings) if other == framing]
                self.add_errors([(i, j) for i in indices for j in levels], expert, errors)
        # Each error is computed by one replica and 0 on the others, so the sum is exact for any number of ranks.
        sums = world.sum_over_replicas({str(k): error for k, error in enumerate(errors.flatten().tolist())})
        return torch.tensor(list(sums.values()), dtype=torch.float64).view(shape)

    def add_errors(self, terms: Sequence[tuple[int, int]], expert: int, errors: Tensor) -> None:
        """Compute this replica's shard of the velocity errors and write it into `errors`.

        errors: [images or videos per sample, number of samples, number of noise levels].
        terms: (sample index, noise-level index) pairs of one expert and one image size.
        """
        world = self.job.world
        shard_size = math.ceil(len(terms) / world.dp_size)
        shard = range(world.dp_rank * shard_size, (world.dp_rank + 1) * shard_size)
        clean: dict[int, Tensor] = {}  # latents of the last forward pass, reused for their next noise levels
        for part in split_into_chunks(
            shard, max(1, self.job.recipe.engine.max_forward_batch // self.settings.items_per_sample)
        ):
            chosen = [terms[k % len(terms)] for k in part]  # repeats: all ranks run the same number of forward passes
            clean = {i: clean[i] if i in clean else self.load_latents(i) for i in dict.fromkeys(i for i, _ in chosen)}
            batch = self.make_noisy_batch(chosen, clean)
            batch_errors = predict_errors(self.job, "validation", batch, expert, self.stream_weights)
            count = sum(k < len(terms) for k in part)
            rows, levels = (list(column[:count]) for column in zip(*chosen, strict=True))
            errors[:, rows, levels] = batch_errors[:, :count].double()

    def make_noisy_batch(self, terms: Sequence[tuple[int, int]], clean_by_index: Mapping[int, Tensor]) -> NoisyBatch:
        times, keys = self.settings.items_per_sample, [(self.samples[i].id, j) for i, j in terms]
        samples = [self.samples[i] for i, _ in terms]
        clean = torch.stack([clean_by_index[i] for i, _ in terms], dim=1).flatten(0, 1)
        seeds = [derive_seed(0, "validation_noise", *key) for key in keys]
        noise = draw_cpu_normal(seeds, clean.shape[1:], clean.device)
        noise = noise.repeat(times, *(1 for _ in clean.shape[1:]))
        sigmas = [self.sigmas[j] for _, j in terms] * times
        sigma = torch.tensor(sigmas, dtype=torch.float32, device=clean.device)
        draws = [draw_uniform(0, "validation_conditional_frames", *key) for key in keys]
        texts, inputs = [prompt_text(s.prompt) for s in samples], [sample.prompt.inputs for sample in samples]
        return NoisyBatch(
            items_per_sample=times,
            clean_latents=clean,
            noise=noise,
            latents=noisy_latents(clean, noise, sigma),
            sigma=sigma,
            texts=self.job.sampler.format_prompts(texts, inputs, clean.shape[1:]) * times,
            inputs=inputs * times,
            num_conditioning_frames=conditioning_frame_counts(self.frame_range, draws * times),
        )

    def load_latents(self, index: int) -> Tensor:
        """Return the clean latents [M, ...] of a sample with M images or videos.

        All ranks of the replica must call this.
        """
        world, sample = self.job.world, self.samples[index]
        if not world.is_leader:
            return world.broadcast_tensor_in_replica(None)
        rows = [load_media_latents(self.job, media, self.framings[index]) for media in sample.all_media]
        return world.broadcast_tensor_in_replica(torch.stack(rows))
