"""A LoRA written in the key layouts of other tools: kohya, ComfyUI and PEFT. Diffusers' own is export.py's.

What reads what, as their sources say, is in docs/exports.md. Each file is read back and compared before it is kept.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from wfm_ds.checkpoint.export import LORA_PREFIX, diffusers_name
from wfm_ds.checkpoint.lora_file import ADAPTER_CONFIG, PEFT_FILE, LoraSource, Weight, named_tensors
from wfm_ds.checkpoint.lora_layers import LoraLayer, LoraLayers, by_row, fused, row_norms, same
from wfm_ds.errors import ModelError
from wfm_ds.models.lora_names import Names
from wfm_ds.storage import atomic

NOISE = {"transformer": "high_noise", "transformer_2": "low_noise"}  # experts, as files for ComfyUI call them


def write_layout(
    source: LoraSource,
    out: Path,
    layout: str,
    names: Names,
    *,
    bake_alpha: bool,
    weight: Callable[[str], Weight] | None = None,
) -> list[Path]:
    """Write a LoRA in the layout `kohya` or `comfyui` as `out`, a .safetensors file; two experts get two files, with
    their names in them. weight: of a part, the base's weights, for DoRA in ComfyUI. Returns the files. Raises
    ModelError for layers that the layout has no names for, and for modules that trained whole, which it has no place
    for; OSError."""
    if any(source.saved.values()):
        raise ModelError(
            f"{source.path} has layers that trained whole (lora.modules_to_save), which layout {layout} has no place "
            "for: convert it with --merge, or write the layout diffusers or peft"
        )
    files = expert_files(out, list(source.layers))
    for part, layers in source.layers.items():
        of_part = None if weight is None else weight(part)
        shown = {name: layer.baked() for name, layer in layers.items()} if bake_alpha else layers
        tensors = kohya(shown, names) if layout == "kohya" else comfyui(shown, names, of_part)
        if bake_alpha:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
        with atomic.new_file(files[part]) as making:
            save_file(tensors, making, metadata={"format": "pt"})
            back = LoraSource(making, names.table, _always(of_part)).layers[LORA_PREFIX]
            if not same(layers, back):
                raise ModelError(f"{files[part]}: the layout {layout} cannot say what {source.path} adds: not written")
    return list(files.values())


def _always(weight: Weight | None) -> Callable[[str], Weight] | None:
    """The base's weights for a file alone, whichever part it is of."""
    return None if weight is None else lambda part: weight


def expert_files(out: Path, parts: list[str]) -> dict[str, Path]:
    """The file of each part: `out` itself, or for two experts `NAME_high_noise` and `NAME_low_noise`."""
    if len(parts) == 1:
        return {parts[0]: out}
    return {part: out.with_name(f"{out.stem}_{NOISE[part]}{out.suffix}") for part in parts}


def kohya(layers: LoraLayers, names: Names) -> dict[str, Tensor]:
    """`lora_unet_` and the original's name with underscores; down, up and alpha. DoRA as LyCORIS has it: the magnitude
    as `dora_scale` [out, 1]."""
    tensors: dict[str, Tensor] = {}
    for module, layer in originals(layers, names).items():
        tensors |= of_layer(layer, "lora_unet_" + module.replace(".", "_"), ("lora_down", "lora_up"))
    return tensors


def comfyui(layers: LoraLayers, names: Names, weight: Weight | None) -> dict[str, Tensor]:
    """The names that ComfyUI maps onto the family's model: diffusers' own where it has a table of them, else the
    original's; A, B and alpha. DoRA: `dora_scale` [out, 1], which it divides by the norms of W alone."""
    if any(layer.magnitude is not None for layer in layers.values()):
        layers = {name: _with_comfyui_scale(layer, name, weight) for name, layer in layers.items()}
    of_diffusers = names.comfyui_prefix == LORA_PREFIX
    if of_diffusers:
        _require_known(layers, names)
    tensors: dict[str, Tensor] = {}
    for module, layer in (layers if of_diffusers else originals(layers, names)).items():
        tensors |= of_layer(layer, f"{names.comfyui_prefix}.{module}", ("lora_A", "lora_B"))
    return tensors


def of_layer(layer: LoraLayer, key: str, matrices: tuple[str, str]) -> dict[str, Tensor]:
    """The tensors of a layer where each has its own alpha. matrices: the names of A and B."""
    tensors = {
        f"{key}.{matrices[0]}.weight": stored(layer.A),
        f"{key}.{matrices[1]}.weight": stored(layer.B),
        f"{key}.alpha": torch.tensor(layer.alpha),
    }
    if layer.magnitude is not None:
        tensors[f"{key}.dora_scale"] = stored(by_row(layer.magnitude, layer.A))
    return tensors


def _with_comfyui_scale(layer: LoraLayer, name: str, weight: Weight | None) -> LoraLayer:
    if layer.magnitude is None:
        return layer
    if weight is None:
        raise ModelError("DoRA in ComfyUI depends on the base's weights: name the pipeline by --base")
    own = weight(name)
    return replace(layer, magnitude=layer.magnitude * row_norms(own) / row_norms(own.float() + layer.delta()))


def originals(layers: LoraLayers, names: Names) -> LoraLayers:
    """The layers as the original has them. Raises ModelError for those that its table does not name."""
    _require_known(layers, names)
    groups: dict[str, dict[int, LoraLayer]] = defaultdict(dict)
    shares: dict[str, int] = {}
    for module, layer in layers.items():
        found = names.table.original(module)
        assert found is not None
        groups[found[0]][found[1].place] = layer
        shares[found[0]] = found[1].shares
    return {
        module: group[0] if shares[module] == 1 else fused([group.get(place) for place in range(shares[module])])
        for module, group in groups.items()
    }


def _require_known(layers: LoraLayers, names: Names) -> None:
    if unknown := [module for module in layers if names.table.original(module) is None]:
        raise ModelError(
            f"{len(unknown)} layers of the LoRA have no name in the original {names.family} here "
            f"({', '.join(unknown[:3])}): convert it to the layout peft or diffusers"
        )


def write_peft(source: LoraSource, folder: Path) -> None:
    """Write a folder that peft.PeftModel.from_pretrained loads onto the bare network; of two experts a folder each."""
    for part in source.layers:
        inside = folder if len(source.layers) == 1 else folder / part
        inside.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"base_model.model.{diffusers_name(name).replace('.modules_to_save.', '.')}": stored(tensor)
            for name, tensor in named_tensors(source.layers[part], source.saved[part])
        }
        save_file(tensors, inside / PEFT_FILE, metadata={"format": "pt"})
        atomic.write_text(inside / ADAPTER_CONFIG, _json(source.settings | {"peft_type": "LORA"}))


def stored(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous().clone()


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"
