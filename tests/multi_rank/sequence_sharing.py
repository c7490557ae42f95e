"""Train a model with the engine on several ranks, and with plain torch in one process, and compare both.

The number of a loss term determines its latents, noise level and target. An optimizer step has MICRO_STEPS micro-steps
of TERMS loss terms, split across the replicas. In models with two experts, each expert has MICRO_STEPS micro-steps.
"""

import torch
from deepspeed.utils import safe_get_full_grad
from diffusers import SD3Transformer2DModel

from families import CASES, PROMPTS
from multi_rank.training import full_tensors, small_recipe
from wfm_ds.distributed.world import World
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.engine.optimizer_steps import learning_rate
from wfm_ds.engine.policies import add_adapters
from wfm_ds.models import registry
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.models.tiny.sizes import SD3
from wfm_ds.seeds import derive_seed

MICRO_STEPS, TERMS, STEPS = 2, 4, 2
NUM_TERMS = MICRO_STEPS * TERMS
# Height, width and frames that do not divide evenly: the numbers of rows, columns and latent frames are odd.
SIZES = {
    "sd3": (20, 28, 1),
    "sana": (160, 96, 1),
    "sana_video": (96, 32, 9),
    "wan21": (48, 16, 9),
    "wan22": (48, 16, 9),
    "wan22_ti2v": (96, 32, 9),
    "cosmos25": (48, 16, 9),
    "cosmos3": (48, 16, 9),
}
SD3_HEADS = 3


def load(family, folder):
    model = registry.load_model(folder, dtype=torch.float32, device="cpu", **CASES[family].load_options)
    if family == "sd3":
        torch.manual_seed(1)
        odd = {"num_attention_heads": SD3_HEADS, "caption_projection_dim": 8 * SD3_HEADS}
        model.denoiser = SD3Transformer2DModel(**{**SD3, **odd}).eval()
    return model


def settings(config, lora, checkpointing=False, dtype="float32"):
    """Return a recipe without gradient clipping, so that the norm and the weights depend on the gradient's scale."""
    return small_recipe(
        config, lora=lora, engine={"max_grad_norm": 0}, model={"gradient_checkpointing": checkpointing, "dtype": dtype}
    )


def losses(model, family, numbers, stage):
    """Return one squared error per loss term, [B]."""
    shape = model.latent_shape(*SIZES[family])
    draws = [torch.Generator().manual_seed(derive_seed(7, "term", n) % 2**31) for n in numbers]
    latents, targets = (torch.stack([torch.randn(shape, generator=draw) for draw in draws]) for _ in range(2))
    low, high = model.sigma_ranges[stage]
    u_B = torch.stack([torch.rand((), generator=draw) for draw in draws])
    conditioning = model.encode_text([PROMPTS[n % len(PROMPTS)] for n in numbers])
    counts = torch.tensor([max(model.conditioning_frame_counts, default=0)] * len(numbers))
    if counts.any():
        conditioning = add_clean_frames(conditioning, targets, counts)
    velocity = model.denoise(latents, low + (high - low) * (0.1 + 0.8 * u_B), conditioning, stage)
    return (velocity - targets).square().flatten(1).mean(1)


def terms(step, micro, stage, dp_rank, dp_size):
    """Return the numbers of the loss terms of one replica in a micro-step."""
    first = ((step * MICRO_STEPS + micro) * 2 + stage) * TERMS
    share = TERMS // dp_size
    return range(first + dp_rank * share, first + (dp_rank + 1) * share)


def train_on_ranks(family, folder, config, lora, sp, checkpointing=False):
    """Return losses and norms of all steps, the first step's gradient, and the final weights (rank 0 only)."""
    world = World.join().with_replicas(sp)
    model, recipe = load(family, folder), settings(config, lora, checkpointing)
    stages = range(len(model.sigma_ranges))
    engine = DenoiserEngine.build(
        model.denoiser,
        recipe,
        world,
        lora_targets=model.default_lora_targets,
        policies=frozenset(),
        accumulation=MICRO_STEPS * len(stages),
        total_updates=STEPS,
    )
    model.denoiser = engine.forward_module
    rows, gradient = [], {}
    for step in range(STEPS):
        loss = 0.0
        for micro in range(MICRO_STEPS):
            for stage in stages:
                own = losses(model, family, terms(step, micro, stage, world.dp_rank, world.dp_size), stage).sum()
                engine.backward(own, NUM_TERMS * len(stages))
                loss += float(own.detach())
        if step == 0:
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    gradient[name.replace(".default.", ".")] = safe_get_full_grad(parameter).clone()
        result = engine.step()
        mean = world.sum_over_replicas({"loss": loss})["loss"] / NUM_TERMS / len(stages)
        rows.append([mean, result.grad_norm])
    return {"rows": rows, "gradient": gradient, "weights": full_tensors(engine, "train")}


def train_alone(family, folder, lora):
    """Return the same results from plain torch in one process."""
    model, recipe = load(family, folder), settings("zero2", lora)
    module = model.denoiser
    if lora:
        seed = derive_seed(recipe.run.seed, "lora_init")
        add_adapters(module, recipe.lora, model.default_lora_targets, [], seed)
    else:
        module.requires_grad_(True)
    trained = {n.replace(".default.", "."): p for n, p in module.named_parameters() if p.requires_grad}
    options = recipe.optimizer
    optimizer = torch.optim.AdamW(trained.values(), eps=options.eps, weight_decay=options.weight_decay)
    rows, gradient, stages = [], {}, range(len(model.sigma_ranges))
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = 0.0
        for micro in range(MICRO_STEPS):
            for stage in stages:
                part = losses(model, family, terms(step, micro, stage, 0, 1), stage).sum() / NUM_TERMS / len(stages)
                part.backward()
                loss += float(part.detach())
        for parameter in trained.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = float(torch.stack([p.grad.double().square().sum() for p in trained.values()]).sum().sqrt())
        if step == 0:
            gradient = {name: p.grad.clone() for name, p in trained.items()}
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step + 1, STEPS)
        optimizer.step()
        rows.append([loss, norm])
    return {"rows": rows, "gradient": gradient, "weights": {n: p.detach() for n, p in trained.items()}}


def assert_same_training(parts, want):
    """Compare losses and norms to 1e-5 relative, and gradients relative to the largest value of each."""
    rows = torch.tensor(want["rows"], dtype=torch.float64)
    largest = max(float(gradient.abs().max()) for gradient in want["gradient"].values())
    for part in parts:
        got = torch.tensor(part["rows"], dtype=torch.float64)
        torch.testing.assert_close(got, rows, rtol=1e-5, atol=0)
        assert part["gradient"].keys() == want["gradient"].keys()
        for name, gradient in want["gradient"].items():
            size = float(gradient.abs().max())
            if size > 1e-6 * largest:  # the bias of the key projection has gradient 0 in exact arithmetic
                assert float((part["gradient"][name] - gradient).abs().max()) <= 2e-5 * size, name
    for name, weight in want["weights"].items():
        torch.testing.assert_close(parts[0]["weights"][name], weight, rtol=0, atol=1e-5)
