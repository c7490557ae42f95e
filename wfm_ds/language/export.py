"""Exports of a language model: a folder that transformers, vLLM and SGLang load, or a LoRA as peft has it.

Every rank iterates the engine's stream, because each of its items is a gather; rank 0 writes.
"""

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

from wfm_ds.checkpoint.export import (
    LORA_FOLDER,
    SHARD_BYTES,
    TensorSource,
    adapter_settings,
    new_export,
    planned_shards,
)
from wfm_ds.checkpoint.pipeline_folder import share_files
from wfm_ds.checkpoint.tensor_file import Spec, TensorFile
from wfm_ds.errors import ModelError
from wfm_ds.models.loading import read_json
from wfm_ds.storage import atomic

log = logging.getLogger(__name__)

STEM = "model"
CONFIG = "config.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")
# How transformers 5 names what older files have under the second name: both are loaded, the base's are written.
RENAMED = (("model.language_model.", "model."), ("model.visual.", "visual."))


@dataclass(frozen=True, slots=True)
class LanguageTarget:
    """A model's folder, and its tensors as training has them."""

    base: Path
    specs: Mapping[str, Spec]  # by transformers' names; tied weights once

    @classmethod
    def of(cls, network: nn.Module, base: Path) -> LanguageTarget:
        """Make the target of a network that is still whole."""
        names = {name for name, _ in network.named_parameters()}
        stored = network.state_dict()
        parameters = set(dict(network.named_parameters(remove_duplicate=False)))
        kept = {name: t for name, t in stored.items() if name in names or name not in parameters}
        return cls(base.absolute(), {name: Spec(tensor.dtype, tensor.shape) for name, tensor in kept.items()})

    def to_json(self) -> dict[str, Any]:
        return {"base": str(self.base), "library": "transformers"}


class BaseWeights:
    """The safetensors of a model's folder, read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, torch.Size] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with _readable(file) as opened:
                self._file_of |= dict.fromkeys(opened.keys(), file)
                self._shapes |= {name: torch.Size(opened.get_slice(name).get_shape()) for name in sorted(opened.keys())}

    def own_name(self, name: str) -> str:
        """The name that the folder has for one of transformers' names; that itself if it has none."""
        older = [old + name.removeprefix(new) for new, old in RENAMED if name.startswith(new)]
        return next((known for known in (name, *older) if known in self._file_of), name)

    def stored(self, own: str, shape: torch.Size) -> torch.Size:
        """The shape that the folder has for a tensor of this one. Transformers turns the experts of released mixtures
        as it loads them: other programs want them as they were."""
        there = self._shapes.get(own, shape)
        return there if len(shape) == 3 and there == turned(shape) else shape

    def tensor(self, name: str) -> Tensor:
        """A tensor by the folder's own name. Raises ModelError."""
        if name not in self._file_of:
            raise ModelError(f"{name} is in no file of the base model; copy the model again")
        with _readable(self._file_of[name]) as opened:
            found: Tensor = opened.get_tensor(name)
        return found


def turned(shape: torch.Size) -> torch.Size:
    """Exchange the last two of three sizes."""
    return torch.Size((shape[0], shape[2], shape[1]))


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({error}); copy the model again") from error


def export_language(
    target: LanguageTarget, source: TensorSource, out: Path, *, policy: str, dtype: torch.dtype, is_main: bool
) -> Path:
    """Write the weights of `policy` as transformers loads them; every rank calls it, with the same arguments.

    A LoRA run gets `out/lora/adapter_model.safetensors` and `adapter_config.json`, a full run makes `out` a model's
    folder: the weights in `dtype` under the names of the base's files, all else shared with the base. `out` is complete
    or absent. Returns the folder to load. Raises UserError on rank 0 if `out` cannot be written.
    """
    result = out / LORA_FOLDER if source.lora else out
    stream = source.named_full_tensors(policy)
    if is_main:
        try:
            with new_export(out, target.base) as making:
                if source.lora:
                    _write_lora(_here(stream), adapter_settings(source.lora_config(), target.base), making)
                else:
                    _write_model(target, _here(stream), making, dtype)
        finally:
            _exhaust(stream)
        log.info("exported the %s weights to %s", policy, result)
    else:
        _exhaust(stream)
    return result


def loading_lines(base: Path, exported: Path, lora: bool) -> str:
    """The lines of Python with which a user loads what `export_language` returned."""
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


def _exhaust(stream: Iterator[tuple[str, Tensor | None]]) -> None:
    for _ in stream:
        pass


def _here(stream: Iterator[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
    """Rank 0's view of the stream: a NaN must not be shipped."""
    for name, tensor in stream:
        assert tensor is not None, f"rank 0 got nothing for {name}"
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{name} holds NaN or infinity: the weights are broken, the export was given up")
        yield name, tensor
        del tensor  # the next one is gathered meanwhile


def _write_lora(tensors: Iterator[tuple[str, Tensor]], settings: Mapping[str, Any], making: Path) -> None:
    folder = making / LORA_FOLDER
    folder.mkdir()
    adapter = {f"base_model.model.{n}": t.detach().to(torch.float32, copy=True).contiguous() for n, t in tensors}
    save_file(adapter, folder / ADAPTER, metadata={"format": "pt"})
    atomic.sync(folder / ADAPTER)
    atomic.write_text(folder / ADAPTER_CONFIG, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _write_model(
    target: LanguageTarget, tensors: Iterator[tuple[str, Tensor]], making: Path, dtype: torch.dtype
) -> None:
    base = BaseWeights(target.base)
    files = [f for f in target.base.iterdir() if f.is_file() and not f.name.endswith(WEIGHTS) and f.name != CONFIG]
    share_files(target.base, making, sorted(files))
    _write_config(target.base, making, dtype)
    named = {base.own_name(name): spec for name, spec in target.specs.items()}
    specs = {
        own: Spec(dtype if spec.dtype.is_floating_point else spec.dtype, base.stored(own, spec.shape))
        for own, spec in named.items()
    }
    shards = planned_shards(specs, SHARD_BYTES, STEM)
    if len(shards) > 1:
        total = sum(spec.nbytes for spec in specs.values())
        weight_map = {name: file for file, shard in shards.items() for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        atomic.write_text(making / f"{STEM}.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    left = dict(specs)
    with contextlib.ExitStack() as held:
        places: dict[str, TensorFile] = {}
        for file_name, shard in shards.items():
            file = held.enter_context(TensorFile(making / file_name, shard, {"format": "pt"}))
            places |= dict.fromkeys(shard, file)
        for name, tensor in tensors:
            own = base.own_name(name)
            if own not in left or named[own].shape != tensor.shape:
                raise ModelError(f"{name} is no tensor of {target.base}, or came twice: the export was given up")
            spec = left.pop(own)
            places[own].write(own, (tensor if spec.shape == tensor.shape else tensor.mT.contiguous()).to(spec.dtype))
        for own, spec in left.items():  # what training left as it was
            places[own].write(own, base.tensor(own).to(spec.dtype))


def _write_config(base: Path, making: Path, dtype: torch.dtype) -> None:
    """The base's config with the dtype that the weights have now: programs that serve a model go by it."""
    config = read_json(base / CONFIG)
    name = str(dtype).removeprefix("torch.")
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        section.update({key: name for key in ("dtype", "torch_dtype") if key in section})
    atomic.write_text(making / CONFIG, json.dumps(config, indent=2) + "\n")
