"""Build the optimizer of the trained parameters, and convert its states for checkpoints.

Checkpoints store the states of every optimizer in AdamW's format: the number `step`, and `exp_avg` and `exp_avg_sq`,
float32 with one element per master weight. Checkpoints of an 8-bit optimizer also store the scale of each element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor, nn
from torch.nn import functional

from wfm_ds.engine.optional_packages import require_package
from wfm_ds.recipe.sections import OptimizerRecipe
from wfm_ds.types import DEFAULT_ADAPTER

MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2}  # named state1 and state2 in bitsandbytes
SCALE_SUFFIX = ".scale"  # suffix of a moment's name
STATE_BLOCK = 256  # state elements per scale in bitsandbytes
NO_OPTIONS: Mapping[str, OptimizerRecipe] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ExtraAdapter:
    """Learning rate (constant) and betas of an adapter that is trained in addition to `default`.

    All other optimizer settings come from the recipe section `optimizer`.
    """

    lr: float
    betas: tuple[float, float]

    def optimizer_options(self, options: OptimizerRecipe) -> OptimizerRecipe:
        own = {"lr": self.lr, "betas": self.betas, "warmup_steps": 0, "schedule": "constant"}
        return options.model_copy(update=own)


def build_optimizer(
    denoiser: nn.Module,
    options: OptimizerRecipe,
    device: torch.device,
    extra_options: Mapping[str, OptimizerRecipe] = NO_OPTIONS,
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer for all trained parameters. Raises RecipeError if its package is not installed.

    extra_options: {name of an extra adapter: its options}. With extra adapters, the result is an AdapterwiseOptimizer.
    """
    settings: dict[str, Any] = options.model_dump(include={"lr", "betas", "eps", "weight_decay"})
    if options.name == "adamw":
        optimizer_class, settings["fused"] = torch.optim.AdamW, should_use_fused(device)
    else:
        require_package("bitsandbytes", "optimizer.name: adamw8bit")
        import bitsandbytes

        optimizer_class = bitsandbytes.optim.AdamW8bit
    trained = {name: parameter for name, parameter in denoiser.named_parameters() if parameter.requires_grad}
    if not extra_options:
        return optimizer_class(trained.values(), **settings)
    groups = [
        {
            "params": [parameter for name, parameter in trained.items() if f".{adapter}." in name],
            **{"adapter": adapter, "lr": own.lr, "betas": own.betas},
        }
        for adapter, own in {DEFAULT_ADAPTER: options, **extra_options}.items()
    ]
    adapterwise_class: type[torch.optim.Optimizer] = type(
        f"Adapterwise{optimizer_class.__name__}", (AdapterwiseOptimizer, optimizer_class), {}
    )
    ZERO_SUPPORTED_OPTIMIZERS.append(adapterwise_class)  # otherwise DeepSpeed warns that the optimizer is untested
    return adapterwise_class(groups, **settings)


class AdapterwiseOptimizer(torch.optim.Optimizer):
    """Mixin for an optimizer with one parameter group per adapter. Its `step` changes only the active adapter.

    A learning rate of 0 for the other adapters would not be enough, because their moments and step counts would change.
    """

    active_adapter = DEFAULT_ADAPTER

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["adapter"] == self.active_adapter]
        try:
            return super().step(closure) if self.param_groups else None
        finally:
            self.param_groups = groups


def should_use_fused(device: torch.device) -> bool | None:
    """Return AdamW's argument `fused`: True on a GPU; None on a CPU, because fused CPU kernels round differently."""
    return True if device.type == "cuda" else None


def read_states(optimizer: torch.optim.Optimizer, flat: Tensor) -> dict[str, Tensor]:
    """Return {name of the state in AdamW: tensor} for one master tensor, or {} before the first optimizer step.

    AdamW's states are not copied. The states of other optimizers are converted to float32 on the CPU.
    """
    state: dict[str, Any] = optimizer.state[flat]
    if "state1" not in state:
        return state
    states = {"step": torch.tensor(float(state["step"]))}
    for name, number in MOMENTS.items():
        values = state[f"state{number}"].cpu()
        # A scale of 0 means not quantised: bitsandbytes leaves small tensors in float32.
        scale = torch.zeros_like(values, dtype=torch.float32)
        if values.dtype == torch.uint8:
            values, scale = decode_blocks(values, state[f"absmax{number}"].cpu(), state[f"qmap{number}"].cpu())
        states |= {name: values, name + SCALE_SUFFIX: scale}
    return states


def write_states(optimizer: torch.optim.Optimizer, flat: Tensor, states: Mapping[str, Tensor]) -> None:
    """Set the optimizer states of one master tensor. states: result of `read_states` for the same elements."""
    state = optimizer.state[flat]
    if "fused" in optimizer.defaults:
        on_device = optimizer.defaults["fused"]  # fused AdamW keeps the step counter on the device of the weights
        state |= {name: value.to(flat.device) if value.ndim or on_device else value for name, value in states.items()}
        return
    group = optimizer.param_groups[0]
    # ZeRO-3 gives the optimizer one master tensor at a time, and only during a step
    group_params, group["params"] = group["params"], [flat]
    optimizer.init_state(group, flat, 0, 0)  # type: ignore[attr-defined]
    group["params"] = group_params
    state["step"] = int(states["step"])
    for name, number in MOMENTS.items():
        values = states[name]
        if f"absmax{number}" in state:
            values, absmax = encode_blocks(values, states[name + SCALE_SUFFIX], state[f"qmap{number}"].cpu())
            state[f"absmax{number}"].copy_(absmax)
        state[f"state{number}"].copy_(values)


def decode_blocks(codes: Tensor, absmax: Tensor, code_book: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantise 8-bit optimizer states. Returns (values, scales), both float32 with one element per code.

    codes: 1D tensor. absmax: one scale per block. code_book: ascending numbers from -1 to 1, indexed by the codes.
    """
    scale = absmax.repeat_interleave(STATE_BLOCK)[: len(codes)]
    return code_book[codes.int()] * scale, scale


def encode_blocks(values: Tensor, scale: Tensor, code_book: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise optimizer states to 8 bits, the inverse of `decode_blocks`. Returns (codes, one scale per block).

    values: 1D tensor. scale: previous scale of each element, or 0 for an element without one. If all previous scales in
    a block are equal, the block keeps this scale. Otherwise, its scale is the largest magnitude of its values.
    """
    missing = -len(values) % STATE_BLOCK
    rows, scales = (functional.pad(x, (0, missing)).view(-1, STATE_BLOCK) for x in (values, scale))
    highest = scales.amax(1)
    lowest = torch.where(scales > 0, scales, torch.inf).amin(1)
    absmax = torch.where(highest == lowest, highest, rows.abs().amax(1))
    middles = (code_book[1:] + code_book[:-1]) / 2
    fractions = rows / absmax.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    return torch.bucketize(fractions, middles).to(torch.uint8).view(-1)[: len(values)], absmax


def accumulate_in_float32(ds: Any) -> None:
    """Make the ZeRO stage 1 optimizer accumulate gradients in float32. Call it before the first backward pass."""
    optimizer = ds.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.partition_gradients:
        raise TypeError(f"{type(optimizer).__name__} is not the optimizer of ZeRO stage 1")
    optimizer.gradient_accumulation_dtype = torch.float32
    optimizer.use_separate_grad_accum = optimizer.use_grad_accum_attribute = True
    for group in optimizer.bit16_groups:
        for parameter in group:
            parameter.grad_accum = None
    if not optimizer._grad_acc_hooks:  # the constructor creates them only for some settings of the JSON
        optimizer.create_gradient_handling_hooks()
