"""Complete steps of the published loops (reference.py): rollout, decoding, training. One object is one loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from benchmarks.gpu.reference import (
    PlainSd3,
    Texts,
    Transition,
    broadcast_batch,
    dpm2_weights,
    grpo_loss,
    log_prob,
    nft_loss,
    sde_moments,
    sft_loss,
)
from wfm_ds.recipe.algorithms import FlowGrpoAlgorithm, NftAlgorithm, count_of_fraction
from wfm_ds.sampling.plan import noise_level

SHIFT = 3.0  # shift of SD3's noise levels in training
T = TypeVar("T")


class PlainSteps(Protocol):
    """A loop that can run single steps."""

    def step(self) -> None:
        """Run one step. For RL: sample, decode to images on the host, and update."""


def split_into_pieces(rows: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (rows[i : i + size] for i in range(0, len(rows), size))


class SftSteps:
    """Encodes images in each step, as in the example script. The images are in memory instead of files."""

    def __init__(self, plain: PlainSd3) -> None:
        self.plain, self.size = plain, plain.recipe.engine.micro_batch_size
        sampling = plain.recipe.sampling
        shape = (self.size, 3, sampling.height, sampling.width)
        self.pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
        self.texts = plain.embed_prompts([f"noise number {number}" for number in range(self.size)])

    def step(self) -> None:
        accumulation = self.plain.recipe.engine.gradient_accumulation
        for _ in range(accumulation):
            clean = self.encode_pixels()
            q_B = torch.randn(self.size, device=clean.device).sigmoid()
            sigma_B = SHIFT * q_B / (1 + (SHIFT - 1) * q_B)
            loss_B = sft_loss(self.plain, clean, torch.randn_like(clean), sigma_B, self.texts)
            torch.autograd.backward(loss_B.mean() / accumulation)
        self.plain.optimizer_step()

    @torch.no_grad()
    def encode_pixels(self) -> Tensor:
        vae = self.plain.pipeline.vae
        pixels = self.pixels.to(self.plain.device).float() / 127.5 - 1
        drawn = vae.encode(pixels).latent_dist.sample()
        latents: Tensor = (drawn - vae.config.shift_factor) * vae.config.scaling_factor
        return latents


class Rollouts:
    """Inputs of both RL loops: prompts, and noise for the samples of a step."""

    def __init__(self, plain: PlainSd3) -> None:
        self.plain, recipe = plain, plain.recipe
        rollout, sampling = recipe.rl.rollout, recipe.sampling
        self.of_sample = [p for p in range(rollout.prompts_per_step) for _ in range(rollout.group_size)]
        self.prompts = plain.embed_prompts([f"prompt number {number}" for number in range(rollout.prompts_per_step)])
        factor = plain.pipeline.vae_scale_factor
        channels = plain.transformer.config.in_channels
        self.shape = (channels, sampling.height // factor, sampling.width // factor)
        self.grid = plain.rollout_sigmas()

    def chunk_texts(self, rows: Sequence[int]) -> Texts:
        return self.prompts.select([self.of_sample[row] for row in rows])

    def initial_noise(self, rows: Sequence[int]) -> Tensor:
        return torch.randn(len(rows), *self.shape, device=self.plain.device)

    def sigma_batch(self, number: int, rows: Sequence[int]) -> Tensor:
        return torch.full((len(rows),), self.grid[number], device=self.plain.device)

    def chunk_rows(self) -> Iterator[Sequence[int]]:
        return split_into_pieces(range(len(self.of_sample)), self.plain.recipe.engine.max_forward_batch)

    def fraction_to_train(self) -> float:
        """Return the fraction of the noise levels that each sample is trained on."""
        algorithm = self.plain.recipe.rl.algorithm
        assert isinstance(algorithm, NftAlgorithm | FlowGrpoAlgorithm)
        return algorithm.timestep_fraction

    def update_rows(self) -> list[Sequence[int]]:
        """Return the samples of each optimizer step."""
        updates = self.plain.recipe.rl.algorithm.num_updates
        return list(split_into_pieces(range(len(self.of_sample)), -(-len(self.of_sample) // updates)))


class NftSteps(Rollouts):
    """DiffusionNFT: sample with the old adapter, then add noise of several levels to each sample."""

    def step(self) -> None:
        clean = torch.cat([self.sample_chunk(rows) for rows in self.chunk_rows()])
        credit = torch.rand(len(clean), device=clean.device)
        for number, rows in enumerate(self.update_rows()):
            self.train_update(rows, clean, credit, old=number > 0)  # in the first update both adapters are equal
        self.plain.copy_to_old()

    @torch.no_grad()
    def sample_chunk(self, rows: Sequence[int]) -> Tensor:
        x, texts, clean_before = self.initial_noise(rows), self.chunk_texts(rows), None
        with self.plain.use_adapter("old"):
            for k, weight in enumerate(dpm2_weights(self.grid)):
                velocity = self.plain.predict_velocity(x, self.sigma_batch(k, rows), texts)
                clean = x - self.grid[k] * velocity
                x = x + (self.grid[k + 1] - self.grid[k]) * velocity
                x = x if clean_before is None else x + weight * (clean - clean_before)
                clean_before = clean
        self.plain.decode_latents(x)
        return x

    def train_update(self, rows: Sequence[int], clean: Tensor, credit: Tensor, *, old: bool) -> None:
        levels = len(self.grid) - 1
        fraction = self.fraction_to_train()
        drawn = [(row, int(k)) for row in rows for k in torch.randperm(levels)[: count_of_fraction(levels, fraction)]]
        for part in split_into_pieces(drawn, self.plain.recipe.engine.micro_batch_size):
            index = [row for row, _ in part]
            x0, sigma_B = clean[index], torch.tensor([self.grid[k] for _, k in part], device=clean.device)
            loss_B = nft_loss(
                self.plain, x0, torch.randn_like(x0), sigma_B, self.chunk_texts(index), credit[index], old=old
            )
            torch.autograd.backward(loss_B.sum() / len(drawn))
        self.plain.optimizer_step()


class GrpoSteps(Rollouts):
    """Flow-GRPO: sample with a stochastic solver and store its steps, then compute the ratio of each step."""

    def __init__(self, plain: PlainSd3) -> None:
        super().__init__(plain)
        self.grid[0] = 1.0
        negative = plain.embed_prompts([""])
        count = max(plain.recipe.engine.max_forward_batch, plain.recipe.engine.micro_batch_size)
        self.negative = negative.select([0] * count)

    def step(self) -> None:
        chunks = [self.sample_chunk(rows) for rows in self.chunk_rows()]
        kept = [
            Transition(*(torch.cat([getattr(chunk[k], name) for chunk in chunks]) for name in Transition.__slots__))
            for k in range(len(chunks[0]))
        ]
        advantage = torch.randn(len(self.of_sample), device=self.plain.device)
        for rows in self.update_rows():
            self.train_update(rows, kept, advantage)

    @torch.no_grad()
    def sample_chunk(self, rows: Sequence[int]) -> list[Transition]:
        x, texts, kept = self.initial_noise(rows), self.chunk_texts(rows), []
        negative = self.negative.select(range(len(rows)))
        level = noise_level(self.plain.recipe.sampling)
        for k in range(len(self.grid) - 1):
            sigma_B, next_B = self.sigma_batch(k, rows), self.sigma_batch(k + 1, rows)
            velocity = self.plain.predict_guided_joint(x, sigma_B, texts, negative)
            mean_x, std_B, _ = sde_moments(x, velocity, sigma_B, next_B, level, self.grid[1])
            after = mean_x + broadcast_batch(std_B, x) * torch.randn_like(x)
            kept.append(Transition(x, after, sigma_B, next_B, log_prob(after, mean_x, std_B)))
            x = after
        self.plain.decode_latents(x)
        return kept[:-1]  # the last step, to a clean image, is not trained

    def train_update(self, rows: Sequence[int], kept: Sequence[Transition], advantage: Tensor) -> None:
        trained = count_of_fraction(len(kept), self.fraction_to_train())
        drawn = [(row, int(k)) for row in rows for k in torch.randperm(len(kept))[:trained]]
        for part in split_into_pieces(drawn, self.plain.recipe.engine.micro_batch_size):
            index = [row for row, _ in part]
            made = Transition(
                *(torch.stack([getattr(kept[k], name)[row] for row, k in part]) for name in Transition.__slots__)
            )
            negative = self.negative.select(range(len(part)))
            loss_B = grpo_loss(self.plain, made, self.chunk_texts(index), negative, advantage[index], self.grid[1])
            torch.autograd.backward(loss_B.sum() / len(drawn))
        self.plain.optimizer_step()


STEPS: Mapping[str, type[SftSteps | NftSteps | GrpoSteps]] = {
    "sft": SftSteps,
    "diffusion_nft": NftSteps,
    "flow_grpo": GrpoSteps,
}
