"""A small SD3 transformer, an NFT-like loss over numbered loss terms, and a single-process reference loop.

The number of a loss term determines its data, so that the ranks and the single process use equal data.
"""

import copy
import json
import math
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel

from wfm_ds.distributed.world import World
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.engine.optimizer_steps import ema_decay
from wfm_ds.models.tiny.sizes import SD3
from wfm_ds.recipe.schema import Recipe
from wfm_ds.seeds import derive_seed

ROOT = Path(__file__).parent.parent.parent
RANKS, MICRO_STEPS, TERMS = 2, 3, 2  # TERMS: loss terms per micro-step and rank
TARGETS = ("to_q", "to_v", "to_out.0")
EVERYTHING = frozenset({"old", "ref", "ema"})
SCHEDULE = {"schedule": "cosine", "final_lr_fraction": 0.2}
BETA, KL_BETA, OLD_DECAY = 0.8, 0.3, 0.25


def small_sd3():
    torch.manual_seed(1)
    return SD3Transformer2DModel(**SD3)


def small_recipe(config, *, lora, targets=None, **sections):
    """Return a recipe with a large learning rate and a max_grad_norm that clips some steps.

    config: a name in ds_configs/ or a path.
    """
    filled = {
        "run": {"output_dir": "unused", "steps": 4, "seed": 3},
        "model": {"path": "unused", "dtype": "float32"},
        "data": {"kind": "paired", "path": "unused"},
        "sampling": {"height": 16, "width": 16},
        "algorithm": {"name": "sft"},
        "lora": {"rank": 4, "alpha": 8, "target_modules": targets} if lora else None,
        "engine": {"deepspeed": str(config), "micro_batch_size": TERMS, "max_grad_norm": 0.0134 if lora else 0.19},
        "optimizer": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.05, **SCHEDULE},
        "ema": {"decay": 0.3},
    }
    for name, keys in sections.items():
        filled[name] = filled.get(name, {}) | keys
    return Recipe(**filled)


def write_zero3(folder, **keys):
    """Copy zero3.json with the given keys of zero_optimization. Return its path as a string."""
    config = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    config["zero_optimization"] |= keys
    path = Path(folder) / f"{'_'.join(['zero3', *keys])}.json"
    path.write_text(json.dumps(config))
    return str(path)


def build(config, *, lora, policies=EVERYTHING, accumulation=MICRO_STEPS, **sections):
    return DenoiserEngine.build(
        small_sd3(),
        small_recipe(config, lora=lora, **sections),
        World.join(),
        lora_targets=TARGETS,
        policies=frozenset(policies),
        accumulation=accumulation,
        total_updates=4,
    )


def inputs(numbers, dtype=torch.float32):
    """Return the arguments of the transformer for the given loss terms, batch first."""
    rows = []
    for number in numbers:
        draw = torch.Generator().manual_seed(1000 + number)
        rows.append(
            {
                "hidden_states": torch.randn(4, 8, 8, generator=draw).to(dtype),
                "timestep": 1000 * torch.rand((), generator=draw),
                "encoder_hidden_states": torch.randn(5, 64, generator=draw).to(dtype),
                "pooled_projections": torch.randn(64, generator=draw).to(dtype),
            }
        )
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def predict(forward, numbers, dtype=torch.float32):
    return forward(**inputs(numbers, dtype), return_dict=False)[0].float()


def target(number):
    """Return (velocity [4,8,8], reward in [0, 1])."""
    draw = torch.Generator().manual_seed(5000 + number)
    return torch.randn(4, 8, 8, generator=draw), torch.rand((), generator=draw)


def weight(number):
    """Return 0 for every third loss term. Ranks and micro-steps then have unequal numbers of terms."""
    return float(number % 3 != 0)


def nft_loss(numbers, v, old, ref):
    """Return the NFT loss of each number, [B]: implicit positive and negative policies, plus the distance to ref."""
    targets = [target(number) for number in numbers]
    u, r = torch.stack([t[0] for t in targets]), torch.stack([t[1] for t in targets])

    def mean_square(x):
        return x.square().mean(dim=(1, 2, 3))

    positive = mean_square((1 - BETA) * old + BETA * v - u)
    negative = mean_square((1 + BETA) * old - BETA * v - u)
    return r * positive + (1 - r) * negative + KL_BETA * mean_square(v - ref)


