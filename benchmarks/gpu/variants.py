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


AS_SHIPPED = "as shipped"
COMPILED, VAE, MERGED = "engine.compile=true", "model.vae_dtype=bfloat16", "rollout.merge_lora=true"
GRAPH = "rollout.cuda_graph=true"
GUIDED = "sampling.guidance_scale=4.5"

VARIANTS: Mapping[str, RecipeVariant] = {
    AS_SHIPPED: RecipeVariant(),
    "native attention": RecipeVariant(overrides=("model.attention=native",)),
    "cudnn attention": RecipeVariant(overrides=("model.attention=cudnn",)),
    "flash attention": RecipeVariant(overrides=("model.attention=flash",)),
    "torch operators": RecipeVariant(environment={"WFM_KERNELS": "torch"}),
    "compiled": RecipeVariant(overrides=(COMPILED,)),
    "vae bfloat16": RecipeVariant(overrides=(VAE,)),
    "merged lora": RecipeVariant(overrides=(MERGED,)),
    "cuda graph": RecipeVariant(overrides=(GRAPH,)),
    "fused norms": RecipeVariant(overrides=("engine.fused_norms=true",)),
    "guided": RecipeVariant(overrides=(GUIDED,)),
    "guided at once": RecipeVariant(overrides=(GUIDED, "sampling.guidance_batch=joint")),
    "deterministic": RecipeVariant(overrides=("engine.deterministic=true",)),
    "nft levers": RecipeVariant(overrides=(COMPILED, VAE, MERGED, GRAPH)),
    "grpo levers": RecipeVariant(overrides=(COMPILED, VAE, GRAPH)),
}
# Variants that a day compares for each recipe. Each inner tuple is one line. Variants that compile have a line of their
# own, which starts with the compile cache of an earlier line. Other variants would not change these recipes.
LEVERS = {"sd3_nft": "nft levers", "sd3_flow_grpo": "grpo levers"}
ATTENTION = ("native attention", "cudnn attention")
COMPARED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "sd3_nft": (
        (AS_SHIPPED, "fused norms", "merged lora", "cuda graph", *ATTENTION, "vae bfloat16"),
        ("flash attention", "torch operators", "guided", "guided at once", "deterministic"),
        ("nft levers", "compiled"),
    ),
    "sd3_flow_grpo": (
        (AS_SHIPPED, "fused norms", *ATTENTION, "cuda graph", "vae bfloat16"),
        ("flash attention", "torch operators"),
        ("grpo levers", "compiled"),
    ),
}


def select_variants(names: str) -> dict[str, RecipeVariant]:
    """Return the variants of a comma-separated list. Raises UserError for an unknown name."""
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in VARIANTS]
    if unknown:
        raise UserError(f"unknown variant {', '.join(unknown)}; available: {', '.join(VARIANTS)}")
    return {name: VARIANTS[name] for name in wanted}
