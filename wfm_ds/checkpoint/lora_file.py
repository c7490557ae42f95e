"""LoRA files of any origin, read into layers by diffusers' names: the layouts of diffusers, PEFT, kohya and ComfyUI.

A key is a prefix, the name of a layer and a suffix. Tools differ in all three, and in where the scale is: in the header
(diffusers), in adapter_config.json (PEFT) or in `.alpha` tensors (kohya, ComfyUI). How they are written is
lora_layouts.py.
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

from wfm_ds.checkpoint.export import LORA_FILES, LORA_FOLDER, LORA_PREFIX, METADATA, SAVED_FILES
from wfm_ds.checkpoint.lora_layers import LoraLayer, LoraLayers, alpha_of, rank_of, row_norms, split
from wfm_ds.errors import ModelError
from wfm_ds.models.loading import read_json
from wfm_ds.models.lora_names import NameTable

ADAPTER_CONFIG = "adapter_config.json"
PEFT_FILE = "adapter_model.safetensors"
DOTTED = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", *(f"{part}." for part in LORA_FILES))
OF_TEXT = ("lora_te", "text_encoder")
FLAT = ("lora_unet_", "lora_transformer_", "lycoris_")
KEY = re.compile(
    r"(?P<module>.+?)\.(?:(?P<matrix>lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight"
    r"|(?P<other>alpha|dora_scale|lora_magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
MATRICES = {"lora_A": "A", "lora_down": "A", "lora_B": "B", "lora_up": "B"}
Weight = Callable[[str], Tensor]  # of a layer of the base, by its name in diffusers


class LoraSource:
    """A LoRA on disk as an export's source. parts: of the denoiser, with a file each."""

    lora = True

    def __init__(
        self, path: Path, table: NameTable | None = None, weight: Callable[[str], Weight] | None = None
    ) -> None:
        """path: a file, or a folder with one. table: the names of the family that it is for; without, names must be
        those of diffusers. weight: of a part, the base's weights, which a `dora_scale` needs. Raises ModelError for
        what is no LoRA, or has layers that the table does not have."""
        self.path = path
        files = lora_files(path)
        self.parts = tuple(files)
        self.config = _config(path)
        self.layers: dict[str, LoraLayers] = {}
        self.saved: dict[str, dict[str, Tensor]] = {}
        for part, file in files.items():
            tensors, header = read_tensors(file)
            settings = header or self.config
            layers, rest = _layers(tensors, file, settings, table, None if weight is None else weight(part))
            self.layers[part] = layers
            beside = file.parent / SAVED_FILES[part]
            self.saved[part] = rest | (read_tensors(beside)[0] if beside.is_file() else {})

    @property
    def base(self) -> str | None:
        """The model that it says it is for."""
        return None if self.config is None else self.config.get("base_model_name_or_path")

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.layers, self.saved, self.config)

    def described(self) -> str:
        """Layers, rank and alpha in words."""
        layers = [layer for of_part in self.layers.values() for layer in of_part.values()]
        ranks, alphas = ({getattr(layer, name) for layer in layers} for name in ("rank", "alpha"))
        rank, alpha = (f"{next(iter(v)):g}" if len(v) == 1 else f"{min(v):g} to {max(v):g}" for v in (ranks, alphas))
        return f"{len(layers)} layers, rank {rank}, alpha {alpha}"

    def bake_alpha(self) -> None:
        """Multiply alpha / rank into B, so that alpha is the rank."""
        self.layers = {p: {n: layer.baked() for n, layer in layers.items()} for p, layers in self.layers.items()}

    def lora_config(self) -> Any:
        return peft.LoraConfig(**self.settings)

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            for name, tensor in self.tensors(part):
                yield name if len(self.parts) == 1 else f"{part}.{name}", tensor

    def tensors(self, part: str) -> Iterator[tuple[str, Tensor]]:
        """A part's tensors under the names that an engine gives them."""
        yield from named_tensors(self.layers[part], self.saved[part])


