"""Variants of a recipe to compare: names, and their changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wfm_ds.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeVariant:
    """Changes to a recipe that turn on one or several optimizations."""

    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


COMPILED, VAE, MERGED = "engine.compile=true", "model.vae_dtype=bfloat16", "rollout.merge_lora=true"
GRAPH = "rollout.cuda_graph=true"
GUIDED = "sampling.guidance_scale=4.5"

VARIANTS: Mapping[str, RecipeVariant] = {
    "as shipped": RecipeVariant(),
    "native attention": RecipeVariant(overrides=("model.attention=native",)),
    "cudnn attention": RecipeVariant(overrides=("model.attention=cudnn",)),
    "flash attention": RecipeVariant(overrides=("model.attention=flash",)),
    "torch operators": RecipeVariant(environment={"WFM_KERNELS": "torch"}),
    "compiled": RecipeVariant(overrides=(COMPILED,)),
    "vae bfloat16": RecipeVariant(overrides=(VAE,)),
    "merged lora": RecipeVariant(overrides=(MERGED,)),
    "cuda graph": RecipeVariant(overrides=(GRAPH,)),
    "guided": RecipeVariant(overrides=(GUIDED,)),
    "guided at once": RecipeVariant(overrides=(GUIDED, "sampling.guidance_batch=joint")),
    "deterministic": RecipeVariant(overrides=("engine.deterministic=true",)),
    "sft levers": RecipeVariant(overrides=(COMPILED, VAE)),
    "nft levers": RecipeVariant(overrides=(COMPILED, VAE, MERGED, GRAPH)),
    "grpo levers": RecipeVariant(overrides=(COMPILED, VAE, GRAPH)),
}
# Variants that a day compares for each recipe. Each inner tuple is one line of a call. Other variants would not change
# these recipes.
LEVERS = {"sd3_image_sft_lora": "sft levers", "sd3_nft": "nft levers", "sd3_flow_grpo": "grpo levers"}
COMMON = ("native attention", "cudnn attention", "flash attention", "torch operators")
COMPARED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "sd3_nft": (
        ("as shipped", *COMMON, "vae bfloat16"),
        ("compiled", "merged lora", "cuda graph", "nft levers"),
        ("guided", "guided at once", "deterministic"),
    ),
    "sd3_flow_grpo": (("as shipped", *COMMON), ("compiled", "vae bfloat16", "cuda graph", "grpo levers")),
}


def select_variants(names: str) -> dict[str, RecipeVariant]:
    """Return the variants of a comma-separated list. Raises UserError for an unknown name."""
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in VARIANTS]
    if unknown:
        raise UserError(f"unknown variant {', '.join(unknown)}; available: {', '.join(VARIANTS)}")
    return {name: VARIANTS[name] for name in wanted}
