"""Learning rate and EMA decay as functions of the update. An update is an optimizer step that was applied."""

from __future__ import annotations

import math

from wfm_ds.recipe.sections import OptimizerRecipe


def learning_rate(recipe: OptimizerRecipe, update: int, total_updates: int) -> float:
    """Return the learning rate of update 1, 2, ..., total_updates.

    Warm-up is linear, from 0 at update 0 to lr at update `warmup_steps`. Then the linear and cosine schedules decay
    from lr to final_lr_fraction * lr at the last update. Without warm-up, the decay starts at the first update.
    """
    if update < recipe.warmup_steps:
        return recipe.lr * update / recipe.warmup_steps
    peak = max(recipe.warmup_steps, 1)
    progress = min(1.0, (update - peak) / max(total_updates - peak, 1))
    falling = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}
    floor = 1.0 if recipe.schedule == "constant" else recipe.final_lr_fraction
    return recipe.lr * (floor + (1.0 - floor) * falling[recipe.schedule])


def ema_decay(largest: float, update: int) -> float:
    """Return the EMA decay after update 1, 2, ...: min((1 + update) / (10 + update), largest)."""
    return min((1 + update) / (10 + update), largest)
