"""Reference for reinforcement learning on prompts: rollouts, rewards, advantages, and four losses."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from reference import solvers
from reference.draws import cpu_noise, data_index, derive_seed, device_noise, permutation
from reference.optimization import Optimization
from reference.product import score_sample

STD_OFFSET = 1e-4
NUM_TRAINED = 2  # trained steps of a Flow-GRPO sample: 0.7 of 3


@dataclass
class Sample:
    """One generated sample of an RL step."""

    group: int
    text: str
    seed: int
    row: int = 0  # index among all samples of the step
    data: torch.Tensor = None  # clean latents of its group's image
    clean: torch.Tensor = None
    steps: list = field(default_factory=list)  # (index, latents, next latents, log-probability)
    advantage: float | None = None


class RlReference:
    """Train on prompts. Subclasses define `make_terms(samples, step)` and `losses(terms, update)`, which returns the
    loss of each term [B] and statistics by tag. They also define `generate` if rollouts do not use Euler steps."""

    rollout_policy = "train"

    def __init__(self, network, prompts, options, data=None):
        """data: clean latents of each prompt's image, for losses on data."""
        self.network, self.prompts, self.o, self.data = network, prompts, options, data
        self.seed, self.num_updates = options["run.seed"], options.get("algorithm.updates_per_rollout", 1)
        self.optimization = Optimization(network, options, options["run.steps"] * self.num_updates)
        self.grid = network.sigmas(options["sampling.steps"])
        self.shape = network.latent_shape()

    def train(self):
        """Return the metrics of each optimizer step."""
        return [line for step in range(1, self.o["run.steps"] + 1) for line in self.train_step(step)]

    def train_step(self, step):
        samples = self.plan_samples(step)
        with self.network.use(self.optimization.weights(self.rollout_policy)):
            self.generate(samples, step)
        step_metrics = self.set_advantages(samples)
        with torch.no_grad():
            terms = [self.make_terms(samples[u :: self.num_updates], step) for u in range(self.num_updates)]
            self.remember_old(terms)
        lines = [self.optimize(part, u) for u, part in enumerate(terms)]
        self.end_step(step)
        return [step_metrics | lines[0], *lines[1:]]

    def plan_samples(self, step):
        count, size = self.o["rollout.prompts_per_step"], self.o["rollout.group_size"]
        samples = []
        for g in range(count):
            _, index = data_index((step - 1) * count + g, len(self.prompts), self.seed)
            for k in range(size):
                seed = derive_seed(self.seed, "init_noise", step, g, k)
                data = None if self.data is None else self.data[index]
                samples.append(Sample(g, self.prompts[index], seed, row=len(samples), data=data))
        return samples

    def predict(self, texts):
        def velocity(latents, sigma):
            return self.network.velocity(latents, torch.full((len(latents),), sigma).double(), texts, guided=True)

        return velocity

    def generate(self, samples, step):
        noise = cpu_noise([s.seed for s in samples], self.shape)
        clean = solvers.sample_ode(self.predict([s.text for s in samples]), noise, self.grid)
        for sample, latents in zip(samples, clean, strict=True):
            sample.clean = latents

    def set_advantages(self, samples):
        """Score the samples and set their advantages. Returns the metrics."""
        size = self.o["rollout.group_size"]
        rewards = [score_sample(self.network.decode(s.clean), s.text, s.row % size) for s in samples]
        known = np.array([r for r in rewards if r is not None])
        limit = self.o["algorithm.adv_clip_max"]
        raw = []
        for sample in samples:
            group = np.array(
                [r for s, r in zip(samples, rewards, strict=True) if s.group == sample.group and r is not None]
            )
            if rewards[sample.row] is None or len(group) < 2:
                continue
            std = group.std() if self.o["algorithm.advantage_std"] == "group" else known.std()
            raw.append((rewards[sample.row] - group.mean()) / (std + STD_OFFSET))
            sample.advantage = float(np.clip(raw[-1], -limit, limit))
        return {
            "reward/total/mean": known.mean(),
            "rollout/samples": float(len(raw)),
            "adv/clip_fraction": float(np.mean(np.abs(raw) > limit)),
        }

    def optimize(self, terms, update):
        """Run one optimizer step on all terms with an advantage."""
        losses, stats = self.losses(terms, update)
        metrics = {"loss/total": float(losses.detach().mean())} | {tag: float(v.mean()) for tag, v in stats.items()}
        return metrics | self.optimization.update(self.o.get("algorithm.loss_scale", 1) * losses.mean())

    def remember_old(self, terms):
        """Store the predictions that later updates need."""

    def end_step(self, step):
        """Update the policy copies."""


