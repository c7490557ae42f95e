"""Reads LoRA files in the layouts of diffusers, PEFT, kohya and ComfyUI, and converts layer names to diffusers' names.

Alpha is in the file header (diffusers), in adapter_config.json (PEFT) or in `.alpha` tensors (kohya, ComfyUI).
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
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.export.lora_layers import LoraLayer, LoraLayers, row_norms, split_layer
from wfm_ds.export.lora_settings import check_settings, layer_alpha, layer_rank, select_layers
from wfm_ds.export.weights import ADAPTER_CONFIG, LORA_FILES, LORA_FOLDER, LORA_PREFIX, METADATA_KEY, WHOLE_LAYER_FILES
from wfm_ds.models.lora_layer_names import LoraNameTable
from wfm_ds.storage.filesystem import read_regular, shorten_error, shorten_path

PEFT_FILE = "adapter_model.safetensors"
DOTTED_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    *(f"{part}." for part in LORA_FILES),
)
MAX_NAME_CHARS = 200  # maximum length of a tensor name; the longest names of real models have about 100 characters
TENSOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TEXT_PREFIXES = ("lora_te", "text_encoder")
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
TENSOR_KEY = re.compile(
    r"(?P<module>.+?)\.(?:(?P<matrix>lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight"
    r"|(?P<other>alpha|dora_scale|lora_magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
LAYER_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")
MATRICES = {"lora_A": "A", "lora_down": "A", "lora_B": "B", "lora_up": "B"}
WeightReader = Callable[[str], Tensor]  # reads the weight of a base layer, by its diffusers name


class LoraSource:
    """A LoRA on disk, with one file per denoiser component, as a source of tensors for exports."""

    uses_lora = True

    def __init__(
        self, path: Path, table: LoraNameTable | None = None, weight: Callable[[str], WeightReader] | None = None
    ) -> None:
        """Read a LoRA.

        path: a LoRA file, or a folder that contains one.
        table: layer names of the model family. None: the file must use diffusers' names.
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
            self.whole_layers[part] = whole_layers | read_whole_layers(file.parent, part)

    @property
    def settings(self) -> dict[str, Any]:
        return lora_settings(self.layers, self.whole_layers, self.config)

    def summary(self) -> str:
        layers = [layer for part_layers in self.layers.values() for layer in part_layers.values()]
        ranks, alphas = ({getattr(layer, name) for layer in layers} for name in ("rank", "alpha"))
        rank, alpha = (f"{next(iter(v)):g}" if len(v) == 1 else f"{min(v):g} to {max(v):g}" for v in (ranks, alphas))
        return f"{len(layers)} layers, rank {rank}, alpha {alpha}"

    def bake_alpha(self) -> None:
        """Multiply all matrices B by alpha / rank and set alpha to the rank, without changing the weight updates."""
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
    """Yield (name, tensor) for each tensor of a LoRA, with the names that TensorSource.iter_full_tensors uses."""
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
    """Return the settings for a peft.LoraConfig that describes these layers.

    Settings that the layers do not determine are copied from `config`.
    """
    layers = {name: layer for part_layers in parts.values() for name, layer in part_layers.items()}
    (rank, alpha), _ = Counter((layer.rank, layer.alpha) for layer in layers.values()).most_common(1)[0]
    derived = {
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": False,  # the alphas already include the scale of rsLoRA
        "use_dora": any(layer.magnitude is not None for layer in layers.values()),
        "rank_pattern": {name: layer.rank for name, layer in layers.items() if layer.rank != rank},
        "alpha_pattern": {name: layer.alpha for name, layer in layers.items() if layer.alpha != alpha},
        "modules_to_save": sorted({n.rpartition(".")[0] for of in whole_layers.values() for n in of}) or None,
    }
    return select_layers(config or {}, layers) | derived


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
    """Return the base model that adapter_config.json names, or None. Raises ModelError if the settings are invalid."""
    config = _read_config(path)
    return None if config is None else config.get("base_model_name_or_path")


def _read_config(path: Path) -> dict[str, Any] | None:
    """Return the content of the adapter_config.json next to the LoRA files.

    Returns None if there is no such file, or if `path` is a LoRA file with a non-standard name. Raises ModelError if
    the settings are invalid.
    """
    if path.is_file() and path.name not in (*LORA_FILES.values(), PEFT_FILE):
        return None
    folder = path.parent if path.is_file() else path
    for file in (folder / ADAPTER_CONFIG, folder / LORA_FOLDER / ADAPTER_CONFIG):
        if file.exists():
            try:
                return parse_settings(read_regular(file).decode(), str(file))
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"{file} cannot be read ({error}); copy the LoRA again") from error
    return None


