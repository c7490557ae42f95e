"""Loads the LoRA from which a run starts (lora.init_from) and the LoRAs of teachers, and checks that they fit."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from wfm_ds.engine.adapter_layers import match_linear_layers
from wfm_ds.errors import ModelError, RecipeError
from wfm_ds.export.lora_base import base_weight_readers
from wfm_ds.export.lora_file import LoraSource, iter_lora_tensors
from wfm_ds.export.lora_layers import LoraLayer, LoraLayers
from wfm_ds.export.target import ExportTarget
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.lora_layer_names import LoraNameTable
from wfm_ds.recipe.algorithms import INITIAL_LORA, TeacherSettings
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import LoraRecipe

log = logging.getLogger(__name__)


def load_initial_lora(recipe: Recipe, model: DiffusionModel) -> dict[str, Tensor] | None:
    """Return {engine parameter name: tensor} of the LoRA in lora.init_from, or None if it is unset.

    model: the loaded model, before an engine changes its denoiser. Layers without tensors in the file are omitted.
    Raises ModelError if the file cannot be read or does not fit the model, and RecipeError if its adapter settings
    differ from the recipe.
    """
    lora = recipe.lora
    if lora is None or lora.init_from is None:
        return None
    target = ExportTarget(model.path, tuple(model.denoiser_components))
    source = read_fitting_lora(recipe, model, lora.init_from, f"lora.init_from {lora.init_from}")
    start: dict[str, Tensor] = {}
    for part in source.parts:
        layers, saved = source.layers[part], source.whole_layers[part]
        _require_same_adapter(layers, saved, lora)
        start |= {target.tensor_prefix(part) + name: tensor for name, tensor in iter_lora_tensors(layers, saved)}
    return start


def load_teachers(recipe: Recipe, model: DiffusionModel) -> dict[str, dict[str, Tensor]]:
    """Return {policy: {engine parameter name: tensor}} of the teachers that have a LoRA.

    Each LoRA is converted to the recipe's rank and scale. model: the loaded model, before an engine changes its
    denoiser. Raises ModelError if a LoRA cannot be read or is for another base model, and RecipeError if it does not
    fit the recipe.
    """
    teachers = {}
    for policy, teacher in recipe.algorithm.list_lora_teachers().items():
        if teacher.weights == INITIAL_LORA:
            initial = load_initial_lora(recipe, model)
            assert initial is not None, "the recipe has lora.init_from"
            teachers[policy] = initial
        else:
            teachers[policy] = load_teacher_lora(recipe, model, teacher)
    return teachers


def load_teacher_lora(recipe: Recipe, model: DiffusionModel, teacher: TeacherSettings) -> dict[str, Tensor]:
    lora, what = recipe.lora, f"teacher {teacher.weights}"
    assert lora is not None, "the recipe has a LoRA"
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


def read_fitting_lora(recipe: Recipe, model: DiffusionModel, path: Path, what: str) -> LoraSource:
    """Read a LoRA and check that the run adapts all of its layers.

    what: name of the LoRA in messages. model: the loaded model, before an engine changes its denoiser. Raises
    ModelError if the LoRA cannot be read or is for another base model, and RecipeError if it has layers that are not in
    lora.target_modules.
    """
    parts, targets = tuple(model.denoiser_components), recipe.lora and recipe.lora.target_modules
    source = LoraSource(path, LoraNameTable(model.lora_layer_names), base_weight_readers(model.path))
    if source.parts != parts:
        raise ModelError(
            f"{what} is a LoRA for {' and '.join(source.parts)}, {model.path} has {' and '.join(parts)}: set an export "
            "folder with a file for each"
        )
    for part in parts:
        layers, network = source.layers[part], getattr(model.pipeline, part)
        _require_same_shapes(layers, source.whole_layers[part], network, what, model.path)
        adapted = set(match_linear_layers(network, targets or model.default_lora_targets))
        if unexpected := sorted(layers.keys() - adapted):
            raise RecipeError(
                f"{what} has {len(unexpected)} layers that are not in lora.target_modules "
                f"({', '.join(unexpected[:3])}): add them there"
            )
        log.info("%s: %d layers loaded, %d initialized", what, len(layers), len(adapted - layers.keys()))
    return source


def _require_same_adapter(layers: LoraLayers, saved: dict[str, Tensor], lora: LoraRecipe) -> None:
    ranks, alphas = ({getattr(layer, name) for layer in layers.values()} for name in ("rank", "alpha"))
    if len(ranks) > 1 or len(alphas) > 1:
        raise RecipeError(
            f"lora.init_from {lora.init_from} has different ranks or alphas per layer, a run supports only one: merge "
            "it into the model (wfm convert --merge), or use another LoRA"
        )
    rank, alpha = ranks.pop(), alphas.pop()
    effective_alpha = lora.alpha * lora.rank**0.5 if lora.rslora else lora.alpha
    if (lora.rank, effective_alpha) != (rank, alpha):
        recipe_alpha = alpha / rank**0.5 if lora.rslora else alpha
        raise RecipeError(
            f"lora.rank {lora.rank} and lora.alpha {lora.alpha:g}, but {lora.init_from} has rank {rank} and alpha "
            f"{recipe_alpha:g}: change them"
        )
    if lora.dora != any(layer.magnitude is not None for layer in layers.values()):
        has = "has no magnitudes (DoRA)" if lora.dora else "is a DoRA"
        raise RecipeError(
            f"lora.dora: {str(lora.dora).lower()}, but {lora.init_from} {has}: set it to {str(not lora.dora).lower()}"
        )
    suffixes = tuple(lora.modules_to_save)
    if unexpected := [name for name in saved if not name.rpartition(".")[0].endswith(suffixes or ("\0",))]:
        raise RecipeError(
            f"lora.init_from {lora.init_from} has {unexpected[0]} of a fully trained layer: add it to "
            "lora.modules_to_save"
        )


def _require_same_shapes(
    layers: LoraLayers, saved: dict[str, Tensor], network: nn.Module, what: str, base: Path
) -> None:
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    file_shapes = {f"{name}.weight": layer.weight_shape for name, layer in layers.items()}
    file_shapes |= {name: tensor.shape for name, tensor in saved.items()}
    wrong = [name for name, shape in file_shapes.items() if shapes.get(name) != shape]
    if wrong:
        first = wrong[0]
        expected = f"has {list(shapes[first])}" if first in shapes else "has no such layer"
        raise ModelError(
            f"{what} is for another base: {len(wrong)} of its {len(file_shapes)} layers do not fit, "
            f"e.g. {first} {list(file_shapes[first])}, but {base} {expected}"
        )
