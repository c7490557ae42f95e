"""Check weight formats and trained weights across the sections model, lora, rollout and algorithm."""

from __future__ import annotations

from wfm_ds.recipe.algorithms.base import RecipeSections
from wfm_ds.recipe.sections import LoraRecipe


def check_weights(recipe: RecipeSections) -> None:
    if recipe.rollout is not None and recipe.rollout.merge_lora:
        _check_merge_lora(recipe)
    _check_base_precision(recipe)
    if recipe.lora is not None:
        _check_adapters(recipe, recipe.lora)
    if recipe.model.fp8_training is not None:
        _check_fp8_training(recipe)
    if recipe.model.denoiser_init == "random" and recipe.lora is not None:
        raise ValueError("model.denoiser_init: random trains all weights: remove the lora section")


def _check_merge_lora(recipe: RecipeSections) -> None:
    if recipe.lora is None:
        raise ValueError("rollout.merge_lora: without a lora section there is nothing to merge: remove the key")
    if recipe.rollout_precision is not None:
        raise ValueError(
            f"rollout.merge_lora: adapters cannot be merged into a base in {recipe.rollout_precision}: remove "
            "merge_lora or base_precision"
        )
    if recipe.rl.algorithm.compares_log_probs:
        raise ValueError(
            f"rollout.merge_lora: algorithm {recipe.algorithm.name} compares log-probabilities of rollouts and "
            "training, and merged weights round differently: remove the key"
        )


def _check_adapters(recipe: RecipeSections, lora: LoraRecipe) -> None:
    if lora.dropout and recipe.algorithm.is_rl and recipe.rl.algorithm.compares_log_probs:
        raise ValueError(
            f"lora.dropout: algorithm {recipe.algorithm.name} compares log-probabilities of rollouts and training, "
            "which dropout would change: remove the key"
        )
    if lora.dora and (recipe.model.base_precision or recipe.rollout_precision):
        raise ValueError("lora.dora needs the norms of the original weights: remove it or base_precision")
    whole = [key for key in ("dora", "modules_to_save") if getattr(lora, key)]
    if whole and recipe.rollout is not None and recipe.rollout.merge_lora:
        raise ValueError(f"rollout.merge_lora only merges plain adapters, not lora.{whole[0]}: remove one of the keys")


def _check_base_precision(recipe: RecipeSections) -> None:
    if recipe.model.base_precision is not None and recipe.lora is None:
        raise ValueError(
            f"model.base_precision: {recipe.model.base_precision} is only for a frozen base: add a lora section"
        )
    if recipe.rollout is None or recipe.rollout.base_precision is None:
        return
    if recipe.lora is None:
        raise ValueError(
            f"rollout.base_precision: {recipe.rollout.base_precision} is only for a frozen base: add a lora section, "
            "or remove the key"
        )
    if recipe.rollout.base_precision == "fp8_twice":
        raise ValueError("rollout.base_precision: fp8_twice is for backward passes, workers have none: set it to fp8")
    if recipe.rollout.base_precision == recipe.forward_precision:
        return
    if recipe.rl.algorithm.reads_rollout_log_probs(recipe.rl.rollout):
        raise ValueError(
            f"rollout.base_precision: algorithm {recipe.algorithm.name} compares log-probabilities of rollouts and "
            "training, which need the same base: set model.base_precision for both, or, for flow_grpo, "
            "algorithm.old_log_prob: recompute with rollout.max_staleness: 0"
        )


def _check_fp8_training(recipe: RecipeSections) -> None:
    if recipe.lora is not None:
        raise ValueError(
            "model.fp8_training is for training all weights: remove the lora section, or set model.base_precision: fp8 "
            "for the frozen base of a LoRA"
        )
    if recipe.model.fp8_training == "torchao":
        return
    if recipe.algorithm.is_rl or recipe.algorithm.reference_policies:
        raise ValueError(
            f"model.fp8_training: transformer_engine: algorithm {recipe.algorithm.name} compares predictions of "
            "different batch sizes, which differ with one scale per tensor: set it to torchao"
        )
    if recipe.engine.compile:
        raise ValueError(
            "model.fp8_training: transformer_engine has layers that torch cannot compile: remove engine.compile, or "
            "set it to torchao"
        )