def term_numbers(step, micro, rank):
    first = ((step * MICRO_STEPS + micro) * RANKS + rank) * TERMS
    return list(range(first, first + TERMS))


def all_numbers(step):
    return [n for micro in range(MICRO_STEPS) for rank in range(RANKS) for n in term_numbers(step, micro, rank)]


def num_terms(step):
    return int(sum(weight(n) for n in all_numbers(step)))


def train_step(engine, step, dtype=torch.float32, spoil=None):
    """Predict with old and ref, then train one optimizer step on this rank. Return (result, global loss)."""
    world, micros = engine.world, range(MICRO_STEPS)
    numbers = [term_numbers(step, micro, world.rank) for micro in micros]
    with engine.use_policy("old"):
        old = [predict(engine.forward_module, n, dtype) for n in numbers]
    with engine.use_policy("ref"):
        ref = [predict(engine.forward_module, n, dtype) for n in numbers]
    total, loss = num_terms(step), 0.0
    if spoil == "empty":
        return engine.skip_step(), math.nan
    for micro in micros:
        v = predict(engine.forward_module, numbers[micro], dtype)
        loss_B = nft_loss(numbers[micro], v, old[micro], ref[micro])
        loss_sum = (loss_B * torch.tensor([weight(n) for n in numbers[micro]])).sum()
        if spoil == "nan" and micro == 0 and world.rank == 1:
            loss_sum = loss_sum * float("nan")
        engine.backward(loss_sum, total)
        loss += float(loss_sum.detach())
    return engine.step(), world.sum_over_ranks({"loss": loss})["loss"] / total


def plain_step(engine, step, dtype=torch.float32):
    """Train one optimizer step on the squared prediction, without old and ref."""
    for micro in range(engine.accumulation):
        numbers = term_numbers(step, micro, engine.world.rank)
        engine.backward(predict(engine.forward_module, numbers, dtype).square().mean(), RANKS * engine.accumulation)
    return engine.step()


def follow(engine, result):
    """Update the policy copies like the training loops after a step."""
    if result.is_applied:
        engine.update_ema()
        engine.update_policy("old", OLD_DECAY)


def full_tensors(engine, policy):
    """Return {name: tensor} on rank 0, {} on other ranks."""
    return {name: tensor for name, tensor in engine.iter_full_tensors(policy) if tensor is not None}


class Reference:
    """The same training with plain torch and PEFT in one process. Each policy is a full copy of the module."""

    def __init__(self, *, lora, lr, max_grad_norm):
        module = small_sd3()
        if lora:
            import peft

            module.requires_grad_(False)
            torch.manual_seed(derive_seed(3, "lora_init"))
            config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS), init_lora_weights="gaussian")
            module.add_adapter(config)
        self.theta, self.lr, self.max_grad_norm = module, lr, max_grad_norm
        self.policies = {name: copy.deepcopy(module) for name in EVERYTHING} | {"train": module}
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1.0, betas=(0.9, 0.999), eps=1e-4, weight_decay=0.05)

    def train_step(self, step):
        """Train one step. Return (loss, gradient norm before clipping)."""
        numbers, weights = all_numbers(step), torch.tensor([weight(n) for n in all_numbers(step)])
        with torch.no_grad():
            old, ref = predict(self.policies["old"], numbers), predict(self.policies["ref"], numbers)
        loss = (nft_loss(numbers, predict(self.theta, numbers), old, ref) * weights).sum() / weights.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for parameter in self.trained:  # ZeRO applies weight decay to unused parameters too
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self.gradient = [p.grad.clone() for p in self.trained]
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr[step]
        self.optimizer.step()
        self.move("ema", ema_decay(0.3, step + 1))
        self.move("old", OLD_DECAY)
        return float(loss.detach()), float(norm)

    @torch.no_grad()
    def move(self, name, decay):
        followers = [p for p in self.policies[name].parameters() if p.requires_grad]
        for follower, leader in zip(followers, self.trained, strict=True):
            follower.copy_(decay * follower + (1 - decay) * leader)

    def tensors(self, policy):
        module = self.policies[policy]
        return {n.replace(".default.", "."): p.detach() for n, p in module.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def output(self, policy):
        return predict(self.policies[policy], range(4))
