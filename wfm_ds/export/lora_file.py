"""Reads LoRA files in the layouts of diffusers, PEFT, kohya and ComfyUI, and converts layer names to diffusers'.

A key consists of a prefix, the name of a layer and a suffix. All three differ between tools. The scale is in the file
header (diffusers), in adapter_config.json (PEFT) or in `.alpha` tensors (kohya, ComfyUI). lora_layouts.py writes these
layouts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.export.lora_layers import LoraLayer, LoraLayers, layer_alpha, layer_rank, row_norms, split_layer
from wfm_ds.export.weights import LORA_FILES, LORA_FOLDER, LORA_PREFIX, METADATA_KEY, WHOLE_LAYER_FILES
from wfm_ds.models.assets.loading import read_json
from wfm_ds.models.lora_layer_names import LoraNameTable

ADAPTER_CONFIG = "adapter_config.json"
PEFT_FILE = "adapter_model.safetensors"
DOTTED_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    *(f"{part}." for part in LORA_FILES),
)
TEXT_PREFIXES = ("lora_te", "text_encoder")
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
TENSOR_KEY = re.compile(
    r"(?P<module>.+?)\.(?:(?P<matrix>lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight"
    r"|(?P<other>alpha|dora_scale|lora_magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
MATRICES = {"lora_A": "A", "lora_down": "A", "lora_B": "B", "lora_up": "B"}
WeightReader = Callable[[str], Tensor]  # reads the weight of a base layer, by its diffusers name


class LoraSource:
    """Tensor source for exports that reads a LoRA from disk. The LoRA has one file per denoiser component."""

    uses_lora = True

    def __init__(
        self, path: Path, table: LoraNameTable | None = None, weight: Callable[[str], WeightReader] | None = None
    ) -> None:
        """Read a LoRA.

        path: a LoRA file, or a folder that contains one.
        table: layer names of the model family. If it is None, the file must use diffusers' names.
        weight: function that maps a denoiser component to its `WeightReader`. Required if the file has a `dora_scale`.
        Raises ModelError if `path` is not a LoRA, or if the table lacks a layer of the LoRA.
        """
        self.path = path
        files = find_lora_files(path)
        self.parts = tuple(files)
        self.config = _read_config(path)
        self.layers: dict[str, LoraLayers] = {}
        self.whole_layers: dict[str, dict[str, Tensor]] = {}
        for part, file in files.items():
            tensors, header = read_tensors(file)
            settings = header or self.config
            layers, whole_layers = _parse_layers(
                tensors, file, settings, table, None if weight is None else weight(part)
            )
            self.layers[part] = layers
            whole_layer_file = file.parent / WHOLE_LAYER_FILES[part]
            self.whole_layers[part] = whole_layers | (
                read_tensors(whole_layer_file)[0] if whole_layer_file.is_file() else {}
            )

    @property
    def base_model(self) -> str | None:
        """Base model named in adapter_config.json, or None."""
        return None if self.config is None else self.config.get("base_model_name_or_path")

    @property
    def settings(self) -> dict[str, Any]:
        return lora_settings(self.layers, self.whole_layers, self.config)

    def summary(self) -> str:
        """Return a text with the number of layers, rank and alpha."""
        layers = [layer for part_layers in self.layers.values() for layer in part_layers.values()]
        ranks, alphas = ({getattr(layer, name) for layer in layers} for name in ("rank", "alpha"))
        rank, alpha = (f"{next(iter(v)):g}" if len(v) == 1 else f"{min(v):g} to {max(v):g}" for v in (ranks, alphas))
        return f"{len(layers)} layers, rank {rank}, alpha {alpha}"

    def bake_alpha(self) -> None:
        """Multiply all B by alpha / rank and set alpha to the rank. The weight updates do not change."""
        self.layers = {p: {n: layer.bake_alpha() for n, layer in layers.items()} for p, layers in self.layers.items()}

    def lora_config(self) -> Any:
        return peft.LoraConfig(**self.settings)

    def iter_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            for name, tensor in self.part_tensors(part):
                yield name if len(self.parts) == 1 else f"{part}.{name}", tensor

    def part_tensors(self, part: str) -> Iterator[tuple[str, Tensor]]:
        yield from iter_lora_tensors(self.layers[part], self.whole_layers[part])


def iter_lora_tensors(layers: LoraLayers, whole_layers: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (engine parameter name, tensor) for a LoRA, in the format of TensorSource.iter_full_tensors."""
    for module, layer in layers.items():
        yield f"{module}.lora_A.weight", layer.A
        yield f"{module}.lora_B.weight", layer.B
        if layer.magnitude is not None:
            yield f"{module}.lora_magnitude_vector.weight", layer.magnitude
    for name, tensor in whole_layers.items():
        module, _, kind = name.rpartition(".")
        yield f"{module}.modules_to_save.{kind}", tensor