def named_tensors(layers: LoraLayers, saved: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name the tensors of a LoRA as an engine does (`named_full_tensors`)."""
    for module, layer in layers.items():
        yield f"{module}.lora_A.weight", layer.A
        yield f"{module}.lora_B.weight", layer.B
        if layer.magnitude is not None:
            yield f"{module}.lora_magnitude_vector.weight", layer.magnitude
    for name, tensor in saved.items():
        module, _, kind = name.rpartition(".")
        yield f"{module}.modules_to_save.{kind}", tensor


def settings_of(
    parts: Mapping[str, LoraLayers], saved: Mapping[str, Mapping[str, Tensor]], known: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The settings of the peft.LoraConfig that these layers are, what is already known of it kept. One rank and alpha
    for most layers, patterns for the others."""
    layers = {name: layer for of_part in parts.values() for name, layer in of_part.items()}
    (rank, alpha), _ = Counter((layer.rank, layer.alpha) for layer in layers.values()).most_common(1)[0]
    kept = {k: v for k, v in (known or {}).items() if k in peft.LoraConfig.__dataclass_fields__}
    own = {
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": False,  # the alphas have it
        "use_dora": any(layer.magnitude is not None for layer in layers.values()),
        "rank_pattern": {name: layer.rank for name, layer in layers.items() if layer.rank != rank},
        "alpha_pattern": {name: layer.alpha for name, layer in layers.items() if layer.alpha != alpha},
        "modules_to_save": sorted({n.rpartition(".")[0] for of in saved.values() for n in of}) or None,
    }
    return {"target_modules": sorted(layers)} | kept | own


def lora_files(path: Path) -> dict[str, Path]:
    """The file of each part of the denoiser in a LoRA folder, an export or a file alone. Raises ModelError."""
    if path.is_file():
        return {LORA_PREFIX: path}
    for folder in (path, path / LORA_FOLDER):
        found = {part: folder / name for part, name in LORA_FILES.items() if (folder / name).is_file()}
        if LORA_PREFIX in found:
            return found
        if (folder / PEFT_FILE).is_file():
            return {LORA_PREFIX: folder / PEFT_FILE}
        alone = sorted(folder.glob("*.safetensors"))
        if len(alone) == 1:
            return {LORA_PREFIX: alone[0]}
    problem = "has no LoRA in it" if path.is_dir() else "does not exist"
    raise ModelError(f"{path} {problem}; name a .safetensors file or an export such as safetensors/step_40")


def is_lora(path: Path) -> bool:
    """True for a LoRA's file, and for a folder with one whose settings are beside it."""
    if path.is_file():
        return path.suffix == ".safetensors"
    names = (*LORA_FILES.values(), PEFT_FILE)
    return any(
        (folder / ADAPTER_CONFIG).is_file() and any((folder / name).is_file() for name in names)
        for folder in (path, path / LORA_FOLDER)
    )


def stated_base(path: Path) -> str | None:
    """The model that a LoRA says it is for, in adapter_config.json beside it. Raises ModelError as LoraSource does."""
    config = _config(path)
    return None if config is None else config.get("base_model_name_or_path")


def _config(path: Path) -> dict[str, Any] | None:
    """adapter_config.json beside the files, None if there is none; it says nothing of a file with a name of its own.
    Raises ModelError if it does not say the scale."""
    if path.is_file() and path.name not in (*LORA_FILES.values(), PEFT_FILE):
        return None
    folder = path.parent if path.is_file() else path
    for file in (folder / ADAPTER_CONFIG, folder / LORA_FOLDER / ADAPTER_CONFIG):
        if file.is_file():
            config = read_json(file)
            if lacking := [name for name in ("r", "lora_alpha") if name not in config]:
                raise ModelError(f"{file} does not say {' and '.join(lacking)}; copy the LoRA again")
            return config
    return None


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """A file's tensors, and the adapter's settings in its header. Raises ModelError if it cannot be read."""
    try:
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no mapping
            header = (opened.metadata() or {}).get(METADATA)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({error}); copy the LoRA again") from error
    if header is None:
        return tensors, None
    settings = {k.removeprefix(f"{LORA_PREFIX}."): v for k, v in json.loads(header).items()}
    return tensors, settings if "lora_alpha" in settings else None


def _layers(
    tensors: Mapping[str, Tensor],
    file: Path,
    settings: Mapping[str, Any] | None,
    table: NameTable | None,
    weight: Weight | None,
) -> tuple[LoraLayers, dict[str, Tensor]]:
    """The layers of a file by diffusers' names, and the whole modules that it holds besides (modules_to_save)."""
    found, whole, strange = _grouped(tensors, settings)
    unknown = sorted({module for module in found if not _members(module, table)} | strange)
    if unknown or not found:
        raise ModelError(
            f"{file}: {len(unknown)} of its names are no layers of the denoiser "
            f"({', '.join(unknown[:3]) or 'it is empty'}): name the pipeline that it is for, or use a LoRA of such a "
            "model"
        )
    layers: LoraLayers = {}
    for module, group in found.items():
        if not {"A", "B"} <= group.keys():
            raise ModelError(f"{file}: {module} has one of a LoRA's two matrices only ({', '.join(sorted(group))})")
        members = [name for name, _ in _members(module, table)]
        layer = _layer(group, _bare(module), settings)
        _require_pair(layer, f"{file}: {module}")
        if settings is not None and "alpha" not in group and layer.rank != rank_of(settings, _bare(module)):
            stated = rank_of(settings, _bare(module))
            raise ModelError(f"{file}: {module} has rank {layer.rank}, its settings say {stated}; copy the LoRA again")
        parts = split(layer, len(members)) if len(members) > 1 else [layer]
        added = {name: part for name, part in zip(members, parts, strict=True) if part is not None}
        if "dora_scale" in group and not module.startswith(FLAT):
            added = {name: _with_own_magnitude(part, name, weight, file) for name, part in added.items()}
        layers |= added
    return layers, whole


def _grouped(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], set[str]]:
    """The tensors of each layer of a file, by their role; those of whole modules, by diffusers' names; other names."""
    saved = tuple((settings or {}).get("modules_to_save") or ())
    found: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    strange: set[str] = set()
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        if match is not None:
            role = MATRICES.get(match["matrix"] or "", match["other"])
            found.setdefault(match["module"], {})[role] = tensor
        elif _bare(key).rpartition(".")[0].endswith(saved or ("\0",)):
            whole[_bare(key)] = tensor
        else:
            strange.add(key)
    return found, whole, strange


