"""Loads an exported LoRA into a model, with the same scale alpha / rank as in training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import PeftAdapterMixin
from peft import get_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.export.lora_file import read_tensors, read_whole_layers
from wfm_ds.export.weights import LORA_FILES, LORA_FOLDER, LORA_PREFIX, METADATA_KEY
from wfm_ds.models.base import DiffusionModel
from wfm_ds.storage.filesystem import shorten_path

# Raised by diffusers for damaged tensors or tensors that do not fit the layers.
LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError)


def add_peft_methods(network: Any) -> Any:
    """Add the methods of diffusers' PeftAdapterMixin, such as `load_lora_adapter`, to a network in place."""
    network_class = type(network)
    if not issubclass(network_class, PeftAdapterMixin):
        namespace = {"__module__": network_class.__module__}
        network.__class__ = type(network_class.__name__, (network_class, PeftAdapterMixin), namespace)
    return network


def load_adapter(model: DiffusionModel, folder: Path) -> None:
    """Add the LoRA in `folder` (`safetensors/step_N/lora` of a run) to the model's unwrapped denoiser and activate it.

    Raises ModelError if a file is missing or damaged, if it does not contain alpha, or if a tensor does not fit the
    model.
    """
    paths = {part: find_adapter_file(folder, part) for part in model.denoiser_components}
    tensor_names = {part: read_adapter_names(path) for part, path in paths.items()}
    trained_layers = {tensor_layer(name) for names in tensor_names.values() for name in names}
    whole_layers = {part: read_whole_layers(path.parent, part) for part, path in paths.items()}
    whole_names = {name.rpartition(".")[0] for tensors in whole_layers.values() for name in tensors}
    model.prepare_for_lora(sorted(trained_layers | whole_names))
    for part, path in paths.items():
        problem = f"{path} does not fit the {part} of {model.path}"
        hint = "use the model that it was trained on"
        names = tensor_names[part]
        try:
            load_part_adapter(model.pipeline, part, path)
        except LOADING_ERRORS as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"{problem} ({reason}); {hint}") from error
        if mismatches := sorted(names ^ adapter_tensor_names(getattr(model.pipeline, part))):
            raise ModelError(f"{problem}: {len(mismatches)} tensors do not match, e.g. {mismatches[0]}; {hint}")
        copy_whole_layers(getattr(model.pipeline, part), whole_layers[part], path.parent)


@torch.no_grad()
def copy_whole_layers(network: torch.nn.Module, layers: Mapping[str, Tensor], folder: Path) -> None:
    """Copy the fully trained layers of a LoRA into a network.

    layers: {tensor name: tensor}, result of `read_whole_layers(folder, ...)`. Raises ModelError if the network lacks
    one of these tensors or has it with a different shape.
    """
    parameters = {name.replace(".base_layer.", "."): parameter for name, parameter in network.named_parameters()}
    for name, tensor in layers.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            shown = f"{shorten_path(name)} {list(tensor.shape)}"
            raise ModelError(f"{folder}: {shown} does not fit; use the model it was trained on")
        parameters[name].copy_(tensor)


def find_adapter_file(folder: Path, part: str = LORA_PREFIX) -> Path:
    """Return the LoRA file of a denoiser component in a LoRA folder. Raises ModelError if it is missing."""
    name = LORA_FILES[part]
    path = folder / name
    if path.is_file():
        return path
    lora_path = folder / LORA_FOLDER / name
    hint = f"; use {lora_path.parent}" if lora_path.is_file() else "; use safetensors/step_N/lora of a LoRA run"
    raise ModelError(f"{folder} has no {name}{hint}")


def read_adapter_names(path: Path) -> set[str]:
    """Return the tensor names of a LoRA file. Raises ModelError if it is damaged, lacks alpha or has bad settings."""
    tensors, settings = read_tensors(path)
    if settings is None:
        raise ModelError(f"{path} does not contain its alpha ({METADATA_KEY} in its header); use a LoRA of a run")
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        if settings.get(key) and (isinstance(settings[key], str) or key == "layers_pattern"):
            raise ModelError(
                f"{path}: {key} is a regular expression, which can take unlimited time to match; convert the LoRA with "
                "`wfm convert`, which writes the layer names"
            )
    return set(tensors)


def tensor_layer(name: str) -> str:
    """Return the name of the network layer that a tensor of a LoRA file belongs to."""
    return name.removeprefix(f"{LORA_PREFIX}.").partition(".lora_")[0]


def load_part_adapter(pipeline: Any, part: str, path: Path) -> None:
    options = {} if part == LORA_PREFIX else {f"load_into_{part}": True}
    # If the pipeline class has no LoRA loader, use the network's loader, or add a loader to the network.
    load = getattr(pipeline, "load_lora_weights", None) or add_peft_methods(getattr(pipeline, part)).load_lora_adapter
    load(str(path.parent), weight_name=path.name, adapter_name="default", local_files_only=True, **options)


def adapter_tensor_names(network: Any) -> set[str]:
    """Return the names of a network's adapter tensors, as they are written in LoRA files."""
    if not getattr(network, "peft_config", None):
        return set()
    state_dict = get_peft_model_state_dict(network, adapter_name="default", save_embedding_layers=False)
    return {f"{LORA_PREFIX}.{name}" for name in state_dict}
