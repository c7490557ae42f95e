"""The published loops in plain torch for comparison, with diffusers, PEFT and AdamW, and without code of this project.

They do the work of the training scripts of Flow-GRPO (arXiv 2505.05470), DiffusionNFT (arXiv 2509.16117) and diffusers'
SD3 LoRA example on one GPU, implemented from the papers and descriptions: a bfloat16 transformer under autocast,
float32 adapters and AdamW (fused on CUDA), one forward and backward pass after another, no DeepSpeed, no compiler. If a
published loop does more than the recipe requires, this one follows the recipe, so that both run the same forward and
backward passes: the negative half of a guided prediction gets no gradient.

`tests/benchmarks/test_gpu_reference.py` compares losses, gradients and numbers of forward passes with ours.
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

from wfm_ds.recipe.algorithms import FlowGrpoAlgorithm, NftAlgorithm
from wfm_ds.recipe.schema import Recipe
from wfm_ds.sampling.plan import noise_level

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
MIN_ERROR = 1e-5  # lower bound in DiffusionNFT's self-normalized loss


@dataclass(frozen=True, slots=True)
class Texts:
    """Embedded prompts."""

    embeds: Tensor  # [B, L, D]
    pooled: Tensor  # [B, D]

    def select(self, index: Sequence[int]) -> Texts:
        return Texts(self.embeds[list(index)], self.pooled[list(index)])


class PlainSd3:
    """Stable Diffusion 3 with a trained adapter and, if `old`, a second adapter for rollouts."""

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
        self.trained = dict(self._adapter_parameters("default"))
        for parameter in (*self.trained.values(), *(p for _, p in self._adapter_parameters("old"))):
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

    def _adapter_parameters(self, name: str) -> Iterator[tuple[str, Any]]:
        """Return the parameters of an adapter, with names that do not contain the adapter's name."""
        mark = f".{name}."
        return ((n.replace(mark, "."), p) for n, p in self.transformer.named_parameters() if mark in n and "lora_" in n)

    @torch.no_grad()
    def embed_prompts(self, prompts: Sequence[str]) -> Texts:
        words = list(prompts)
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            *[words] * 3,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.recipe.model.max_sequence_length or 256,
        )
        return Texts(embeds, pooled)

    def predict_velocity(self, latents: Tensor, sigma_B: Tensor, texts: Texts) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            predicted: Tensor = self.transformer(
                hidden_states=latents.to(self.dtype),
                timestep=1000 * sigma_B,
                encoder_hidden_states=texts.embeds,
                pooled_projections=texts.pooled,
                return_dict=False,
            )[0]
        return predicted.float()

    def predict_guided(self, latents: Tensor, sigma_B: Tensor, texts: Texts, negative: Texts) -> Tensor:
        """Predict with classifier-free guidance. Gradients flow only through the positive half."""
        scale = self.recipe.sampling.guidance_scale
        positive = self.predict_velocity(latents, sigma_B, texts)
        with torch.no_grad():
            contrast = self.predict_velocity(latents, sigma_B, negative)
        return contrast + scale * (positive - contrast)

    def predict_guided_joint(self, latents: Tensor, sigma_B: Tensor, texts: Texts, negative: Texts) -> Tensor:
        """Predict with guidance and without gradient, both halves in one forward pass, like the scripts."""
        both = Texts(torch.cat([negative.embeds, texts.embeds]), torch.cat([negative.pooled, texts.pooled]))
        contrast, positive = self.predict_velocity(latents.repeat(2, 1, 1, 1), sigma_B.repeat(2), both).chunk(2)
        return contrast + self.recipe.sampling.guidance_scale * (positive - contrast)

    @contextmanager
    def use_adapter(self, name: str | None) -> Iterator[None]:
        """Predict with this adapter (None: with no adapter), without gradient."""
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
    def decode_latents(self, latents: Tensor) -> Tensor:
        """Return uint8 images on the host."""
        config = self.pipeline.vae.config
        pixels = self.pipeline.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]
        images: Tensor = ((pixels + 1) * 127.5).clamp(0, 255).round().to(torch.uint8).cpu()
        return images

    def rollout_sigmas(self) -> list[float]:
        """Return the N + 1 noise levels of a rollout."""
        self.pipeline.scheduler.set_timesteps(self.recipe.sampling.steps)
        grid: list[float] = self.pipeline.scheduler.sigmas.double().tolist()
        return grid

    def optimizer_step(self) -> None:
        """Run one optimizer step, and update the EMA weights."""
        if self.recipe.engine.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.trained.values(), self.recipe.engine.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average and self.recipe.ema:
            torch._foreach_lerp_(self.average, [p.detach() for p in self.trained.values()], 1 - self.recipe.ema.decay)

    @torch.no_grad()
    def copy_to_old(self) -> None:
        for target, source in zip(dict(self._adapter_parameters("old")).values(), self.trained.values(), strict=True):
            target.copy_(source)


def broadcast_batch(value_B: Tensor, like: Tensor) -> Tensor:
    return value_B.view(-1, *[1] * (like.ndim - 1))


def mean_per_sample(value: Tensor) -> Tensor:
    """Return means [B] of values [B, ...]."""
    return value.flatten(1).mean(1)


