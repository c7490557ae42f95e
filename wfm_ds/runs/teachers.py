"""Loads the LoRAs of the teachers in a distillation run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from torch import Tensor

from wfm_ds.errors import RecipeError
from wfm_ds.export.lora_file import iter_lora_tensors
from wfm_ds.export.lora_layers import LoraLayer
from wfm_ds.export.target import ExportTarget
from wfm_ds.models.base import DiffusionModel
from wfm_ds.recipe.algorithms import INITIAL_LORA, TeacherSettings
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import LoraRecipe
from wfm_ds.runs.initial_lora import load_initial_lora, read_fitting_lora


def load_teachers(recipe: Recipe, model: DiffusionModel) -> dict[str, dict[str, Tensor]]:
    """Return {policy: {engine parameter name: tensor}} of the teachers that have a LoRA.

    Each LoRA is converted to the recipe's rank and scale. model: the loaded model, before an engine changes its
    denoiser. Raises ModelError if a LoRA cannot be read or is for another base model, and RecipeError if it does not
    fit the recipe.
    """
    teachers = {}
    for policy, teacher in recipe.algorithm.list_lora_teachers().items():
        if teacher.weights == INITIAL_LORA:
            tensors = load_initial_lora(recipe, model)
            assert tensors is not None, "the recipe has lora.init_from"
        else:
            assert recipe.lora is not None, "the recipe has a LoRA"
            tensors = load_teacher_lora(recipe, recipe.lora, model, teacher)
        teachers[policy] = tensors
    return teachers


def load_teacher_lora(
    recipe: Recipe, lora: LoraRecipe, model: DiffusionModel, teacher: TeacherSettings
) -> dict[str, Tensor]:
    what = f"teacher {teacher.weights}"
    target = ExportTarget(model.path, tuple(model.denoiser_components))
    source = read_fitting_lora(recipe, model, Path(teacher.weights), what)
    tensors: dict[str, Tensor] = {}
    for part, layers in source.layers.items():
        if lora.dora or lora.modules_to_save or source.whole_layers[part]:
            raise RecipeError(f"{what}: teachers with a LoRA do not support lora.dora and lora.modules_to_save yet")
        if any(layer.magnitude is not None for layer in layers.values()):
            raise RecipeError(f"{what} is a DoRA, which teachers do not support: merge it into the model (wfm convert)")
        largest = max(layer.rank for layer in layers.values())
        if largest > lora.rank:
            raise RecipeError(f"{what} has rank {largest}, more than lora.rank {lora.rank}: raise lora.rank")
        scale = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
        fitted = {name: fit_rank(layer, lora.rank, scale) for name, layer in layers.items()}
        tensors |= {target.tensor_prefix(part) + name: tensor for name, tensor in iter_lora_tensors(fitted, {})}
    return tensors


def fit_rank(layer: LoraLayer, rank: int, scale: float) -> LoraLayer:
    """Return a layer with this rank and scale and the same weight change, scale * B @ A.

    rank: at least the layer's rank. The additional rows of A and columns of B are 0.
    """
    missing = rank - layer.rank
    B = layer.B if layer.scale == scale else layer.B * (layer.scale / scale)
    A = torch.cat([layer.A, layer.A.new_zeros(missing, *layer.A.shape[1:])])
    B = torch.cat([B, B.new_zeros(len(B), missing, *B.shape[2:])], dim=1)
    return dataclasses.replace(layer, A=A, B=B, alpha=scale * rank)
