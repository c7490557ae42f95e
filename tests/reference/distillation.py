"""Reference for the distillation algorithms: OPD, and DMD2 with and without a reward loss."""

import torch

from reference.draws import cpu_noise, derive_seed, device_noise, draw_uniform, permutation
from reference.rl import RlReference, gaussian_log_prob, row_mean


class DistillationReference(RlReference):
    """Rollouts of the student without guidance that keep the inputs x_k and the predictions h_k of each step.

    teacher_weights: weights of the teacher; None is the base model.
    """

    def __init__(self, network, prompts, options, *, teacher_weights=None):
        self.rewards = {key.rpartition(".")[2]: v for key, v in options.items() if key.startswith("algorithm.reward.")}
        of_advantages = {
            f"algorithm.{key}": self.rewards[key] for key in ("adv_clip_max", "advantage_std") if self.rewards
        }
        super().__init__(network, prompts, options | of_advantages)
        self.teacher_weights = self.optimization.weights("ref") if teacher_weights is None else teacher_weights
        shift, steps = network.shift(), options["sampling.steps"]
        self.grid = [shift * q / (1 + (shift - 1) * q) for q in (1 - k / steps for k in range(steps + 1))]

    def generate(self, samples, step):
        x, texts = cpu_noise([s.seed for s in samples], self.shape), [s.text for s in samples]
        states, predictions = [], []
        for k, sigma in enumerate(self.grid[:-1]):
            v = self.network.velocity(x, torch.full((len(x),), sigma).double(), texts)
            states.append(x)
            predictions.append(x - sigma * v)
            x = x + (self.grid[k + 1] - sigma) * v
            if self.o["sampling.solver"] == "cps" and k < len(self.grid) - 2:  # with noise level 1
                noise = device_noise([derive_seed(s.seed, "sde_noise", k) for s in samples], x.shape[1:])
                x = (1 - self.grid[k + 1]) * predictions[-1] + self.grid[k + 1] * noise
        for i, sample in enumerate(samples):
            sample.steps = [(state[i], h[i]) for state, h in zip(states, predictions, strict=True)]
            sample.clean = x[i]

    def guide(self, latents, sigma, texts, scale):
        """Predict with guidance."""
        conditional = self.network.velocity(latents, sigma, texts)
        if scale == 1:
            return conditional
        negative = self.network.velocity(latents, sigma, [""] * len(texts))
        return negative + scale * (conditional - negative)


class OpdReference(DistillationReference):
    """Squared distance to the teacher at one random denoising step of each sample."""

    def train_step(self, step):
        samples = self.plan_samples(step)
        with torch.no_grad():
            self.generate(samples, step)
        steps = [
            permutation(len(self.grid) - 1, derive_seed(self.seed, "timesteps", step, s.seed), "trained_steps")[0]
            for s in samples
        ]
        x = torch.stack([s.steps[k][0] for s, k in zip(samples, steps, strict=True)])
        sigma, texts = torch.tensor([self.grid[k] for k in steps]).double(), [s.text for s in samples]
        with self.network.use(self.teacher_weights):
            target = self.guide(x, sigma, texts, self.o["algorithm.teachers"][0]["guidance_scale"])
        distance = row_mean((self.network.velocity(x, sigma, texts) - target).square())
        metrics = {"loss/total": float(distance.detach().mean()), "opd/distance": float(distance.detach().mean())}
        return [metrics | self.optimization.update(distance.mean())]


