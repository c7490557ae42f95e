"""Plain optimizer steps in float64: AdamW, gradient clipping, learning rate, and policy copies."""

import math

import torch


class Optimization:
    """Train a network's weights. `policies`: copies of the initial weights by name."""

    def __init__(self, network, options, total_updates):
        self.network, self.o, self.total_updates = network, options, total_updates
        self.policies = {name: network.copy_weights() for name in ("old", "ref", "ema")}
        self.num_updates = 0
        self.adamw = torch.optim.AdamW(
            network.trained,
            betas=(0.9, 0.999),
            eps=options["optimizer.eps"],
            weight_decay=options["optimizer.weight_decay"],
        )

    def learning_rate(self, update):
        peak, warmup = self.o["optimizer.lr"], self.o.get("optimizer.warmup_steps", 0)
        if update <= warmup:
            return peak * (update - 1) / warmup
        fraction = self.o["optimizer.final_lr_fraction"]
        done = (update - 1 - warmup) / (self.total_updates - warmup)
        curve = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done}[self.o["optimizer.schedule"]]
        return peak * (fraction + (1 - fraction) * curve)

    def update(self, loss):
        """Run one optimizer step on the mean loss over all loss terms. Returns the metrics of the step."""
        self.num_updates += 1
        self.adamw.zero_grad(set_to_none=True)
        loss.backward()
        for parameter in self.network.trained:  # ZeRO also decays the weights of an expert without gradient
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        limit = self.o["engine.max_grad_norm"]
        norm = float(torch.nn.utils.clip_grad_norm_(self.network.trained, limit))
        lr = self.learning_rate(self.num_updates)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        if self.o.get("ema"):
            decay = min((1 + self.num_updates) / (10 + self.num_updates), self.o["ema"]["decay"])
            self.follow("ema", decay)
        return {"optim/grad_norm": norm, "optim/lr": lr, "optim/clipped": float(norm > limit)}

    @torch.no_grad()
    def follow(self, policy, decay):
        """Update a policy copy: copy <- decay * copy + (1 - decay) * weights."""
        for old, new in zip(self.policies[policy], self.network.trained, strict=True):
            old.copy_(decay * old + (1 - decay) * new)

    def weights(self, policy):
        return self.network.copy_weights() if policy == "train" else self.policies[policy]