def _bare(name: str) -> str:
    """A name without what tools put before those of the denoiser."""
    for prefix in DOTTED:
        name = name.removeprefix(prefix)
    return name


def _members(module: str, table: NameTable | None) -> list[tuple[str, object]]:
    """The layers of diffusers that a layer of a file is, in the order of its rows; [] if that is not known."""
    name = _bare(module)
    if module.startswith(FLAT):
        flat = next(module.removeprefix(prefix) for prefix in FLAT if module.startswith(prefix))
        own = None if table is None else table.diffusers(flat)
        return [] if table is None else [(own, None)] if own is not None else list(table.members(flat))
    if module.startswith(OF_TEXT):
        return []
    if table is not None and (originals := table.members(name)):
        return list(originals)
    if "diffusion_model." in module and (table is None or table.original(name) is None):
        return []
    return [(name, None)]


def _layer(group: Mapping[str, Tensor], module: str, settings: Mapping[str, Any] | None) -> LoraLayer:
    """A layer of a file. Its alpha is a tensor beside it, or what the settings say, or the rank."""
    A, B, rank = group["A"], group["B"], len(group["A"])
    if "alpha" in group:
        alpha = float(group["alpha"])
    else:
        alpha = float(rank) if settings is None else alpha_of(settings, module, rank)
    magnitude = group.get("lora_magnitude_vector", group.get("dora_scale"))
    return LoraLayer(A, B, alpha, None if magnitude is None else magnitude.flatten())


def _require_pair(layer: LoraLayer, where: str) -> None:
    """Raise ModelError for matrices that do not fit each other, and for a magnitude that is not one of outputs."""
    if layer.A.ndim < 2 or layer.B.ndim < 2 or layer.B.shape[1] != layer.rank:
        raise ModelError(f"{where}: A {list(layer.A.shape)} and B {list(layer.B.shape)} are no pair of a LoRA")
    if layer.magnitude is not None and len(layer.magnitude) != len(layer.B):
        raise ModelError(f"{where}: its dora_scale is one of inputs; only one of outputs is known here")


def _with_own_magnitude(layer: LoraLayer, name: str, weight: Weight | None, file: Path) -> LoraLayer:
    """DoRA as ComfyUI has it: the sum of W and the adapter is multiplied by dora_scale / norm(W), not divided by its
    own norm (comfy/weight_adapter/base.py of 0.3.77). With the base's weight that is a magnitude."""
    assert layer.magnitude is not None
    if weight is None:
        raise ModelError(f"{file} has DoRA scales that depend on the base's weights: name the pipeline by --base")
    own = weight(name)
    return replace(layer, magnitude=layer.magnitude * row_norms(own.float() + layer.delta()) / row_norms(own))