@dataclass
class Terms:
    """B loss terms: noisy latents of clean samples, or stored steps."""

    latents: torch.Tensor
    sigma: torch.Tensor
    texts: list
    advantage: torch.Tensor
    extra: dict

    def per_row(self, values):
        return values.view(-1, *[1] * (self.latents.ndim - 1))


def row_mean(values):
    return values.flatten(1).mean(1)


class ForwardReference(RlReference):
    """Losses on noisy versions of the clean samples, at some noise levels of the rollout's grid."""

    def make_terms(self, samples, step):
        rows = []
        for sample in samples:
            seed = derive_seed(self.seed, "timesteps", step, sample.seed)
            levels = permutation(len(self.grid) - 1, seed, "trained_steps")[: self.o["algorithm.num_levels"]]
            if sample.advantage is not None:
                rows += [(sample, k, derive_seed(self.seed, "train_noise", step, sample.seed, k)) for k in levels]
        clean = torch.stack([sample.clean for sample, _, _ in rows])
        noise = device_noise([seed for *_, seed in rows], clean.shape[1:])
        sigma = torch.tensor([self.grid[k] for _, k, _ in rows]).double()
        advantage = torch.tensor([sample.advantage for sample, *_ in rows], dtype=torch.float64)
        terms = Terms(clean, sigma, [sample.text for sample, *_ in rows], advantage, {"clean": clean, "noise": noise})
        s = terms.per_row(sigma)
        terms.latents = (1 - s) * clean + s * noise
        return terms

    def velocity(self, terms, policy=None):
        if policy is None:
            return self.network.velocity(terms.latents, terms.sigma, terms.texts, guided=True)
        with self.network.use(self.optimization.weights(policy)):
            return self.velocity(terms)


class NftReference(ForwardReference):
    rollout_policy = "old"

    def losses(self, terms, update):
        beta, limit = self.o["algorithm.beta"], self.o["algorithm.adv_clip_max"]
        old, ref, v = self.velocity(terms, "old"), self.velocity(terms, "ref"), self.velocity(terms)
        u, s = terms.extra["noise"] - terms.extra["clean"], terms.per_row(terms.sigma)
        r = (terms.advantage / (2 * limit) + 0.5).clamp(0, 1)

        def half(error):
            error = s * error
            return row_mean(error.square()) / row_mean(error.detach().abs()).clamp_min(1e-5)

        positive, negative = half(u - (beta * v + (1 - beta) * old)), half(u - ((1 + beta) * old - beta * v))
        policy = limit * (r * positive + (1 - r) * negative) / beta
        kl = row_mean((v - ref).square())
        stats = {"loss/policy": policy.detach(), "loss/kl": kl.detach(), "nft/r_mean": r}
        return policy + self.o["algorithm.kl_beta"] * kl, stats

    def end_step(self, step):
        schedule = self.o["algorithm.old_decay"]
        decay = min(schedule["initial"] + self.optimization.num_updates * schedule["slope"], schedule["max"])
        self.optimization.follow("old", decay)


def clipped_loss(log_ratio, advantage, clip_low, clip_high):
    """Return PPO's loss and the fractions of terms above and below the trust region."""
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    stats = {
        "policy/clip_fraction_higher": (ratio.detach() > 1 + clip_high).double(),
        "policy/clip_fraction_lower": (ratio.detach() < 1 - clip_low).double(),
        "policy/ratio_mean": ratio.detach(),
    }
    return loss, stats


