"""Writes a LoRA in the layouts of other tools: kohya, ComfyUI and PEFT. docs/exports.md lists these tools."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.export.lora_file import PEFT_FILE, LoraSource, WeightReader, iter_lora_tensors
from wfm_ds.export.lora_layers import LoraLayer, LoraLayers, broadcast_rows, fuse_layers, is_same_update, row_norms
from wfm_ds.export.weights import ADAPTER_CONFIG, LORA_PREFIX, diffusers_name
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.lora_layer_names import LoraNameTable
from wfm_ds.storage import atomic

EXPERT_SUFFIXES = {"transformer": "high_noise", "transformer_2": "low_noise"}  # in file names


def write_layout(
    source: LoraSource,
    out: Path,
    layout: str,
    family: type[DiffusionModel],
    *,
    bake_alpha: bool,
    weight: Callable[[str], WeightReader] | None = None,
) -> list[Path]:
    """Write a LoRA to the .safetensors file `out`, in the layout `kohya` or `comfyui`. Return the written files.

    A two-expert model gets two files, and their names contain the names of the experts.
    weight: function that maps a denoiser component to its `WeightReader`. Required for DoRA in ComfyUI.
    Raises ModelError for layers that have no name in the layout, and for fully trained modules, which these layouts do
    not support. Raises OSError if writing fails.
    """
    if any(source.whole_layers.values()):
        raise ModelError(
            f"{source.path} has fully trained layers (lora.modules_to_save), which layout {layout} does not "
            "support: convert it with --merge, or write the layout diffusers or peft"
        )
    files = expert_files(out, list(source.layers))
    for part, layers in source.layers.items():
        read_weight = None if weight is None else weight(part)
        written_layers = {name: layer.bake_alpha() for name, layer in layers.items()} if bake_alpha else layers
        if layout == "kohya":
            tensors = kohya_tensors(written_layers, family)
        else:
            tensors = comfyui_tensors(written_layers, family, read_weight)
        if bake_alpha:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
        with atomic.new_file(files[part]) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
            written = LoraSource(temporary, LoraNameTable(family.lora_layer_names), _for_any_part(read_weight))
            if not is_same_update(layers, written.layers[LORA_PREFIX]):
                raise ModelError(
                    f"{files[part]}: layout {layout} cannot represent the update of {source.path}: not written"
                )
    return list(files.values())


def _for_any_part(weight: WeightReader | None) -> Callable[[str], WeightReader] | None:
    return None if weight is None else lambda part: weight


def expert_files(out: Path, parts: list[str]) -> dict[str, Path]:
    """Return {component: output file}. A single component gets the file `out`.

    With two experts, file names end with `_high_noise` and `_low_noise`.
    """
    if len(parts) == 1:
        return {parts[0]: out}
    return {part: out.with_name(f"{out.stem}_{EXPERT_SUFFIXES[part]}{out.suffix}") for part in parts}


def kohya_tensors(layers: LoraLayers, family: type[DiffusionModel]) -> dict[str, Tensor]:
    """Return {key: tensor} in kohya's layout, with the tensors down, up and alpha of each layer.

    A key starts with `lora_unet_`, followed by the layer's name with underscores instead of dots. The name is that of
    the original (non-diffusers) model, or diffusers' name if kohya's trainer for the family uses diffusers' names. The
    DoRA magnitude is stored as `dora_scale` [outputs, 1], as in LyCORIS.
    """
    _require_original_names(layers, family)
    named = layers if family.kohya_uses_diffusers_names else _original_layers(layers, family)
    tensors: dict[str, Tensor] = {}
    for module, layer in named.items():
        tensors |= layer_tensors(layer, "lora_unet_" + module.replace(".", "_"), ("lora_down", "lora_up"))
    return tensors


def comfyui_tensors(layers: LoraLayers, family: type[DiffusionModel], weight: WeightReader | None) -> dict[str, Tensor]:
    """Return {key: tensor} in ComfyUI's layout, with the tensors A, B and alpha of each layer.

    Keys use diffusers' layer names if ComfyUI supports them for the family, and otherwise names of the original
    (non-diffusers) model. DoRA is stored as `dora_scale` [outputs, 1], which ComfyUI divides by the norm of the base
    weight.
    """
    if any(layer.magnitude is not None for layer in layers.values()):
        layers = {name: _convert_to_comfyui_scale(layer, name, weight) for name, layer in layers.items()}
    _require_original_names(layers, family)
    named = layers if family.comfyui_prefix == LORA_PREFIX else _original_layers(layers, family)
    tensors: dict[str, Tensor] = {}
    for module, layer in named.items():
        tensors |= layer_tensors(layer, f"{family.comfyui_prefix}.{module}", ("lora_A", "lora_B"))
    return tensors


def layer_tensors(layer: LoraLayer, key: str, matrices: tuple[str, str]) -> dict[str, Tensor]:
    """Return {key: tensor} for one layer. key: layer name in the file. matrices: names of A and B in the file."""
    tensors = {
        f"{key}.{matrices[0]}.weight": float_copy(layer.A),
        f"{key}.{matrices[1]}.weight": float_copy(layer.B),
        f"{key}.alpha": torch.tensor(layer.alpha),
    }
    if layer.magnitude is not None:
        tensors[f"{key}.dora_scale"] = float_copy(broadcast_rows(layer.magnitude, layer.A))
    return tensors


def _convert_to_comfyui_scale(layer: LoraLayer, name: str, weight: WeightReader | None) -> LoraLayer:
    if layer.magnitude is None:
        return layer
    if weight is None:
        raise ModelError("DoRA in ComfyUI depends on the base weights: name the pipeline with --base")
    base_weight = weight(name)
    return replace(
        layer, magnitude=layer.magnitude * row_norms(base_weight) / row_norms(base_weight.float() + layer.delta())
    )


def _original_layers(layers: LoraLayers, family: type[DiffusionModel]) -> LoraLayers:
    """Convert diffusers layers to layers of the original (non-diffusers) model, which may fuse several of them."""
    table = LoraNameTable(family.lora_layer_names)
    groups: dict[str, dict[int, LoraLayer]] = defaultdict(dict)
    sizes: dict[str, tuple[int, ...]] = {}
    for module, layer in layers.items():
        original = table.find_original(module)
        assert original is not None
        groups[original[0]][original[1].index] = layer
        sizes[original[0]] = original[1].slice_sizes
    return {
        module: group[0]
        if len(sizes[module]) == 1
        else fuse_layers([group.get(index) for index in range(len(sizes[module]))], sizes[module])
        for module, group in groups.items()
    }


def _require_original_names(layers: LoraLayers, family: type[DiffusionModel]) -> None:
    table = LoraNameTable(family.lora_layer_names)
    if unknown := [module for module in layers if table.find_original(module) is None]:
        raise ModelError(
            f"{len(unknown)} layers of the LoRA have no name in the original {family.family} "
            f"({', '.join(unknown[:3])}): convert it to the layout peft or diffusers"
        )


def write_peft(source: LoraSource, folder: Path) -> None:
    """Write a folder for peft.PeftModel.from_pretrained. A two-expert model gets one subfolder per expert."""
    for part in source.layers:
        part_folder = folder if len(source.layers) == 1 else folder / part
        part_folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"base_model.model.{diffusers_name(name).replace('.modules_to_save.', '.')}": float_copy(tensor)
            for name, tensor in iter_lora_tensors(source.layers[part], source.whole_layers[part])
        }
        save_file(tensors, part_folder / PEFT_FILE, metadata={"format": "pt"})
        atomic.write_text(
            part_folder / ADAPTER_CONFIG,
            json.dumps(source.settings | {"peft_type": "LORA"}, indent=2, sort_keys=True) + "\n",
        )


def float_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous().clone()
