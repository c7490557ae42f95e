"""Checks of the denoiser: calls, layers and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from wfm_ds.contract.case import PROMPTS
from wfm_ds.contract.family_under_test import FamilyUnderTest, fail_unless, require_close
from wfm_ds.contract.pixel_checks import require_value_error
from wfm_ds.engine.adapter_layers import match_linear_layers, peft_targets
from wfm_ds.engine.checkpointing import enable_checkpointing
from wfm_ds.models.base import DiffusionModel, temporary_seed
from wfm_ds.models.conditioning_frames import MASK_KEY
from wfm_ds.recipe.shared_defaults import Checkpointing

MAX_NAMES_SHOWN = 3  # maximum number of parameter names in a message

INVALID_ARGUMENTS: tuple[tuple[str, Callable[[Any, Any, Any], tuple[Any, Any, Any]]], ...] = (
    ("sigma [2, 1]", lambda x, s, c: (x, s[:, None], c)),
    ("sigma [1]", lambda x, s, c: (x, s[:1], c)),
    ("a float64 sigma", lambda x, s, c: (x, s.double(), c)),
    ("a sigma of 0", lambda x, s, c: (x, s * 0, c)),
    ("a sigma above 1", lambda x, s, c: (x, s + 1, c)),
    ("a sigma of NaN", lambda x, s, c: (x, s * float("nan"), c)),
    ("bfloat16 latents", lambda x, s, c: (x.bfloat16(), s, c)),
    ("latents with one axis too many", lambda x, s, c: (x[..., None], s, c)),
    ("an unknown key", lambda x, s, c: (x, s, {**c, "train_frames": s})),
    ("a missing key", lambda x, s, c: (x, s, dict(list(c.items())[1:]))),
    ("one row of text", lambda x, s, c: (x, s, {n: t[:1] for n, t in c.items()})),
)
"""[(description, function)]. Each function makes invalid arguments of `denoise` from valid arguments."""


def check_batch_matches_samples(subject: FamilyUnderTest) -> None:
    """Check that denoising two different samples in one batch equals denoising each sample alone."""
    model = subject.model
    latents, sigma, conditioning = subject.denoise_arguments(model)
    with torch.no_grad():
        batch = model.denoise(latents, sigma, conditioning)
        for i in range(2):
            row = {name: tensor[i : i + 1] for name, tensor in conditioning.items()}
            row |= subject.encode_texts(model, [PROMPTS[i]], subject.sample_inputs()[i : i + 1])
            single = model.denoise(latents[i : i + 1], sigma[i : i + 1], row)
            require_close(f"sample {i} of a batch", batch[i : i + 1], single, subject.case.tolerance)


def check_invalid_arguments(subject: FamilyUnderTest) -> None:
    """Check that `denoise` raises ValueError for each of the INVALID_ARGUMENTS."""
    model = subject.model
    valid = subject.denoise_arguments(model)
    for description, change in INVALID_ARGUMENTS:
        require_value_error(description, model.denoise, *change(*valid))


def check_unsupported_frames(subject: FamilyUnderTest) -> None:
    """Check that `denoise` rejects a conditioning frame mask without conditioning latents."""
    model = subject.model
    conditioning = subject.encode_texts(model, PROMPTS) | {MASK_KEY: torch.zeros(2, 1, 1, 1, 1)}
    require_value_error("a mask without frames", model.denoise, subject.initial_noise(), torch.ones(2), conditioning)


def check_prompt_lists(subject: FamilyUnderTest) -> None:
    """Check that `encode_text` rejects an empty list, and a string instead of a list."""
    subject.require_texts_without_images()
    for description, prompts in (("an empty list", []), ("a string", "a red circle")):
        require_value_error(description, subject.model.encode_text, prompts)


def check_block_classes(subject: FamilyUnderTest) -> None:
    """Check that the denoiser contains modules of each class in `block_classes`.

    If the case has `block_lists`, the modules of these classes must be exactly the modules in the lists.
    """
    model, case = subject.model, subject.case
    matches = [m for m in model.denoiser.modules() if isinstance(m, model.block_classes)]
    for block_class in model.block_classes:
        fail_unless(any(isinstance(m, block_class) for m in matches), f"the denoiser has no {block_class.__name__}")
    if case.block_lists:
        networks = [getattr(model.pipeline, part) for part in model.denoiser_components]
        listed_blocks = [block for network in networks for name in case.block_lists for block in getattr(network, name)]
        fail_unless(
            matches == listed_blocks,
            f"{len(matches)} modules match block_classes, but the block lists have {len(listed_blocks)}",
        )


def check_num_tokens(subject: FamilyUnderTest) -> None:
    """Check that num_tokens returns a positive integer that doubles if the height doubles."""
    model, frames = subject.model, subject.size[2]
    side = 2 * model.size_multiple(frames)  # the smallest size may be less than one patch
    num_small, num_large = (model.num_tokens(model.latent_shape(side * n, side, frames)) for n in (1, 2))
    fail_unless(isinstance(num_small, int) and num_small > 0, f"num_tokens returns {num_small!r}")
    fail_unless(num_large == 2 * num_small, f"num_tokens returns {num_small}, but {num_large} for twice the height")


def check_lora_and_checkpointing(subject: FamilyUnderTest) -> None:
    """Check that each LoRA target matches a layer, and that gradient checkpointing does not change gradients."""
    model = subject.load_model()
    for target in model.default_lora_targets:
        fail_unless(bool(match_linear_layers(model.denoiser, [target])), f"no linear layer's name ends with {target}")
    add_random_adapter(model, b_std=0.3)
    plain, recomputed, partly_recomputed = (
        compute_gradients(subject, model, checkpointing=setting) for setting in (False, True, "attention")
    )
    for name in plain:
        is_unused = f"{name.split('.lora_')[0]}.weight" in subject.model.find_unused_parameters()
        has_gradient = float(plain[name].abs().max()) > 0
        verb, verdict = "has a" if has_gradient else "has no", "matches" if is_unused else "does not match"
        fail_unless(
            has_gradient != is_unused,
            f"{name} {verb} gradient, but its layer {verdict} unused_parameter_patterns",
        )
        require_close(f"the gradient of {name} with checkpointing", recomputed[name], plain[name], 1e-9, rtol=1e-6)
        fail_unless(
            torch.equal(partly_recomputed[name], recomputed[name]),
            f"the gradient of {name} changes with gradient_checkpointing: attention",
        )


def check_unused_parameters(subject: FamilyUnderTest) -> None:
    """Check that unused_parameter_patterns match exactly the parameters that have no gradient in full training."""
    model = subject.load_model()
    model.denoiser.requires_grad_(True)
    used = {name for name, gradient in compute_gradients(subject, model, checkpointing=False).items() if gradient.any()}
    ignored = subject.case.zero_gradient_parameters
    names = {n for n, _ in model.denoiser.named_parameters() if not any(layer in n for layer in ignored)}
    unused = model.find_unused_parameters()
    _require_no_names("have no gradient but do not match unused_parameter_patterns", names - used - unused)
    _require_no_names("have a gradient but match unused_parameter_patterns", used & unused)


def _require_no_names(problem: str, names: set[str] | frozenset[str]) -> None:
    examples = ", ".join(sorted(names)[:MAX_NAMES_SHOWN])
    fail_unless(not names, f"{len(names)} parameters {problem}, e.g. {examples}")


def add_random_adapter(model: DiffusionModel, b_std: float) -> None:
    """Add LoRA (rank 2, alpha 6) to the family's default targets. The B matrices are random with std `b_std`."""
    module: Any = model.denoiser
    targets = peft_targets(module, model.default_lora_targets)
    module.requires_grad_(False)
    with temporary_seed(0), torch.no_grad():
        module.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights="gaussian"))
        for name, weight in module.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, b_std)


def compute_gradients(
    subject: FamilyUnderTest, model: DiffusionModel, *, checkpointing: Checkpointing
) -> dict[str, Tensor]:
    """Return {parameter name: gradient} of a loss that uses every expert. Parameters without a gradient get zeros."""
    for part in model.denoiser_components:
        getattr(model.pipeline, part).gradient_checkpointing = False
    module: Any = model.denoiser
    enable_checkpointing(module, checkpointing)
    module.zero_grad(set_to_none=True)
    for expert in range(len(model.sigma_ranges)):
        torch.autograd.backward(model.denoise(*subject.denoise_arguments(model, expert=expert)).square().mean())
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}