class AwmReference(ForwardReference):
    """Advantage Weighted Matching, with KL terms to the reference and to the EMA."""

    def log_prob(self, terms, velocity):
        error = row_mean((velocity - (terms.extra["noise"] - terms.extra["clean"])).square())
        power = self.o["algorithm.power"]
        return -terms.sigma * ((error + 1e-10) ** power - 1e-10**power) / power

    def remember_old(self, terms):
        for part in terms:
            part.extra["old"] = self.log_prob(part, self.velocity(part))

    def losses(self, terms, update):
        ref, ema, v = self.velocity(terms, "ref"), self.velocity(terms, "ema"), self.velocity(terms)
        clip = self.o["algorithm.clip_ratio"]
        advantage = terms.advantage / self.o["algorithm.adv_clip_max"] * self.o["algorithm.adv_max"]
        policy, stats = clipped_loss(self.log_prob(terms, v) - terms.extra["old"], advantage, clip, clip)
        to_ref, to_ema = row_mean((v - ref).square()), row_mean((v - ema).square())
        loss = policy + self.o["algorithm.kl_beta"] * to_ref + self.o["algorithm.ema_kl_beta"] * to_ema
        distances = {"kl/ref": to_ref.detach(), "kl/ema": to_ema.detach()}
        return loss, stats | distances | {"loss/policy": policy.detach()}


class FlowGrpoReference(RlReference):
    """Flow-GRPO on all denoising steps but the last, with the Gaussian KL to the reference."""

    def __init__(self, network, prompts, options):
        super().__init__(network, prompts, options)
        self.grid = [1.0, *self.grid[1:]]

    def transition(self, latents, velocity, k):
        return solvers.flow_sde(latents, velocity, self.grid, k, self.o["sampling.noise_level"])

    def generate(self, samples, step):
        x = cpu_noise([s.seed for s in samples], self.shape)
        predict = self.predict([s.text for s in samples])
        for k, sigma in enumerate(self.grid[:-1]):
            v = predict(x, sigma)
            if k == len(self.grid) - 2:
                x = x - sigma * v
                break
            mean, std = self.transition(x, v, k)
            after = mean + std * device_noise([derive_seed(s.seed, "sde_noise", k) for s in samples], x.shape[1:])
            log_prob = gaussian_log_prob(after, mean, std)
            for i, sample in enumerate(samples):
                sample.steps.append((k, x[i], after[i], log_prob[i]))
            x = after
        for sample, latents in zip(samples, x, strict=True):
            sample.clean = latents

    def make_terms(self, samples, step):
        rows = []
        for sample in samples:
            seed = derive_seed(self.seed, "timesteps", step, sample.seed)
            if sample.advantage is not None:
                order = permutation(len(sample.steps), seed, "trained_steps")[:NUM_TRAINED]
                rows += [(sample, *sample.steps[i]) for i in order]
        sigma = torch.tensor([self.grid[k] for _, k, *_ in rows], dtype=torch.float64)
        advantage = torch.tensor([sample.advantage for sample, *_ in rows], dtype=torch.float64)
        extra = {
            "k": [k for _, k, *_ in rows],
            "next": torch.stack([row[3] for row in rows]),
            "rollout": torch.stack([row[4] for row in rows]),
        }
        texts = [sample.text for sample, *_ in rows]
        return Terms(torch.stack([row[2] for row in rows]), sigma, texts, advantage, extra)

    def losses(self, terms, update):
        with self.network.use(self.optimization.weights("ref")):
            ref = self.network.velocity(terms.latents, terms.sigma, terms.texts, guided=True)
        v = self.network.velocity(terms.latents, terms.sigma, terms.texts, guided=True)
        log_probs, kls = [], []
        for i, k in enumerate(terms.extra["k"]):
            mean, std = self.transition(terms.latents[i], v[i], k)
            ref_mean, _ = self.transition(terms.latents[i], ref[i], k)
            log_probs.append(gaussian_log_prob(terms.extra["next"][i][None], mean[None], std)[0])
            # Flow-GRPO's KL uses the diffusion coefficient without the step length.
            kls.append((mean - ref_mean).square().mean() / (2 * std**2) * (self.grid[k] - self.grid[k + 1]))
        log_prob, kl = torch.stack(log_probs), torch.stack(kls)
        low, high = self.o["algorithm.clip_ratio_low"], self.o["algorithm.clip_ratio"]
        policy, stats = clipped_loss(log_prob - terms.extra["rollout"], terms.advantage, low, high)
        stats |= {"loss/policy": policy.detach(), "loss/kl": kl.detach()}
        return policy + self.o["algorithm.kl_beta"] * kl, stats


