"""The published loops in plain torch, to compare with: diffusers, PEFT, AdamW and nothing of this project.

What the training scripts of Flow-GRPO (arXiv 2505.05470), of DiffusionNFT (arXiv 2509.16117) and of diffusers' own SD3
LoRA example do on one GPU, written down from their papers and descriptions: a transformer in bfloat16 under autocast,
adapters and AdamW (fused on CUDA) in float32, one forward and backward after the other, no DeepSpeed, no compiler.
Where a published loop does more than the recipe asks for, this one does what the recipe asks for, so that both do the
same forwards and backwards: the negative half of a guided prediction gets no gradient.

`tests/benchmarks/test_gpu_reference.py` holds losses, gradients and numbers of forwards to ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from torch import Tensor

from wfm_ds.algorithms.plans import noise_level
from wfm_ds.recipe.algorithms import FlowGrpoAlgorithm, NftAlgorithm
from wfm_ds.recipe.schema import Recipe

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
MIN_ERROR = 1e-5  # of DiffusionNFT's self-normalised loss


@dataclass(frozen=True, slots=True)
class Texts:
    """Embedded prompts."""

    embeds: Tensor  # [B, L, D]
    pooled: Tensor  # [B, D]

    def rows(self, index: Sequence[int]) -> Texts:
        return Texts(self.embeds[list(index)], self.pooled[list(index)])


class PlainSd3:
    """Stable Diffusion 3 with an adapter that trains, and one that rolls out where `old` is asked for."""

    def __init__(self, folder: Path, recipe: Recipe, device: torch.device, *, old: bool) -> None:
        assert recipe.lora is not None
        self.recipe, self.device = recipe, device
        self.dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[recipe.model.dtype]
        self.pipeline = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=self.dtype).to(device)
        self.pipeline.vae.float()
        self.transformer: Any = self.pipeline.transformer.requires_grad_(False)
        targets = recipe.lora.target_modules or TARGETS
        config = LoraConfig(
            r=recipe.lora.rank, lora_alpha=recipe.lora.alpha, init_lora_weights="gaussian", target_modules=targets
        )
        for name in ("old", "default") if old else ("default",):
            self.transformer.add_adapter(config, adapter_name=name)
        self.transformer.set_adapter("default")
        if recipe.model.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self.trained = dict(self._adapter("default"))
        for parameter in (*self.trained.values(), *(p for _, p in self._adapter("old"))):
            parameter.data = parameter.data.float()
        options = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=device.type == "cuda",
        )
        self.average = [p.detach().clone() for p in self.trained.values()] if recipe.ema else []

    def _adapter(self, name: str) -> Iterator[tuple[str, Any]]:
        """Its parameters, by names without it."""
        mark = f".{name}."
        return ((n.replace(mark, "."), p) for n, p in self.transformer.named_parameters() if mark in n and "lora_" in n)

    @torch.no_grad()
    def embed(self, prompts: Sequence[str]) -> Texts:
        words = list(prompts)
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            *[words] * 3,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.recipe.model.max_sequence_length or 256,
        )
        return Texts(embeds, pooled)

    def velocity(self, latents: Tensor, sigma_B: Tensor, texts: Texts) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            predicted: Tensor = self.transformer(
                hidden_states=latents.to(self.dtype),
                timestep=1000 * sigma_B,
                encoder_hidden_states=texts.embeds,
                pooled_projections=texts.pooled,
                return_dict=False,
            )[0]
        return predicted.float()

    def guided(self, latents: Tensor, sigma_B: Tensor, texts: Texts, negative: Texts) -> Tensor:
        """Classifier-free guidance; gradient flows through the positive half."""
        scale = self.recipe.sampling.guidance_scale
        positive = self.velocity(latents, sigma_B, texts)
        with torch.no_grad():
            contrast = self.velocity(latents, sigma_B, negative)
        return contrast + scale * (positive - contrast)

    def guided_at_once(self, latents: Tensor, sigma_B: Tensor, texts: Texts, negative: Texts) -> Tensor:
        """The same without gradient, both halves in one forward, as the scripts sample."""
        both = Texts(torch.cat([negative.embeds, texts.embeds]), torch.cat([negative.pooled, texts.pooled]))
        contrast, positive = self.velocity(latents.repeat(2, 1, 1, 1), sigma_B.repeat(2), both).chunk(2)
        return contrast + self.recipe.sampling.guidance_scale * (positive - contrast)

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Predict with this adapter, None: without any, and without gradient."""
        if name is None:
            self.transformer.disable_adapters()
        else:
            self.transformer.set_adapter(name)
        try:
            with torch.no_grad():
                yield
        finally:
            if name is None:
                self.transformer.enable_adapters()
            self.transformer.set_adapter("default")

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """uint8 pictures on the host."""
        config = self.pipeline.vae.config
        pixels = self.pipeline.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]
        pictures: Tensor = ((pixels + 1) * 127.5).clamp(0, 255).round().to(torch.uint8).cpu()
        return pictures

    def sigmas(self) -> list[float]:
        """The grid of a rollout: N + 1 noise levels."""
        self.pipeline.scheduler.set_timesteps(self.recipe.sampling.steps)
        grid: list[float] = self.pipeline.scheduler.sigmas.double().tolist()
        return grid

    def step(self) -> None:
        """One optimizer step, and the average after it."""
        if self.recipe.engine.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.trained.values(), self.recipe.engine.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average and self.recipe.ema:
            torch._foreach_lerp_(self.average, [p.detach() for p in self.trained.values()], 1 - self.recipe.ema.decay)

    @torch.no_grad()
    def copy_to_old(self) -> None:
        for target, source in zip(dict(self._adapter("old")).values(), self.trained.values(), strict=True):
            target.copy_(source)