def parse_settings(text: str, source: str, prefix: str = "") -> dict[str, Any]:
    """Return the PEFT settings in a JSON text. Raises ModelError if they are invalid.

    source: file that contains the text, for messages. prefix: prefix to remove from the names of the settings.
    """
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = shorten_path(str(error))
        raise ModelError(f"{source}: its LoRA settings are not JSON ({reason}); copy the LoRA again") from error
    if isinstance(settings, dict):
        settings = {name.removeprefix(prefix): value for name, value in settings.items()}
        if "lora_alpha" not in settings and prefix:
            return {}
    return check_settings(settings, source)


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return ({name: tensor}, adapter settings). The settings are None if the file's header contains none.

    Raises ModelError if the file cannot be read, or if a tensor is empty, not finite or not floating point.
    """
    try:
        with safe_open(file, "pt") as handle:
            names = handle.keys()
            if long := [name for name in names if len(name) > MAX_NAME_CHARS]:
                raise ModelError(f"{file}: {shorten_path(long[0])} is too long for the name of a layer")
            tensors = {name: handle.get_tensor(name) for name in names}
            header = (handle.metadata() or {}).get(METADATA_KEY)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({shorten_error(error)}); copy the LoRA again") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in TENSOR_DTYPES or (tensor.numel() == 0 or not tensor.isfinite().all()):
            raise ModelError(
                f"{file}: {shorten_path(name)} ({tensor.dtype} {list(tensor.shape)}) is empty, not finite or not a "
                "float; copy the LoRA again"
            )
    return tensors, None if header is None else parse_settings(header, str(file), f"{LORA_PREFIX}.") or None


def read_whole_layers(folder: Path, part: str) -> dict[str, Tensor]:
    """Return {name: tensor} of a component's fully trained layers (modules_to_save) in a LoRA folder.

    Raises ModelError if the file cannot be read, or if a tensor is empty, not finite or not floating point.
    """
    file = folder / WHOLE_LAYER_FILES[part]
    return read_tensors(file)[0] if file.is_file() else {}


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
            f"({', '.join(map(shorten_path, unknown[:3])) or 'it is empty'}): name the pipeline of the LoRA, or use a "
            "LoRA for this model"
        )
    layers: LoraLayers = {}
    for module, group in groups.items():
        where = f"{file}: {shorten_path(module)}"
        members = _diffusers_layers(module, table)
        layer = _make_layer(group, _strip_prefixes(module), settings, where)
        sizes = (1,) if table is None else table.find_slice_sizes(members[0])
        parts = split_layer(layer, sizes) if len(members) > 1 else [layer]
        part_layers = {name: part for name, part in zip(members, parts, strict=True) if part is not None}
        if layers.keys() & part_layers.keys():
            raise ModelError(f"{where}: the file has this layer twice; copy the LoRA again")
        if "dora_scale" in group and not module.startswith(FLAT_PREFIXES):
            part_layers = {name: _convert_dora_scale(part, name, weight, file) for name, part in part_layers.items()}
        layers |= part_layers
    return layers, whole


def _group_tensors(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], set[str]]:
    """Return ({layer: {role: tensor}}, {name: tensor of a fully trained module}, unknown keys) for a file.

    A role is, for example, A, B or alpha.
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


def _diffusers_layers(module: str, table: LoraNameTable | None) -> list[str]:
    """Return the diffusers layers in a layer of the file, in the order of output rows, or [] for an unknown layer."""
    name = _strip_prefixes(module)
    if module.startswith(FLAT_PREFIXES):
        flat = next(module.removeprefix(prefix) for prefix in FLAT_PREFIXES if module.startswith(prefix))
        return [] if table is None else table.find_flat_members(flat)
    if module.startswith(TEXT_PREFIXES):
        return []
    if table is not None and (members := table.find_members(name)):
        return members
    if not LAYER_NAME.fullmatch(name):
        return []
    if "diffusion_model." in module and (table is None or table.find_original(name) is None):
        return []
    return [name]


def _make_layer(group: Mapping[str, Tensor], module: str, settings: Mapping[str, Any] | None, where: str) -> LoraLayer:
    """Build a LoRA layer from {role: tensor}. Raises ModelError if the tensors do not form a LoRA layer."""
    if not {"A", "B"} <= group.keys():
        raise ModelError(f"{where} has only one of the two LoRA matrices ({', '.join(sorted(group))})")
    A, B = group["A"], group["B"]
    if A.ndim < 2 or B.ndim != A.ndim or B.shape[1] != len(A):
        raise ModelError(f"{where}: A {list(A.shape)} and B {list(B.shape)} are not a LoRA pair")
    rank, alpha_tensor = len(A), group.get("alpha")
    if alpha_tensor is not None and alpha_tensor.numel() != 1:
        raise ModelError(f"{where}: alpha must be one number, got {list(alpha_tensor.shape)}")
    if settings is not None and alpha_tensor is None and rank != (settings_rank := layer_rank(settings, module)):
        raise ModelError(f"{where} has rank {rank}, but rank {settings_rank} in its settings; copy the LoRA again")
    settings_alpha = float(rank) if settings is None else layer_alpha(settings, module, rank)
    magnitude = group.get("lora_magnitude_vector", group.get("dora_scale"))
    if magnitude is not None and magnitude.numel() != len(B):
        raise ModelError(f"{where}: its dora_scale is per input; only a scale per output is supported")
    alpha = settings_alpha if alpha_tensor is None else float(alpha_tensor)
    return LoraLayer(A, B, alpha, None if magnitude is None else magnitude.flatten())


def _convert_dora_scale(layer: LoraLayer, name: str, weight: WeightReader | None, file: Path) -> LoraLayer:
    """Convert ComfyUI's DoRA scale to a DoRA magnitude, using the base weight W.

    ComfyUI multiplies W + update by dora_scale / norm(W). DoRA multiplies W + update by magnitude / norm(W + update).
    Source: comfy/weight_adapter/base.py of ComfyUI 0.3.77.
    """
    assert layer.magnitude is not None
    if weight is None:
        raise ModelError(f"{file} has DoRA scales that depend on the base weights: name the pipeline with --base")
    base_weight = weight(name)
    return replace(
        layer, magnitude=layer.magnitude * row_norms(base_weight.float() + layer.delta()) / row_norms(base_weight)
    )
