"""Checks of one call of the denoiser, of its layers, and of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from torch import Tensor

from wfm_ds.contract.case import PROMPTS
from wfm_ds.contract.pixels import refused
from wfm_ds.contract.subject import Subject, require, require_close
from wfm_ds.engine.targets import adapted_names, for_peft
from wfm_ds.models.base import seeded
from wfm_ds.models.conditional_frames import MASK

if TYPE_CHECKING:
    from wfm_ds.models.base import DiffusionModel

WRONG: tuple[tuple[str, Callable[[Any, Any, Any], tuple[Any, Any, Any]], str], ...] = (
    ("sigma [2, 1]", lambda x, s, c: (x, s[:, None], c), "sigma must be float32"),
    ("sigma [1]", lambda x, s, c: (x, s[:1], c), "sigma must be float32"),
    ("a float64 sigma", lambda x, s, c: (x, s.double(), c), "sigma must be float32"),
    ("a sigma of 0", lambda x, s, c: (x, s * 0, c), "above 0"),
    ("a sigma above 1", lambda x, s, c: (x, s + 1, c), "at most 1"),
    ("a sigma of NaN", lambda x, s, c: (x, s * float("nan"), c), "at most 1"),
    ("bfloat16 latents", lambda x, s, c: (x.bfloat16(), s, c), "latents must be float32"),
    ("latents with an axis too many", lambda x, s, c: (x[..., None], s, c), "latents [B,C,"),
    ("an unknown key", lambda x, s, c: (x, s, {**c, "train_frames": s}), "train_frames"),
    ("a missing key", lambda x, s, c: (x, s, dict(list(c.items())[1:])), "conditioning must hold"),
    ("one row of text", lambda x, s, c: (x, s, {n: t[:1] for n, t in c.items()}), "has 1 rows, the latents have 2"),
)
"""Arguments of `denoise` that must be refused, how they are made of right ones, and words that the sentence has."""


def a_batch_is_its_samples(subject: Subject) -> None:
    """A batch of two, of unlike prompts and noise levels, equals the two alone."""
    model = subject.model
    latents, sigma, conditioning = subject.one_call(model)
    with torch.no_grad():
        batch = model.denoise(latents, sigma, conditioning)
        for i in range(2):
            row = {name: tensor[i : i + 1] for name, tensor in conditioning.items()} | model.encode_text([PROMPTS[i]])
            alone = model.denoise(latents[i : i + 1], sigma[i : i + 1], row)
            require_close(f"sample {i} of a batch", batch[i : i + 1], alone, subject.case.close)


def wrong_arguments(subject: Subject) -> None:
    """Arguments of `denoise` that are not as documented are refused with the name of what is wrong."""
    model = subject.model
    right = subject.one_call(model)
    for what, change, says in WRONG:
        refused(what, model.denoise, *change(*right), says=says)


def frames_given_to_others(subject: Subject) -> None:
    """Half of the tensors of given frames, or all for a family that takes none, are refused."""
    model = subject.model
    conditioning = model.encode_text(PROMPTS) | {MASK: torch.zeros(2, 1, 1, 1, 1)}
    says = "both of" if max(model.conditional_frames) else "must hold"
    refused("a mask without frames", model.denoise, subject.noise(), torch.ones(2), conditioning, says=says)


def texts_are_lists(subject: Subject) -> None:
    """No prompts, or a string in place of a list, are refused."""
    for what, prompts in (("an empty list", []), ("a string", "a red circle")):
        refused(what, subject.model.encode_text, prompts, says="list of at least one text")


def blocks(subject: Subject) -> None:
    """block_classes find the blocks: those that the network lists, where the case names the lists."""
    model, case = subject.model, subject.case
    found = [m for m in model.denoiser.modules() if isinstance(m, model.block_classes)]
    for kind in model.block_classes:
        require(any(isinstance(block, kind) for block in found), f"the denoiser has no {kind.__name__}")
    if case.blocks:
        networks = [getattr(model.pipeline, part) for part in model.denoiser_parts]
        listed = [block for network in networks for name in case.blocks for block in getattr(network, name)]
        require(found == listed, f"{len(found)} blocks of block_classes are not the {len(listed)} that are listed")


def tokens(subject: Subject) -> None:
    """num_tokens is a whole number that grows with the area."""
    model, frames = subject.model, subject.size[2]
    side = 2 * model.size_multiple(frames)  # patches may overhang the smallest size
    few, more = (model.num_tokens(model.latent_shape(side * n, side, frames)) for n in (1, 2))
    require(isinstance(few, int) and few > 0, f"num_tokens gives {few!r}")
    require(more == 2 * few, f"num_tokens gives {few}, and {more} for twice the height")


def lora_and_checkpointing(subject: Subject) -> None:
    """LoRA reaches every target, and recomputed activations change no gradient."""
    model = subject.fresh()
    for target in model.default_lora_targets:
        require(bool(adapted_names(model.denoiser, [target])), f"no linear layer's name ends with {target}")
    add_adapter(model, b_std=0.3)
    plain, recomputed = (gradients(subject, model, checkpointing=on) for on in (False, True))
    for name in plain:
        reachable = not any(layer in name for layer in subject.case.without_gradient)
        reached = float(plain[name].abs().max()) > 0
        is_so = "has a gradient" if reached else "gets no gradient"
        listed = "is in the case's without_gradient" if not reachable else "is not in the case's without_gradient"
        require(reached == reachable, f"{name} {is_so}, and {listed}")
        require_close(f"the recomputed gradient of {name}", recomputed[name], plain[name], 1e-9, rtol=1e-6)


def add_adapter(model: DiffusionModel, b_std: float) -> None:
    """Add LoRA of rank 2, alpha 6 to the family's targets; B random of this deviation."""
    module: Any = model.denoiser
    targets = for_peft(module, model.default_lora_targets)
    module.requires_grad_(False)
    with seeded(0), torch.no_grad():
        module.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights="gaussian"))
        for name, weight in module.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, b_std)


def gradients(subject: Subject, model: DiffusionModel, *, checkpointing: bool) -> dict[str, Tensor]:
    """Gradients of a loss on each expert, by name; 0 where autograd gives none."""
    for part in model.denoiser_parts:
        getattr(model.pipeline, part).gradient_checkpointing = False
    module: Any = model.denoiser
    if checkpointing:
        module.enable_gradient_checkpointing()
    module.zero_grad(set_to_none=True)
    for expert in range(len(model.sigma_ranges)):
        torch.autograd.backward(model.denoise(*subject.one_call(model, expert=expert)).square().mean())
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}
