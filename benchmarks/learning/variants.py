"""Recipes and overrides that the study compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
DIGITS = REPOSITORY / "recipes" / "digits"
PUBLISHED = Path(__file__).parent / "published"


@dataclass(frozen=True, slots=True)
class Variant:
    """An algorithm with its settings, and its title in tables and plots."""

    title: str
    recipe: Path
    overrides: tuple[str, ...] = ()
    data: str = "prompts"  # or images: the data folder of the run
    every: int = 3  # RL steps between evaluations
    starts: tuple[int, ...] = tuple(range(5))


# {seed of the SFT run that all algorithms start from: validation rewards to reach}
LEVELS: Mapping[int, tuple[float, ...]] = {0: (0.85, 0.90, 0.93)} | dict.fromkeys((1, 2, 3, 4), (0.76, 0.80, 0.85))
GOALS: Mapping[int, float] = {0: 0.93} | dict.fromkeys((1, 2, 3, 4), 0.76)
BASELINES = ("nft_published", "flow_grpo_published")

NFT = Variant("DiffusionNFT", DIGITS / "nft.yaml")
LEVELS_OF_NFT = "levels: stratified, num_levels: 2, updates_per_rollout: 2"
OF_THE_STUDY: Mapping[str, Variant] = {
    "nft_published": Variant("DiffusionNFT, published settings", PUBLISHED / "nft.yaml"),
    "nft_published_schedule": Variant(
        "DiffusionNFT, published settings with the optimizer of recipes/digits/nft.yaml",
        PUBLISHED / "nft.yaml",
        ("optimizer={lr: 6e-3, warmup_steps: 4, schedule: cosine, final_lr_fraction: 0.1}",),
    ),
    "flow_grpo_published": Variant("FlowGRPO, published settings", PUBLISHED / "flow_grpo.yaml"),
    "nft": NFT,
    "nft_10": replace(
        NFT,
        title="DiffusionNFT, rollouts of 10 steps",
        overrides=("sampling.steps=10", "sampling.grid=stock"),
    ),
    "awm": replace(
        NFT,
        title="AWM",
        # AWM collapses at DiffusionNFT's learning rate.
        overrides=(f"algorithm={{name: awm, kl_beta: 0, {LEVELS_OF_NFT}}}", "optimizer.lr=2e-3"),
        starts=(0,),
    ),
    "ram": replace(NFT, title="RAM", overrides=(f"algorithm={{name: ram, {LEVELS_OF_NFT}}}",), starts=(0,)),
    "flow_grpo_fast": Variant("FlowGRPO-Fast", DIGITS / "flow_grpo_fast.yaml", every=5, starts=(0,)),
    "ddrl": Variant("DDRL", DIGITS / "ddrl.yaml", data="images", every=8, starts=(0,)),
}

FP8 = "_fp8"
# Only run if selected by name: variants with a float8 base, to compare with the variants of the same name without it.
IN_FLOAT8: Mapping[str, Variant] = {
    f"{name}{FP8}": replace(
        OF_THE_STUDY[name],
        title=f"{OF_THE_STUDY[name].title}, base in float8",
        overrides=(*OF_THE_STUDY[name].overrides, "model.base_precision=fp8"),
        starts=(0,),
    )
    for name in ("nft", "flow_grpo_fast", "ddrl")
}
VARIANTS: Mapping[str, Variant] = {**OF_THE_STUDY, **IN_FLOAT8}
