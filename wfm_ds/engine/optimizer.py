"""The optimizer of all that trains, and its states in the one form that checkpoints hold, whatever it keeps them in.

That form is AdamW's own: `step`, a single number, and `exp_avg` and `exp_avg_sq`, float32, an element for each of the
master's, so that a checkpoint may be continued by ranks that cut the masters otherwise. Eight-bit states add a scale
for each element, from which the very codes come back wherever a block holds the elements that it held.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wfm_ds.engine.packages import require_package
from wfm_ds.recipe.sections import OptimizerRecipe

MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2}  # bitsandbytes calls them state1 and state2
SCALE = ".scale"  # after a moment's name
BLOCK = 256  # elements of a state with one scale, in bitsandbytes


def build_optimizer(denoiser: nn.Module, options: OptimizerRecipe, device: torch.device) -> torch.optim.Optimizer:
    """The recipe's optimizer of all that trains. On a GPU one kernel updates everything; elsewhere torch chooses.
    Raises RecipeError where its package is not installed."""
    trained = [parameter for parameter in denoiser.parameters() if parameter.requires_grad]
    settings: dict[str, Any] = {
        "lr": options.lr,
        "betas": options.betas,
        "eps": options.eps,
        "weight_decay": options.weight_decay,
    }
    if options.name == "adamw":
        return torch.optim.AdamW(trained, **settings, fused=fused(device))
    require_package("bitsandbytes", "optimizer.name: adamw8bit")
    import bitsandbytes

    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(trained, **settings)
    return optimizer


def fused(device: torch.device) -> bool | None:
    """The argument `fused` of torch's AdamW for a denoiser on this device. None on a CPU: fused arithmetic rounds
    otherwise there, and runs would not repeat those before."""
    return True if device.type == "cuda" else None


def shown_states(optimizer: torch.optim.Optimizer, flat: Tensor) -> dict[str, Tensor]:
    """The states of one master by AdamW's names; empty before the first step. AdamW's own are the very tensors; others
    are copies on the CPU."""
    state: dict[str, Any] = optimizer.state[flat]
    if "state1" not in state:
        return state
    shown = {"step": torch.tensor(float(state["step"]))}
    for name, number in MOMENTS.items():
        values = state[f"state{number}"].cpu()
        scale = torch.zeros_like(values, dtype=torch.float32)  # 0: not in codes, as the library leaves small tensors
        if values.dtype == torch.uint8:
            values, scale = decoded(values, state[f"absmax{number}"].cpu(), state[f"qmap{number}"].cpu())
        shown |= {name: values, name + SCALE: scale}
    return shown


def take_up_states(optimizer: torch.optim.Optimizer, flat: Tensor, saved: Mapping[str, Tensor]) -> None:
    """Give one master the states that `shown_states` gave for elements like its own."""
    state = optimizer.state[flat]
    if "fused" in optimizer.defaults:
        on_device = optimizer.defaults["fused"]  # then the count of steps lies beside the masters
        state |= {name: value.to(flat.device) if value.ndim or on_device else value for name, value in saved.items()}
        return
    group = optimizer.param_groups[0]
    held, group["params"] = group["params"], [flat]  # ZeRO-3 lends the optimizer one master at a time, and only to step
    optimizer.init_state(group, flat, 0, 0)  # type: ignore[attr-defined]
    group["params"] = held
    state["step"] = int(saved["step"])
    for name, number in MOMENTS.items():
        values = saved[name]
        if f"absmax{number}" in state:
            values, absmax = encoded(values, saved[name + SCALE], state[f"qmap{number}"].cpu())
            state[f"absmax{number}"].copy_(absmax)
        state[f"state{number}"].copy_(values)


def decoded(codes: Tensor, absmax: Tensor, code_book: Tensor) -> tuple[Tensor, Tensor]:
    """The values that codes [n] stand for, and the scale of each: float32 [n]. absmax: a scale for each block;
    code_book: ascending numbers from -1 to 1."""
    scale = absmax.repeat_interleave(BLOCK)[: len(codes)]
    return code_book[codes.int()] * scale, scale


def encoded(values: Tensor, scale: Tensor, code_book: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n] and the scale of each block, for values and their scales as `decoded` gave them. A block that holds
    elements of another one too is scaled anew, by its largest value. A scale of 0 belongs to nothing."""
    missing = -len(values) % BLOCK
    rows, scales = (functional.pad(x, (0, missing)).view(-1, BLOCK) for x in (values, scale))
    highest = scales.amax(1)
    lowest = torch.where(scales > 0, scales, torch.inf).amin(1)
    absmax = torch.where(highest == lowest, highest, rows.abs().amax(1))
    middles = (code_book[1:] + code_book[:-1]) / 2
    shares = rows / absmax.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    return torch.bucketize(shares, middles).to(torch.uint8).view(-1)[: len(values)], absmax
