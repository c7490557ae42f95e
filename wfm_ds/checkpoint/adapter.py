"""An exported LoRA back onto a model, scaled as it was trained. How it is written is export.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from wfm_ds.checkpoint.export import LORA_FILES, LORA_FOLDER, LORA_PREFIX, METADATA, SAVED_FILES
from wfm_ds.errors import ModelError
from wfm_ds.models.adaptable import adaptable
from wfm_ds.models.base import DiffusionModel

# What diffusers raises for tensors that are damaged, or at odds with the layers.
LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError)


def load_adapter(model: DiffusionModel, folder: Path) -> None:
    """Add the LoRA in `folder` (`safetensors/step_N/lora` of a run) to the model's bare denoiser and use it.

    Raises ModelError if a file is missing, damaged, does not name its alpha, or does not fit the model whole: diffusers
    alone would leave out what it cannot place, and take the rank for alpha.
    """
    paths = {part: adapter_file(folder, part) for part in model.denoiser_parts}
    names_in = {part: adapter_names(path) for part, path in paths.items()}
    trained = {adapted_layer(name) for names in names_in.values() for name in names}
    model.freeze_all_but(sorted(trained | {name for part, path in paths.items() for name in saved_layers(path, part)}))
    for part, path in paths.items():
        misfit = f"{path} does not fit the {part} of {model.path}"
        hint = "use the model that it was trained on"
        names = names_in[part]
        try:
            load_part(model.pipeline, part, path)
        except LOADING_ERRORS as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"{misfit} ({reason}); {hint}") from error
        if wrong := sorted(names ^ placed_names(getattr(model.pipeline, part))):
            raise ModelError(f"{misfit}: {len(wrong)} tensors are without a place, e.g. {wrong[0]}; {hint}")
        load_saved(getattr(model.pipeline, part), path.parent / SAVED_FILES[part])


def saved_layers(adapter: Path, part: str) -> set[str]:
    """The layers that trained whole, by the file beside a part's adapter."""
    path = adapter.parent / SAVED_FILES[part]
    if not path.is_file():
        return set()
    with safe_open(path, framework="pt") as file:
        return {name.rpartition(".")[0] for name in file.keys()}  # noqa: SIM118, it is no mapping


@torch.no_grad()
def load_saved(network: torch.nn.Module, path: Path) -> None:
    """Write the layers that trained whole, if there is a file of them, into a part of the denoiser. Raises ModelError
    for tensors that it does not have."""
    if not path.is_file():
        return
    places = {name.replace(".base_layer.", "."): parameter for name, parameter in network.named_parameters()}
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118, it is no mapping
            tensor = file.get_tensor(name)
            if name not in places or places[name].shape != tensor.shape:
                raise ModelError(f"{path}: {name} {list(tensor.shape)} does not fit; use the model it was trained on")
            places[name].copy_(tensor)


def adapter_file(folder: Path, part: str = LORA_PREFIX) -> Path:
    """The weights for a part of the denoiser in an exported LoRA folder. ModelError if there are none."""
    name = LORA_FILES[part]
    path = folder / name
    if path.is_file():
        return path
    inside = folder / LORA_FOLDER / name
    hint = f"; {inside.parent} has" if inside.is_file() else ", as safetensors/step_N/lora of a LoRA run has"
    raise ModelError(f"{folder} has no {name}{hint}")


def adapter_names(path: Path) -> set[str]:
    """The names of the tensors in a LoRA file that says its alpha; else ModelError."""
    try:
        with safe_open(path, framework="pt") as file:
            names, metadata = set(file.keys()), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read ({error}); copy the export again") from error
    if METADATA not in metadata:
        raise ModelError(f"{path} does not name its alpha ({METADATA} in its header); use a LoRA that a run exported")
    return names


def adapted_layer(name: str) -> str:
    """The layer in the network that a tensor of a LoRA file belongs to."""
    return name.removeprefix(f"{LORA_PREFIX}.").partition(".lora_")[0]


def load_part(pipeline: Any, part: str, path: Path) -> None:
    which = {} if part == LORA_PREFIX else {f"load_into_{part}": True}
    # Of a pipeline without a loader of its own the network has one, or is given it.
    load = getattr(pipeline, "load_lora_weights", None) or adaptable(getattr(pipeline, part)).load_lora_adapter
    load(str(path.parent), weight_name=path.name, adapter_name="default", local_files_only=True, **which)


def placed_names(network: Any) -> set[str]:
    """The adapter's tensors in a network, as its file would name them."""
    if not getattr(network, "peft_config", None):
        return set()
    placed = get_peft_model_state_dict(network, adapter_name="default", save_embedding_layers=False)
    return {f"{LORA_PREFIX}.{name}" for name in placed}
