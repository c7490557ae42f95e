"""The ways to run a recipe that are compared: a name, and what it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wfm_ds.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Changes to a recipe, each of which turns one lever, or several of them."""

    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


COMPILED, VAE, MERGED = "engine.compile=true", "model.vae_dtype=bfloat16", "rollout.merge_lora=true"
GRAPH = "rollout.cuda_graph=true"
GUIDED = "sampling.guidance_scale=4.5"

VARIANTS: Mapping[str, Variant] = {
    "as shipped": Variant(),
    "native attention": Variant(overrides=("model.attention=native",)),
    "cudnn attention": Variant(overrides=("model.attention=cudnn",)),
    "flash attention": Variant(overrides=("model.attention=flash",)),
    "torch operators": Variant(environment={"WFM_KERNELS": "torch"}),
    "compiled": Variant(overrides=(COMPILED,)),
    "vae bfloat16": Variant(overrides=(VAE,)),
    "merged lora": Variant(overrides=(MERGED,)),
    "cuda graph": Variant(overrides=(GRAPH,)),
    "guided": Variant(overrides=(GUIDED,)),
    "guided at once": Variant(overrides=(GUIDED, "sampling.guidance_batch=joint")),
    "deterministic": Variant(overrides=("engine.deterministic=true",)),
    "sft levers": Variant(overrides=(COMPILED, VAE)),
    "nft levers": Variant(overrides=(COMPILED, VAE, MERGED, GRAPH)),
    "grpo levers": Variant(overrides=(COMPILED, VAE, GRAPH)),
}
# What is compared for each recipe of a day, the line of a call by line; the rest would change nothing there.
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


def chosen(names: str) -> dict[str, Variant]:
    """The variants of a comma-separated list; UserError for a name that there is not."""
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in VARIANTS]
    if unknown:
        raise UserError(f"no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    return {name: VARIANTS[name] for name in wanted}