def gaussian_log_prob(x, mean, std):
    """Return the log-probability per element, [B]."""
    return -row_mean((x - mean).square()) / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2


class DdrlReference(RlReference):
    """DDRL: rollouts of a reference that is updated every few steps, and a loss on data."""

    rollout_policy = "old"

    def __init__(self, network, prompts, options, data):
        super().__init__(network, prompts, options, data)
        self.levels = solvers.karras_levels(options["sampling.steps"])
        self.plan = solvers.edm_steps(self.levels, options["sampling.s_churn"])

    def generate(self, samples, step):
        def noise(k):
            return device_noise([derive_seed(s.seed, "sde_noise", k) for s in samples], self.shape)

        predict = self.predict([s.text for s in samples])
        start = cpu_noise([s.seed for s in samples], self.shape)
        clean, states = solvers.sample_edm(predict, start, self.levels, self.plan, self.o["sampling.s_churn"], noise)
        for i, sample in enumerate(samples):
            sample.clean, sample.steps = clean[i], [(k, state[i], noise(k)[i]) for k, state in enumerate(states)]

    def make_terms(self, samples, step):
        rows = [(s, *s.steps[k]) for s in samples if s.advantage is not None for k in self.o["algorithm.train_on"]]
        sigma = torch.tensor([self.plan[k].sigma for _, k, *_ in rows], dtype=torch.float64)
        advantage = torch.tensor([sample.advantage for sample, *_ in rows], dtype=torch.float64)
        extra = {"k": [k for _, k, *_ in rows], "z": torch.stack([row[3] for row in rows])}
        extra["clean"] = torch.stack([sample.data for sample, *_ in rows])
        extra["noise"] = cpu_noise([sample.seed for sample, *_ in rows], self.shape)
        texts = [sample.text for sample, *_ in rows]
        return Terms(torch.stack([row[2] for row in rows]), sigma, texts, advantage, extra)

    def losses(self, terms, update):
        with self.network.use(self.optimization.weights("old")):
            old = self.network.velocity(terms.latents, terms.sigma, terms.texts, guided=True)
        v = self.network.velocity(terms.latents, terms.sigma, terms.texts, guided=True)
        std = torch.tensor([self.plan[k].std for k in terms.extra["k"]], dtype=torch.float64)
        # One unit of velocity changes the step's mean by -now * sigma.
        shift = torch.tensor([-self.plan[k].now for k in terms.extra["k"]], dtype=torch.float64) * terms.sigma
        move = terms.per_row(shift) * (v - old)
        after = terms.per_row(std) * terms.extra["z"]  # relative to the old mean
        log_ratio = -row_mean((after - move).square() - after.square()) / (2 * std)  # ratio_norm: std_scaled
        clip = self.o["algorithm.clip_ratio"]
        policy, stats = clipped_loss(log_ratio, terms.advantage, clip, clip)
        kl = row_mean(move.square()) / (2 * std**2)
        s, clean, noise = terms.per_row(terms.sigma), terms.extra["clean"], terms.extra["noise"]
        predicted = self.network.velocity((1 - s) * clean + s * noise, terms.sigma, terms.texts, guided=True)
        weight = (1 - terms.sigma) ** 2 + terms.sigma**2
        data = weight * row_mean((predicted - (noise - clean)).square())
        stats |= {"loss/policy": policy.detach(), "loss/kl": kl.detach(), "loss/data": data.detach()}
        return policy + self.o["algorithm.kl_beta"] * kl + self.o["algorithm.data_beta"] * data, stats

    def end_step(self, step):
        if step % self.o["algorithm.update_ref_every"] == 0:
            self.optimization.follow("old", 0.0)
