"""Reference for supervised training: SFT and DPO, with the validation loss."""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from reference.draws import cpu_noise, data_index, derive_seed, device_noise, draw_uniform, permutation
from reference.optimization import Optimization

MAX_FRAMES = "algorithm.max_num_conditional_frames"


@dataclass
class Item:
    """One image or video of a sample, with its noise."""

    clean: torch.Tensor
    noise: torch.Tensor
    sigma: float
    text: str
    num_frames: int = 0  # conditioning frames


class Supervised:
    """Train on `samples`: (id, caption, [clean latents of each image of the sample])."""

    def __init__(self, network, samples, options):
        self.network, self.samples, self.o = network, samples, options
        self.optimization = Optimization(network, options, options["run.steps"])
        self.seed, self.shift = options["run.seed"], network.shift()
        self.micro = options["engine.micro_batch_size"]
        self.accumulation = options["engine.gradient_accumulation"]
        self.global_batch = self.micro * self.accumulation  # of one rank

    def train(self):
        """Return the metrics of each step."""
        return [self.train_step(step) for step in range(1, self.o["run.steps"] + 1)]

    def train_step(self, step):
        rows = [self.draw_row(step, i) for i in range(self.global_batch)]
        reference = None
        if self.o["algorithm.name"] == "dpo":
            with self.network.use(self.optimization.policies["ref"]):
                reference = self.errors(rows)
        loss, metrics = self.loss(self.errors(rows), torch.tensor([row[0].sigma for row in rows]).double(), reference)
        return metrics | self.optimization.update(loss)

    def draw_row(self, step, i):
        """Return the training items of the sample at position i of a step's batch, one for each of its images."""
        position = (step - 1) * self.global_batch + i
        epoch, index = data_index(position, len(self.samples), self.seed)
        name, caption, images = self.samples[index]
        sigma = self.draw_sigma(step, i, position)
        noise = device_noise([derive_seed(self.seed, "train_noise", position)], images[0].shape)[0]
        dropped = draw_uniform(self.seed, "caption_dropout", epoch, name) < self.o["data.caption_dropout"]
        num_frames = self.frame_count(draw_uniform(self.seed, "conditional_frames", epoch, name))
        return [Item(x0, noise, sigma, "" if dropped else caption, num_frames) for x0 in images]

    def frame_count(self, u):
        low, high = self.o.get("algorithm.min_num_conditional_frames", 0), self.o.get(MAX_FRAMES, 0)
        return low + int(u * (high - low + 1))

    def draw_sigma(self, step, i, position):
        u = draw_uniform(self.seed, "training_sigma", position)
        if self.o["algorithm.stratified"]:
            strata = permutation(self.global_batch, self.seed, "sigma_strata", step - 1)
            u = (strata[i] + u) / self.global_batch
        low, high = 0.0, 1.0
        if self.network.boundary:
            below = self.density_below(self.network.boundary)
            low, high = (below, 1.0) if self.draw_expert(step, i // self.micro, below) == 0 else (0.0, below)
        mean, std = self.o["algorithm.logit_mean"], self.o["algorithm.logit_std"]
        a = torch.tensor(low + (high - low) * u, dtype=torch.float64)
        q = float(torch.sigmoid(mean + std * torch.special.ndtri(a)))
        return float(torch.tensor(self.shift * q / (1 + (self.shift - 1) * q)).float())

    def density_below(self, sigma):
        """Return the fraction of the training density below a noise level."""
        q = sigma / (self.shift - (self.shift - 1) * sigma)
        z = (math.log(q / (1 - q)) - self.o["algorithm.logit_mean"]) / self.o["algorithm.logit_std"]
        return (1 + math.erf(z / math.sqrt(2))) / 2

    def draw_expert(self, step, micro, below):
        """Return the expert of a micro-batch: systematic sampling with one offset per step, in random order."""
        offset = draw_uniform(self.seed, "training_expert", step)
        place = permutation(self.accumulation, self.seed, "training_expert_order", step)[micro]
        return 0 if (place + offset) / self.accumulation < 1 - below else 1

    def errors(self, rows):
        """Return the mean squared velocity error of each image over its free frames, [M, B]."""
        items = [row[m] for m in range(len(rows[0])) for row in rows]  # all first images, then all second images
        clean, noise = (torch.stack([getattr(item, name) for item in items]) for name in ("clean", "noise"))
        sigma = torch.tensor([item.sigma for item in items], dtype=torch.float64)
        s = sigma.view(-1, *[1] * (clean.ndim - 1))
        frames, free = None, torch.ones_like(clean)
        if self.o.get(MAX_FRAMES):
            mask = torch.zeros_like(clean[:, :1, :, :1, :1])
            for row, item in enumerate(items):
                mask[row, :, : item.num_frames] = 1
            frames, free = (clean, mask), (1 - mask).expand_as(clean)
        velocity = self.network.velocity((1 - s) * clean + s * noise, sigma, [i.text for i in items], frames=frames)
        square = (velocity - (noise - clean)).square() * free
        return (square.flatten(1).sum(1) / free.flatten(1).sum(1)).view(-1, len(rows))

    def loss(self, errors, sigma, reference):
        if self.o["algorithm.name"] == "dpo":
            rewards = -self.o["algorithm.beta"] / 2 * (errors - reference)
            margin = rewards[0] - rewards[1]
            loss = -logsigmoid(margin).mean()
            return loss, {
                "dpo/loss": float(loss.detach()),
                "dpo/margin": float(margin.detach().mean()),
                "dpo/chosen_reward": float(rewards[0].detach().mean()),
            }
        weight = {
            "none": torch.ones_like(sigma),
            "cosmap": 2 / (math.pi * (1 - 2 * sigma + 2 * sigma.square())),
        }[self.o["algorithm.loss_weighting"]]
        loss = (weight * errors[0]).mean()
        return loss, {"sft/loss": float(loss.detach())}

    def validation_loss(self, samples):
        """Return the mean velocity error of the EMA weights at 8 noise levels with fixed noise."""
        levels = [(j + 0.5) / 8 for j in range(8)]
        sigmas = [self.shift * q / (1 + (self.shift - 1) * q) for q in levels]
        rows = []
        for name, caption, images in samples:
            for j, s in enumerate(sigmas):
                noise = cpu_noise([derive_seed(0, "validation_noise", name, j)], images[0].shape)[0]
                num_frames = self.frame_count(draw_uniform(0, "validation_conditional_frames", name, j))
                rows.append([Item(images[0], noise, s, caption, num_frames)])
        with self.network.use(self.optimization.weights("ema" if self.o.get("ema") else "train")):
            return float(self.errors(rows).mean())
