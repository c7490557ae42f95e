"""Export of a language model: a folder for transformers, vLLM and SGLang, or a LoRA in PEFT format."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from wfm_ds.errors import ModelError
from wfm_ds.export.pipeline_folder import link_files
from wfm_ds.export.tensor_file import StoredTensorSpec, TensorFile
from wfm_ds.export.weights import (
    LORA_FOLDER,
    SHARD_BYTES,
    TensorSource,
    adapter_settings,
    check_tensors,
    exhaust_stream,
    file_dtype,
    new_export_folder,
    plan_shards,
    write_shard_index,
)
from wfm_ds.models.assets.loading import read_json
from wfm_ds.storage import atomic

log = logging.getLogger(__name__)

STEM = "model"
CONFIG = "config.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")
# (prefix in transformers 5, prefix in older files). transformers loads both. Exports use the names of the base model.
PREFIX_ALIASES = (("model.language_model.", "model."), ("model.visual.", "visual."))


@dataclass(frozen=True, slots=True)
class LanguageTarget:
    """The folder of the base model, and the dtype and shape of each tensor during training."""

    base: Path
    specs: Mapping[str, StoredTensorSpec]  # by transformers' names, tied weights only once

    @classmethod
    def from_network(cls, network: nn.Module, base: Path) -> LanguageTarget:
        names = {name for name, _ in network.named_parameters()}
        state = network.state_dict()
        parameters = set(dict(network.named_parameters(remove_duplicate=False)))
        tensors = {name: t for name, t in state.items() if name in names or name not in parameters}
        return cls(
            base.absolute(), {name: StoredTensorSpec(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        )

    def to_json(self) -> dict[str, Any]:
        return {"base": str(self.base), "library": "transformers"}


class BaseWeights:
    """The safetensors files of a model folder, read one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, torch.Size] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with _open_safetensors(file) as tensors:
                self._file_of |= dict.fromkeys(tensors.keys(), file)
                self._shapes |= {
                    name: torch.Size(tensors.get_slice(name).get_shape()) for name in sorted(tensors.keys())
                }

    def file_key(self, name: str) -> str:
        """Return the name under which the files store a tensor, or `name` if they do not contain it.

        name: the tensor's name in transformers.
        """
        aliases = [old + name.removeprefix(new) for new, old in PREFIX_ALIASES if name.startswith(new)]
        return next((candidate for candidate in (name, *aliases) if candidate in self._file_of), name)

    def file_shape(self, key: str, shape: torch.Size) -> torch.Size:
        """Return the shape that a tensor has in the files, given its shape in transformers.

        The shapes differ if transformers transposes expert weights when it loads them.
        """
        original = self._shapes.get(key, shape)
        return original if len(shape) == 3 and original == torch.Size((shape[0], shape[2], shape[1])) else shape

    def load_tensor(self, key: str) -> Tensor:
        if key not in self._file_of:
            raise ModelError(f"{key} is missing in the base model; download the model again")
        with _open_safetensors(self._file_of[key]) as tensors:
            weight: Tensor = tensors.get_tensor(key)
        return weight


@contextlib.contextmanager
def _open_safetensors(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({error}); download the model again") from error


def export_language(
    target: LanguageTarget, source: TensorSource, out: Path, *, policy: str, dtype: torch.dtype, is_main: bool
) -> Path:
    """Export the weights of `policy` and return the folder to load. All ranks must call this with the same arguments.

    A LoRA run writes `out/lora/adapter_model.safetensors` and `adapter_config.json`. A full run writes a model folder:
    weights in `dtype` with the tensor names of the base model, and links to or copies of its other files. Raises
    UserError on rank 0 if `out` cannot be written.
    """
    result = out / LORA_FOLDER if source.uses_lora else out
    stream = source.iter_full_tensors(policy)
    if is_main:
        try:
            with new_export_folder(out, target.base) as making:
                if source.uses_lora:
                    _write_lora(check_tensors(stream), adapter_settings(source.lora_config(), target.base), making)
                else:
                    _write_model(target, check_tensors(stream), making, dtype)
        finally:
            exhaust_stream(stream)
        log.info("exported the %s weights to %s", policy, result)
    else:
        exhaust_stream(stream)
    return result


def loading_code(base: Path, exported: Path, lora: bool) -> str:
    model = json.dumps(str(base if lora else exported))
    lines = [
        "from transformers import AutoModelForImageTextToText, AutoProcessor",
        f'model = AutoModelForImageTextToText.from_pretrained({model}, dtype="auto")',
    ]
    if lora:
        lines += [
            "from peft import PeftModel",
            f"model = PeftModel.from_pretrained(model, {json.dumps(str(exported))})",
        ]
    lines.append(f"processor = AutoProcessor.from_pretrained({model})")
    return "\n".join(lines)


def _write_lora(tensors: Iterator[tuple[str, Tensor]], settings: Mapping[str, Any], making: Path) -> None:
    folder = making / LORA_FOLDER
    folder.mkdir()
    adapter = {f"base_model.model.{n}": t.detach().to(torch.float32, copy=True).contiguous() for n, t in tensors}
    save_file(adapter, folder / ADAPTER, metadata={"format": "pt"})
    atomic.sync_to_disk(folder / ADAPTER)
    atomic.write_text(folder / ADAPTER_CONFIG, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _write_model(
    target: LanguageTarget, tensors: Iterator[tuple[str, Tensor]], making: Path, dtype: torch.dtype
) -> None:
    base = BaseWeights(target.base)
    files = [f for f in target.base.iterdir() if f.is_file() and not f.name.endswith(WEIGHTS) and f.name != CONFIG]
    link_files(target.base, making, sorted(files))
    _write_config(target.base, making, dtype)
    spec_by_key = {base.file_key(name): spec for name, spec in target.specs.items()}
    specs = {
        key: StoredTensorSpec(file_dtype(spec.dtype, dtype), base.file_shape(key, spec.shape))
        for key, spec in spec_by_key.items()
    }
    shards = plan_shards(specs, SHARD_BYTES, STEM)
    write_shard_index(making, shards, STEM)
    remaining = dict(specs)
    with contextlib.ExitStack() as stack:
        file_by_key: dict[str, TensorFile] = {}
        for file_name, shard in shards.items():
            file = stack.enter_context(TensorFile(making / file_name, shard, {"format": "pt"}))
            file_by_key |= dict.fromkeys(shard, file)
        for name, tensor in tensors:
            key = base.file_key(name)
            if key not in remaining or spec_by_key[key].shape != tensor.shape:
                raise ModelError(f"{name}: unexpected or duplicate tensor for {target.base}, export aborted")
            spec = remaining.pop(key)
            file_by_key[key].write(
                key, (tensor if spec.shape == tensor.shape else tensor.mT.contiguous()).to(spec.dtype)
            )
        for key, spec in remaining.items():  # tensors that are not part of training
            file_by_key[key].write(key, base.load_tensor(key).to(spec.dtype))


def _write_config(base: Path, making: Path, dtype: torch.dtype) -> None:
    config = read_json(base / CONFIG)
    name = str(dtype).removeprefix("torch.")
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        section.update({key: name for key in ("dtype", "torch_dtype") if key in section})
    atomic.write_text(making / CONFIG, json.dumps(config, indent=2) + "\n")
