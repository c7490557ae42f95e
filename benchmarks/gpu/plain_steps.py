"""Whole steps of the published loops (reference.py): rollout, decoding, training. One object is one loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from benchmarks.gpu.reference import (
    PlainSd3,
    Texts,
    Transition,
    dpm2_weights,
    grpo_loss,
    log_prob,
    nft_loss,
    sde_mean,
    sft_loss,
    wide,
)
from wfm_ds.algorithms.plans import noise_level
from wfm_ds.recipe.algorithms import FlowGrpoAlgorithm, NftAlgorithm, count_of_fraction

SHIFT = 3.0  # of SD3's noise levels in training
T = TypeVar("T")


class PlainSteps(Protocol):
    """A loop that is stepped by hand."""

    def step(self) -> None:
        """Do all of one step: for reinforcement learning samples, their pictures on the host, and the updates."""


def pieces(rows: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (rows[i : i + size] for i in range(0, len(rows), size))


class SftSteps:
    """Pictures are encoded in each step, as in the example script; they are in memory already, which files are not."""

    def __init__(self, plain: PlainSd3) -> None:
        self.plain, self.size = plain, plain.recipe.engine.micro_batch_size
        sampling = plain.recipe.sampling
        shape = (self.size, 3, sampling.height, sampling.width)
        self.pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
        self.texts = plain.embed([f"noise number {number}" for number in range(self.size)])

    def step(self) -> None:
        accumulation = self.plain.recipe.engine.gradient_accumulation
        for _ in range(accumulation):
            clean = self.encoded()
            q_B = torch.randn(self.size, device=clean.device).sigmoid()
            sigma_B = SHIFT * q_B / (1 + (SHIFT - 1) * q_B)
            loss_B = sft_loss(self.plain, clean, torch.randn_like(clean), sigma_B, self.texts)
            torch.autograd.backward(loss_B.mean() / accumulation)
        self.plain.step()

    @torch.no_grad()
    def encoded(self) -> Tensor:
        vae = self.plain.pipeline.vae
        pixels = self.pixels.to(self.plain.device).float() / 127.5 - 1
        drawn = vae.encode(pixels).latent_dist.sample()
        latents: Tensor = (drawn - vae.config.shift_factor) * vae.config.scaling_factor
        return latents


class Rollouts:
    """Inputs of both loops of reinforcement learning: prompts, and noise for a step's samples."""

    def __init__(self, plain: PlainSd3) -> None:
        self.plain, recipe = plain, plain.recipe
        rollout, sampling = recipe.rl.rollout, recipe.sampling
        self.of_sample = [p for p in range(rollout.prompts_per_step) for _ in range(rollout.group_size)]
        self.prompts = plain.embed([f"prompt number {number}" for number in range(rollout.prompts_per_step)])
        factor = plain.pipeline.vae_scale_factor
        channels = plain.transformer.config.in_channels
        self.shape = (channels, sampling.height // factor, sampling.width // factor)
        self.grid = plain.sigmas()

    def texts(self, rows: Sequence[int]) -> Texts:
        return self.prompts.rows([self.of_sample[row] for row in rows])

    def noise(self, rows: Sequence[int]) -> Tensor:
        return torch.randn(len(rows), *self.shape, device=self.plain.device)

    def level(self, number: int, rows: Sequence[int]) -> Tensor:
        return torch.full((len(rows),), self.grid[number], device=self.plain.device)

    def chunks(self) -> Iterator[Sequence[int]]:
        return pieces(range(len(self.of_sample)), self.plain.recipe.engine.max_forward_batch)

    def fraction(self) -> float:
        """The share of the noise levels that each sample is trained on."""
        algorithm = self.plain.recipe.rl.algorithm
        assert isinstance(algorithm, NftAlgorithm | FlowGrpoAlgorithm)
        return algorithm.timestep_fraction

    def updates(self) -> list[Sequence[int]]:
        """Samples by optimizer step."""
        updates = self.plain.recipe.rl.algorithm.updates_per_rollout
        return list(pieces(range(len(self.of_sample)), -(-len(self.of_sample) // updates)))


class NftSteps(Rollouts):
    """DiffusionNFT: samples by the old adapter, then each sample noised again to several levels."""

    def step(self) -> None:
        clean = torch.cat([self.sampled(rows) for rows in self.chunks()])
        credit = torch.rand(len(clean), device=clean.device)
        for number, rows in enumerate(self.updates()):
            self.update(rows, clean, credit, old=number > 0)  # at first both adapters are equal
        self.plain.copy_to_old()

    @torch.no_grad()
    def sampled(self, rows: Sequence[int]) -> Tensor:
        x, texts, clean_before = self.noise(rows), self.texts(rows), None
        with self.plain.adapter("old"):
            for k, weight in enumerate(dpm2_weights(self.grid)):
                velocity = self.plain.velocity(x, self.level(k, rows), texts)
                clean = x - self.grid[k] * velocity
                x = x + (self.grid[k + 1] - self.grid[k]) * velocity
                x = x if clean_before is None else x + weight * (clean - clean_before)
                clean_before = clean
        self.plain.decode(x)
        return x

    def update(self, rows: Sequence[int], clean: Tensor, credit: Tensor, *, old: bool) -> None:
        levels = len(self.grid) - 1
        fraction = self.fraction()
        drawn = [(row, int(k)) for row in rows for k in torch.randperm(levels)[: count_of_fraction(levels, fraction)]]
        for part in pieces(drawn, self.plain.recipe.engine.micro_batch_size):
            index = [row for row, _ in part]
            x0, sigma_B = clean[index], torch.tensor([self.grid[k] for _, k in part], device=clean.device)
            loss_B = nft_loss(self.plain, x0, torch.randn_like(x0), sigma_B, self.texts(index), credit[index], old=old)
            torch.autograd.backward(loss_B.sum() / len(drawn))
        self.plain.step()


class GrpoSteps(Rollouts):
    """Flow-GRPO: samples by a stochastic solver whose steps are kept, then the ratio of each of them."""

    def __init__(self, plain: PlainSd3) -> None:
        super().__init__(plain)
        self.grid[0] = 1.0
        negative = plain.embed([""])
        count = max(plain.recipe.engine.max_forward_batch, plain.recipe.engine.micro_batch_size)
        self.negative = negative.rows([0] * count)

    def step(self) -> None:
        made = [self.sampled(rows) for rows in self.chunks()]
        kept = [
            Transition(*(torch.cat([getattr(one[k], name) for one in made]) for name in Transition.__slots__))
            for k in range(len(made[0]))
        ]
        advantage = torch.randn(len(self.of_sample), device=self.plain.device)
        for rows in self.updates():
            self.update(rows, kept, advantage)

    @torch.no_grad()
    def sampled(self, rows: Sequence[int]) -> list[Transition]:
        x, texts, kept = self.noise(rows), self.texts(rows), []
        negative = self.negative.rows(range(len(rows)))
        level = noise_level(self.plain.recipe.sampling)
        for k in range(len(self.grid) - 1):
            sigma_B, next_B = self.level(k, rows), self.level(k + 1, rows)
            velocity = self.plain.guided_at_once(x, sigma_B, texts, negative)
            mean_x, std_B, _ = sde_mean(x, velocity, sigma_B, next_B, level, self.grid[1])
            after = mean_x + wide(std_B, x) * torch.randn_like(x)
            kept.append(Transition(x, after, sigma_B, next_B, log_prob(after, mean_x, std_B)))
            x = after
        self.plain.decode(x)
        return kept[:-1]  # the last step, to a clean picture, is not trained on

    def update(self, rows: Sequence[int], kept: Sequence[Transition], advantage: Tensor) -> None:
        trained = count_of_fraction(len(kept), self.fraction())
        drawn = [(row, int(k)) for row in rows for k in torch.randperm(len(kept))[:trained]]
        for part in pieces(drawn, self.plain.recipe.engine.micro_batch_size):
            index = [row for row, _ in part]
            made = Transition(
                *(torch.stack([getattr(kept[k], name)[row] for row, k in part]) for name in Transition.__slots__)
            )
            negative = self.negative.rows(range(len(part)))
            loss_B = grpo_loss(self.plain, made, self.texts(index), negative, advantage[index], self.grid[1])
            torch.autograd.backward(loss_B.sum() / len(drawn))
        self.plain.step()


STEPS: Mapping[str, type[SftSteps | NftSteps | GrpoSteps]] = {
    "sft": SftSteps,
    "diffusion_nft": NftSteps,
    "flow_grpo": GrpoSteps,
}