def lora_settings(
    parts: Mapping[str, LoraLayers], whole_layers: Mapping[str, Mapping[str, Tensor]], config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the settings of the peft.LoraConfig for these layers. Other valid settings are copied from `config`.

    The most frequent rank and alpha become the defaults. Layers with different values get entries in rank_pattern and
    alpha_pattern.
    """
    layers = {name: layer for part_layers in parts.values() for name, layer in part_layers.items()}
    (rank, alpha), _ = Counter((layer.rank, layer.alpha) for layer in layers.values()).most_common(1)[0]
    known_settings = {k: v for k, v in (config or {}).items() if k in peft.LoraConfig.__dataclass_fields__}
    derived = {
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": False,  # already included in the alphas
        "use_dora": any(layer.magnitude is not None for layer in layers.values()),
        "rank_pattern": {name: layer.rank for name, layer in layers.items() if layer.rank != rank},
        "alpha_pattern": {name: layer.alpha for name, layer in layers.items() if layer.alpha != alpha},
        "modules_to_save": sorted({n.rpartition(".")[0] for of in whole_layers.values() for n in of}) or None,
    }
    return {"target_modules": sorted(layers)} | known_settings | derived


def find_lora_files(path: Path) -> dict[str, Path]:
    """Return {denoiser component: LoRA file} for a LoRA folder, an export or a LoRA file.

    Raises ModelError if there is no LoRA file.
    """
    if path.is_file():
        return {LORA_PREFIX: path}
    for folder in (path, path / LORA_FOLDER):
        files = {part: folder / name for part, name in LORA_FILES.items() if (folder / name).is_file()}
        if LORA_PREFIX in files:
            return files
        if (folder / PEFT_FILE).is_file():
            return {LORA_PREFIX: folder / PEFT_FILE}
        candidates = sorted(folder.glob("*.safetensors"))
        if len(candidates) == 1:
            return {LORA_PREFIX: candidates[0]}
    problem = "does not contain a LoRA" if path.is_dir() else "does not exist"
    raise ModelError(f"{path} {problem}; name a .safetensors file or an export such as safetensors/step_40")


def is_lora(path: Path) -> bool:
    """Return whether the path is a LoRA file, or a folder with a LoRA file and an adapter_config.json."""
    if path.is_file():
        return path.suffix == ".safetensors"
    names = (*LORA_FILES.values(), PEFT_FILE)
    return any(
        (folder / ADAPTER_CONFIG).is_file() and any((folder / name).is_file() for name in names)
        for folder in (path, path / LORA_FOLDER)
    )


def read_base_model(path: Path) -> str | None:
    """Return the base model named in adapter_config.json, or None.

    Raises ModelError if adapter_config.json lacks rank or alpha.
    """
    config = _read_config(path)
    return None if config is None else config.get("base_model_name_or_path")


def _read_config(path: Path) -> dict[str, Any] | None:
    """Return the content of the adapter_config.json next to the LoRA files.

    Returns None if there is no such file, or if `path` is a LoRA file with a non-standard name. Raises ModelError if
    rank or alpha is missing.
    """
    if path.is_file() and path.name not in (*LORA_FILES.values(), PEFT_FILE):
        return None
    folder = path.parent if path.is_file() else path
    for file in (folder / ADAPTER_CONFIG, folder / LORA_FOLDER / ADAPTER_CONFIG):
        if file.is_file():
            config = read_json(file)
            if missing := [name for name in ("r", "lora_alpha") if name not in config]:
                raise ModelError(f"{file} has no {' or '.join(missing)}; copy the LoRA again")
            return config
    return None


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return ({name: tensor}, adapter settings in the file's header or None).

    Raises ModelError if the file cannot be read.
    """
    try:
        with safe_open(file, "pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118, it is not a mapping
            header = (handle.metadata() or {}).get(METADATA_KEY)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({error}); copy the LoRA again") from error
    if header is None:
        return tensors, None
    settings = {k.removeprefix(f"{LORA_PREFIX}."): v for k, v in json.loads(header).items()}
    return tensors, settings if "lora_alpha" in settings else None


def _parse_layers(
    tensors: Mapping[str, Tensor],
    file: Path,
    settings: Mapping[str, Any] | None,
    table: LoraNameTable | None,
    weight: WeightReader | None,
) -> tuple[LoraLayers, dict[str, Tensor]]:
    """Return ({diffusers layer name: LoRA layer}, {name: tensor of a fully trained module}) for a file.

    Raises ModelError for unknown, incomplete or inconsistent layers.
    """
    groups, whole, unknown_keys = _group_tensors(tensors, settings)
    unknown = sorted({module for module in groups if not _diffusers_layers(module, table)} | unknown_keys)
    if unknown or not groups:
        raise ModelError(
            f"{file}: {len(unknown)} names are not layers of the denoiser "
            f"({', '.join(unknown[:3]) or 'it is empty'}): name the pipeline of the LoRA, or use a LoRA for "
            "this model"
        )
    layers: LoraLayers = {}
    for module, group in groups.items():
        if not {"A", "B"} <= group.keys():
            raise ModelError(f"{file}: {module} has only one of the two LoRA matrices ({', '.join(sorted(group))})")
        members = [name for name, _ in _diffusers_layers(module, table)]
        layer = _make_layer(group, _strip_prefixes(module), settings)
        _require_pair(layer, f"{file}: {module}")
        if (
            settings is not None
            and "alpha" not in group
            and layer.rank != layer_rank(settings, _strip_prefixes(module))
        ):
            settings_rank = layer_rank(settings, _strip_prefixes(module))
            raise ModelError(
                f"{file}: {module} has rank {layer.rank}, but its settings have {settings_rank}; copy the LoRA again"
            )
        parts = split_layer(layer, len(members)) if len(members) > 1 else [layer]
        part_layers = {name: part for name, part in zip(members, parts, strict=True) if part is not None}
        if "dora_scale" in group and not module.startswith(FLAT_PREFIXES):
            part_layers = {name: _convert_dora_scale(part, name, weight, file) for name, part in part_layers.items()}
        layers |= part_layers
    return layers, whole


def _group_tensors(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], set[str]]:
    """Group the tensors of a file by layer.

    Returns ({layer: {role: tensor}}, {name: tensor of a fully trained module}, unknown keys). Roles are A, B, alpha and
    others.
    """
    saved_modules = tuple((settings or {}).get("modules_to_save") or ())
    groups: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    unknown_keys: set[str] = set()
    for key, tensor in tensors.items():
        match = TENSOR_KEY.fullmatch(key)
        if match is not None:
            role = MATRICES.get(match["matrix"] or "", match["other"])
            groups.setdefault(match["module"], {})[role] = tensor
        elif _strip_prefixes(key).rpartition(".")[0].endswith(saved_modules or ("\0",)):
            whole[_strip_prefixes(key)] = tensor
        else:
            unknown_keys.add(key)
    return groups, whole, unknown_keys


def _strip_prefixes(name: str) -> str:
    for prefix in DOTTED_PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _diffusers_layers(module: str, table: LoraNameTable | None) -> list[tuple[str, object]]:
    """Return [(diffusers layer name, table entry or None)] for a layer of the file. Returns [] for an unknown layer.

    If a layer of the file fuses several diffusers layers, the list has an entry for each, in the order of the rows.
    """
    name = _strip_prefixes(module)
    if module.startswith(FLAT_PREFIXES):
        flat = next(module.removeprefix(prefix) for prefix in FLAT_PREFIXES if module.startswith(prefix))
        diffusers_name = None if table is None else table.find_diffusers(flat)
        return (
            []
            if table is None
            else [(diffusers_name, None)]
            if diffusers_name is not None
            else list(table.find_members(flat))
        )
    if module.startswith(TEXT_PREFIXES):
        return []
    if table is not None and (originals := table.find_members(name)):
        return list(originals)
    if "diffusion_model." in module and (table is None or table.find_original(name) is None):
        return []
    return [(name, None)]


def _make_layer(group: Mapping[str, Tensor], module: str, settings: Mapping[str, Any] | None) -> LoraLayer:
    """Build a LoRA layer.

    Alpha comes from the alpha tensor. Without this tensor it comes from the settings, and without settings it equals
    the rank.
    """
    A, B, rank = group["A"], group["B"], len(group["A"])
    if "alpha" in group:
        alpha = float(group["alpha"])
    else:
        alpha = float(rank) if settings is None else layer_alpha(settings, module, rank)
    magnitude = group.get("lora_magnitude_vector", group.get("dora_scale"))
    return LoraLayer(A, B, alpha, None if magnitude is None else magnitude.flatten())


def _require_pair(layer: LoraLayer, where: str) -> None:
    """Raise ModelError if the shapes of A and B do not match, or if the magnitude has the wrong number of values."""
    if layer.A.ndim < 2 or layer.B.ndim < 2 or layer.B.shape[1] != layer.rank:
        raise ModelError(f"{where}: A {list(layer.A.shape)} and B {list(layer.B.shape)} are not a LoRA pair")
    if layer.magnitude is not None and len(layer.magnitude) != len(layer.B):
        raise ModelError(f"{where}: its dora_scale is per input; only a scale per output is supported")


def _convert_dora_scale(layer: LoraLayer, name: str, weight: WeightReader | None, file: Path) -> LoraLayer:
    """Convert ComfyUI's DoRA scale to a DoRA magnitude, using the base weight W.

    ComfyUI multiplies the sum of W and its update by dora_scale / norm(W). DoRA divides by the norm of the sum instead
    (comfy/weight_adapter/base.py of 0.3.77).
    """
    assert layer.magnitude is not None
    if weight is None:
        raise ModelError(f"{file} has DoRA scales that depend on the base weights: name the pipeline with --base")
    base_weight = weight(name)
    return replace(
        layer, magnitude=layer.magnitude * row_norms(base_weight.float() + layer.delta()) / row_norms(base_weight)
    )