class Dmd2Reference(DistillationReference):
    """DMD2 with a second AdamW for the fake score."""

    def __init__(self, network, prompts, options, **teacher):
        super().__init__(network, prompts, options, **teacher)
        fake = options["algorithm.fake"]
        self.num_fake, self.warmup = fake["updates"], fake["warmup_steps"]
        self.optimization.total_updates = options["run.steps"] - self.warmup
        self.fake = [p.requires_grad_() for p in network.copy_weights()]
        self.adamw = torch.optim.AdamW(
            self.fake,
            lr=fake["lr"],
            betas=tuple(fake["betas"]),
            eps=options["optimizer.eps"],
            weight_decay=options["optimizer.weight_decay"],
        )

    def train_step(self, step):
        samples = self.plan_samples(step)
        with torch.no_grad():
            self.generate(samples, step)
        first = {}
        if self.rewards:
            first = self.set_advantages(samples)
            del first["rollout/samples"]  # samples without a reward train too
        lines = []
        for update in range(self.num_fake + 1):
            if update < self.num_fake or step <= self.warmup:
                lines.append(self.update_fake(samples, step, update))
            else:
                lines.append(self.update_student(samples, step, update))
        lines[0] |= first
        return lines

    def draw_noise(self, purpose, samples, clean, step, update):
        """Return noisy latents, their levels and the noise."""
        shift = self.o["algorithm.levels"]["shift"]
        low, high = (s / (shift - (shift - 1) * s) for s in (self.o["algorithm.levels"][k] for k in ("min", "max")))
        draws = [draw_uniform(self.seed, f"{purpose}_level", step, update, s.seed) for s in samples]
        q = torch.tensor([low + u * (high - low) for u in draws]).double()
        s = (shift * q / (1 + (shift - 1) * q)).view(-1, *[1] * len(self.shape))
        seeds = [derive_seed(self.seed, f"{purpose}_noise", step, update, one.seed) for one in samples]
        noise = device_noise(seeds, self.shape)
        return (1 - s) * clean + s * noise, s, noise

    def choose(self, samples, step, update):
        """Return the chosen denoising steps and their stored x_k and h_k."""
        count = len(self.grid) - 1
        steps = [derive_seed(self.seed, "distilled_step", step, update, s.seed) % count for s in samples]
        chosen = [s.steps[k] for s, k in zip(samples, steps, strict=True)]
        return steps, *(torch.stack(part) for part in zip(*chosen, strict=True))

    def update_fake(self, samples, step, update):
        _, _, h = self.choose(samples, step, update)
        y, s, noise = self.draw_noise("distillation", samples, h, step, update)
        student, texts = self.network.copy_weights(), [sample.text for sample in samples]
        self.network._write(self.fake)
        loss = row_mean((self.network.velocity(y, s.flatten(), texts) - (noise - h)).square()).mean()
        gradients = torch.autograd.grad(loss, self.network.trained, allow_unused=True)
        self.network._write(student)
        for parameter, gradient in zip(self.fake, gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        limit = self.o["engine.max_grad_norm"]
        norm = float(torch.nn.utils.clip_grad_norm_(self.fake, limit))
        self.adamw.step()
        return {
            "loss/fake": float(loss.detach()),
            "optim/fake_grad_norm": norm,
            "optim/fake_clipped": float(norm > limit),
            "optim/fake_lr": self.o["algorithm.fake"]["lr"],
        }

    def update_student(self, samples, step, update):
        steps, x, h = self.choose(samples, step, update)
        y, s, _ = self.draw_noise("distillation", samples, h, step, update)
        texts, sigma = [sample.text for sample in samples], torch.tensor([self.grid[k] for k in steps]).double()
        with self.network.use(self.teacher_weights):
            teacher = self.guide(y, s.flatten(), texts, self.o["algorithm.teacher"]["guidance_scale"])
        with self.network.use([p.detach() for p in self.fake]):
            fake = self.network.velocity(y, s.flatten(), texts)
        scale = row_mean((h - (y - s * teacher)).abs()).clamp_min(1e-3).view(s.shape)
        direction = ((y - s * fake) - (y - s * teacher)) / scale
        v = self.network.velocity(x, sigma, texts)
        own = x - sigma.view(s.shape) * v
        loss = 0.5 * row_mean((own - (own - direction).detach()).square())
        reported = row_mean(own.detach() * direction)  # the loss of the run has the same gradient
        metrics = {"dmd/gap": float(row_mean(direction.square()).sqrt().mean())}
        if self.rewards:
            extra, value = getattr(self, f"{self.rewards['loss']}_loss")(samples, steps, own, step, update)
            loss, reported = loss + self.rewards["weight"] * extra, reported + self.rewards["weight"] * value
        metrics["loss/total"] = float(reported.mean())
        return metrics | self.optimization.update(loss.mean())

    def flow_grpo_loss(self, samples, steps, own, step, update):
        """Return the policy gradient loss of the chosen steps, and its value in the run."""
        count, losses, values = len(self.grid) - 1, [], []
        for i, (sample, k) in enumerate(zip(samples, steps, strict=True)):
            advantage = sample.advantage or 0.0
            if k == count - 1:
                losses.append(0.0 * own[i].sum())
                values.append(0.0)
                continue
            after = self.grid[k + 1]
            log_prob = gaussian_log_prob(sample.steps[k + 1][0][None], (1 - after) * own[i][None], after)[0]
            losses.append(-advantage * log_prob * count / (count - 1))
            values.append(-advantage * count / (count - 1))
        return torch.stack(losses), torch.tensor(values).double()

    def diffusion_nft_loss(self, samples, steps, own, step, update):
        """Return DiffusionNFT's on-policy loss of the finished samples, which is also its value in the run."""
        clean, texts = torch.stack([sample.clean for sample in samples]), [sample.text for sample in samples]
        noisy, s, noise = self.draw_noise("reward", samples, clean, step, update)
        v = self.network.velocity(noisy, s.flatten(), texts)
        old, beta, limit = v.detach(), self.rewards["beta"], self.rewards["adv_clip_max"]
        advantage = torch.tensor([sample.advantage or 0.0 for sample in samples]).double()
        r = (advantage / (2 * limit) + 0.5).clamp(0, 1)

        def half(velocity):
            error = s * (noise - clean - velocity)
            return row_mean(error.square()) / row_mean(error.detach().abs()).clamp_min(1e-5)

        positive, negative = half(beta * v + (1 - beta) * old), half((1 + beta) * old - beta * v)
        loss = limit * (r * positive + (1 - r) * negative) / beta
        return loss, loss.detach()