def add_noise(clean: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor:
    return (1 - broadcast_batch(sigma_B, clean)) * clean + broadcast_batch(sigma_B, clean) * noise


def sft_loss(plain: PlainSd3, clean: Tensor, noise: Tensor, sigma_B: Tensor, texts: Texts) -> Tensor:
    """Return the squared error of the velocity [B], without weighting."""
    velocity = plain.predict_velocity(add_noise(clean, noise, sigma_B), sigma_B, texts)
    return mean_per_sample((velocity - (noise - clean)).square())


def nft_loss(
    plain: PlainSd3, clean: Tensor, noise: Tensor, sigma_B: Tensor, texts: Texts, credit_B: Tensor, *, old: bool
) -> Tensor:
    """Return the loss [B] of DiffusionNFT's implicit positive and negative policies. Each error is divided by its mean.

    old: the weights of the old adapter differ from the trained ones, so it needs a separate forward pass.
    """
    settings = plain.recipe.algorithm
    assert isinstance(settings, NftAlgorithm)
    beta, x = settings.beta, add_noise(clean, noise, sigma_B)
    old_velocity = ref_velocity = None
    if old:
        with plain.use_adapter("old"):
            old_velocity = plain.predict_velocity(x, sigma_B, texts)
    if settings.kl_beta > 0:
        with plain.use_adapter(None):
            ref_velocity = plain.predict_velocity(x, sigma_B, texts)
    velocity = plain.predict_velocity(x, sigma_B, texts)
    old_velocity = velocity.detach() if old_velocity is None else old_velocity

    def scale_error(implicit: Tensor) -> Tensor:
        difference = x - broadcast_batch(sigma_B, x) * implicit - clean
        with torch.no_grad():
            scale = mean_per_sample(difference.abs()).clamp_min(MIN_ERROR)
        return mean_per_sample(difference.square()) / scale

    positive = scale_error(beta * velocity + (1 - beta) * old_velocity)
    negative = scale_error((1 + beta) * old_velocity - beta * velocity)
    loss_B = settings.adv_clip_max * (credit_B * positive + (1 - credit_B) * negative) / beta
    if ref_velocity is not None:
        loss_B = loss_B + settings.kl_beta * mean_per_sample((velocity - ref_velocity).square())
    return loss_B


def sde_moments(x: Tensor, velocity: Tensor, sigma_B: Tensor, next_B: Tensor, level: float, second: float) -> Any:
    """Return the mean of a Flow-SDE step, the std of its noise, and its diffusion coefficient. second: the grid's
    second noise level."""
    below_one = torch.where(sigma_B >= 1, torch.full_like(sigma_B, second), sigma_B)
    diffusion_B = level * (sigma_B / (1 - below_one)).sqrt()
    sigma, diffusion = broadcast_batch(sigma_B, x), broadcast_batch(diffusion_B, x)
    dt = broadcast_batch(next_B - sigma_B, x)
    drift = velocity * (1 + diffusion.square() * (1 - sigma) / (2 * sigma)) + x * diffusion.square() / (2 * sigma)
    return x + drift * dt, diffusion_B * (sigma_B - next_B).sqrt(), diffusion_B


def log_prob(after: Tensor, mean_x: Tensor, std_B: Tensor) -> Tensor:
    """Return log-probabilities [B], averaged over elements."""
    std = broadcast_batch(std_B, after)
    density = -(after.detach() - mean_x).square() / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)
    return mean_per_sample(density)


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
    """Return the loss [B]: the clipped ratio, and the KL between the steps of the trained and the base weights."""
    settings = plain.recipe.algorithm
    assert isinstance(settings, FlowGrpoAlgorithm)
    level = noise_level(plain.recipe.sampling)

    def step_moments(velocity: Tensor) -> Any:
        return sde_moments(made.before, velocity, made.sigma_B, made.next_B, level, second)

    mean_x, std_B, diffusion_B = step_moments(plain.predict_guided(made.before, made.sigma_B, texts, negative))
    ratio_B = torch.exp(log_prob(made.after, mean_x, std_B) - made.log_prob_B)
    clipped_B = ratio_B.clamp(1 - settings.clip_ratio, 1 + settings.clip_ratio)
    loss_B = torch.maximum(-advantage_B * ratio_B, -advantage_B * clipped_B)
    if settings.kl_beta > 0:
        with plain.use_adapter(None):
            ref_mean = step_moments(plain.predict_guided(made.before, made.sigma_B, texts, negative))[0]
        loss_B = loss_B + settings.kl_beta * mean_per_sample((mean_x - ref_mean).square()) / (2 * diffusion_B.square())
    return loss_B


def dpm2_weights(grid: Sequence[float]) -> list[float]:
    """Return the weight of the change of x0 in each step of DPM-Solver++ 2M. It is 0 for Euler steps: the first, the
    last, and steps that are more than twice as long as the previous one in log-SNR."""

    def half_log_snr(sigma: float) -> float:
        return math.inf if sigma == 0 else -math.inf if sigma == 1 else math.log((1 - sigma) / sigma)

    weights = [0.0]
    for before, now, after in zip(grid, grid[1:], grid[2:], strict=False):
        h, h_before = half_log_snr(after) - half_log_snr(now), half_log_snr(now) - half_log_snr(before)
        weights.append(0.0 if after == 0 or h > 2 * h_before else (1 - after / now) * h / (2 * h_before))
    return weights
