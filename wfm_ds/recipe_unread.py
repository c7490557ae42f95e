"""Keys that a recipe sets and its algorithm or kind of data does not read. A key without effect is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wfm_ds.recipe import Recipe

OF_ROLLOUTS = ("solver", "noise_level", "window", "same_noise")
OF_PROMPT_SETS = ("name", "split")
OF_MEDIA = ("fps", "allow_repeats", "clip", "crop", "buckets", "max_upscale", "cache_latents")
OF_ASYNC = (
    "max_staleness",
    "spawn",
    "devices",
    "bind",
    "keys",
    "policy_folder",
    "in_flight",
    "lost_after_s",
    "timeout_s",
)
OF_HELD_OUT_MEDIA = ("path", "holdout", "num_images")


def unread_keys(recipe: Recipe) -> list[str]:
    """`section.key` of those that have another value than their default: a resolved recipe names all keys."""
    data = (*OF_MEDIA, "caption_dropout") if recipe.data.kind == "prompts" else OF_PROMPT_SETS
    unread = [("data", key) for key in data]
    if recipe.is_rl:
        unread += [("validation", key) for key in OF_HELD_OUT_MEDIA]
        unread += [("data", "caption_dropout")] if "caption_dropout" not in data else []
    else:
        unread += [("sampling", key) for key in OF_ROLLOUTS]
    return [f"{section}.{key}" for section, key in unread if getattr(recipe, section).changed(key)]


def unread_async_keys(recipe: Recipe) -> list[str]:
    """The same of the keys about workers that generate samples, where the training ranks do."""
    if recipe.rollout is None or recipe.is_async:
        return []
    return [f"rollout.{key}" for key in recipe.rollout.changed(*OF_ASYNC)]