def wide(value_B: Tensor, like: Tensor) -> Tensor:
    return value_B.view(-1, *[1] * (like.ndim - 1))


def mean(value: Tensor) -> Tensor:
    """[B] of [B, ...]"""
    return value.flatten(1).mean(1)


def noised(clean: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor:
    return (1 - wide(sigma_B, clean)) * clean + wide(sigma_B, clean) * noise


def sft_loss(plain: PlainSd3, clean: Tensor, noise: Tensor, sigma_B: Tensor, texts: Texts) -> Tensor:
    """[B]: the squared error of the velocity, without weighting."""
    velocity = plain.velocity(noised(clean, noise, sigma_B), sigma_B, texts)
    return mean((velocity - (noise - clean)).square())


def nft_loss(
    plain: PlainSd3, clean: Tensor, noise: Tensor, sigma_B: Tensor, texts: Texts, credit_B: Tensor, *, old: bool
) -> Tensor:
    """[B]: DiffusionNFT's implicit positive and negative policies, each error divided by its own mean. old: its weights
    differ from those that train, so that it needs a forward of its own."""
    settings = plain.recipe.algorithm
    assert isinstance(settings, NftAlgorithm)
    beta, x = settings.beta, noised(clean, noise, sigma_B)
    old_velocity = ref_velocity = None
    if old:
        with plain.adapter("old"):
            old_velocity = plain.velocity(x, sigma_B, texts)
    if settings.kl_beta > 0:
        with plain.adapter(None):
            ref_velocity = plain.velocity(x, sigma_B, texts)
    velocity = plain.velocity(x, sigma_B, texts)
    old_velocity = velocity.detach() if old_velocity is None else old_velocity

    def error(implicit: Tensor) -> Tensor:
        difference = x - wide(sigma_B, x) * implicit - clean
        with torch.no_grad():
            scale = mean(difference.abs()).clamp_min(MIN_ERROR)
        return mean(difference.square()) / scale

    positive = error(beta * velocity + (1 - beta) * old_velocity)
    negative = error((1 + beta) * old_velocity - beta * velocity)
    loss_B = settings.adv_clip_max * (credit_B * positive + (1 - credit_B) * negative) / beta
    if ref_velocity is not None:
        loss_B = loss_B + settings.kl_beta * mean((velocity - ref_velocity).square())
    return loss_B


def sde_mean(x: Tensor, velocity: Tensor, sigma_B: Tensor, next_B: Tensor, level: float, second: float) -> Any:
    """Mean and deviations of a Flow-SDE step: of its noise, and of the diffusion. second: the grid's second level."""
    below_one = torch.where(sigma_B >= 1, torch.full_like(sigma_B, second), sigma_B)
    diffusion_B = level * (sigma_B / (1 - below_one)).sqrt()
    sigma, diffusion = wide(sigma_B, x), wide(diffusion_B, x)
    dt = wide(next_B - sigma_B, x)
    drift = velocity * (1 + diffusion.square() * (1 - sigma) / (2 * sigma)) + x * diffusion.square() / (2 * sigma)
    return x + drift * dt, diffusion_B * (sigma_B - next_B).sqrt(), diffusion_B


def log_prob(after: Tensor, mean_x: Tensor, std_B: Tensor) -> Tensor:
    """[B], the mean over elements."""
    std = wide(std_B, after)
    density = -(after.detach() - mean_x).square() / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)
    return mean(density)


@dataclass(frozen=True, slots=True)
class Transition:
    """B steps of rollouts."""

    before: Tensor
    after: Tensor
    sigma_B: Tensor
    next_B: Tensor
    log_prob_B: Tensor  # of the rollout


def grpo_loss(
    plain: PlainSd3, made: Transition, texts: Texts, negative: Texts, advantage_B: Tensor, second: float
) -> Tensor:
    """[B]: the clipped ratio, and the distance of the step's means under the trained and the bare weights."""
    settings = plain.recipe.algorithm
    assert isinstance(settings, FlowGrpoAlgorithm)
    level = noise_level(plain.recipe.sampling)

    def means(velocity: Tensor) -> Any:
        return sde_mean(made.before, velocity, made.sigma_B, made.next_B, level, second)

    mean_x, std_B, diffusion_B = means(plain.guided(made.before, made.sigma_B, texts, negative))
    ratio_B = torch.exp(log_prob(made.after, mean_x, std_B) - made.log_prob_B)
    clipped_B = ratio_B.clamp(1 - settings.clip_ratio, 1 + settings.clip_ratio)
    loss_B = torch.maximum(-advantage_B * ratio_B, -advantage_B * clipped_B)
    if settings.kl_beta > 0:
        with plain.adapter(None):
            ref_mean = means(plain.guided(made.before, made.sigma_B, texts, negative))[0]
        loss_B = loss_B + settings.kl_beta * mean((mean_x - ref_mean).square()) / (2 * diffusion_B.square())
    return loss_B


def dpm2_weights(grid: Sequence[float]) -> list[float]:
    """Weights by step of the change of x0 in DPM-Solver++ 2M; 0 where the step is Euler's: the first, the last, and any
    of more than twice the length of the one before in log-SNR."""

    def half_log_snr(sigma: float) -> float:
        return math.inf if sigma == 0 else -math.inf if sigma == 1 else math.log((1 - sigma) / sigma)

    weights = [0.0]
    for before, now, after in zip(grid, grid[1:], grid[2:], strict=False):
        h, h_before = half_log_snr(after) - half_log_snr(now), half_log_snr(now) - half_log_snr(before)
        weights.append(0.0 if after == 0 or h > 2 * h_before else (1 - after / now) * h / (2 * h_before))
    return weights
