"""A pipeline from its folder, complete or not at all.

Plain loading leaves missing weights random and replaces a missing tokenizer by an empty one; both only train badly. So
each network is loaded by its own class, which says what was missing, and tokenizers are checked for their files.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from wfm_ds.distributed.accelerator import uses_cuda
from wfm_ds.errors import ModelError, UserError
from wfm_ds.models.base import without_progress_bars
from wfm_ds.models.variants import variant_to_load, weight_files

LIBRARIES = ("diffusers", "transformers")
# What the libraries raise for files that are missing, damaged, or at odds with their configs.
LOADING_ERRORS = (
    *(OSError, ValueError, TypeError, RuntimeError, AttributeError, ImportError, LookupError, SafetensorError),
    *(ArithmeticError, AssertionError, StrictDataclassError),  # for values in a config that no network can have
)
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # safetensors' names
ABSENT = [None, None]  # how model_index.json writes a part that a pipeline does without


def load_pipeline(
    folder: Path,
    required: Sequence[str],
    dtype_of: Callable[[str], torch.dtype],
    extra: Mapping[str, Any],
    mapped: Sequence[str] = (),
    late: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The diffusers pipeline in `folder`, on the CPU, offline, from safetensors only.

    `dtype_of(name)` is the dtype of a network; `extra` are parts that the folder does not hold; `mapped` are networks
    whose parameters stay as they are stored (load_network); `late` are parts to set when it is made, unchecked.
    ModelError if a required part is null in the index, or if anything is missing, damaged or does not fit its config.
    """
    index = read_json(folder / "model_index.json")
    absent = [name for name, entry in index.items() if entry == ABSENT]
    if lacking := [name for name in required if name in absent or name not in index]:
        raise ModelError(
            f"{folder} has no {', '.join(lacking)}, but {index['_class_name']} needs it; use a whole pipeline"
        )
    try:
        with without_progress_bars():
            networks = {
                name: load_network(folder / name, network_class, dtype_of(name), mapped=name in mapped)
                for name, entry in index.items()
                if (network_class := network_class_of(entry)) is not None
            }
            # Diffusers refuses an absent part (SD3 without T5) unless it is told so.
            parts = networks | dict.fromkeys(absent) | dict(extra) | dict.fromkeys(late)
            # DiffusionPipeline itself would load the parts that the class calls optional (all of Wan's denoiser) once
            # more, in float32, and drop ours.
            pipeline_class = getattr(diffusers, str(index["_class_name"]), DiffusionPipeline)
            with without_type_warnings():
                pipeline = pipeline_class.from_pretrained(folder, local_files_only=True, **parts)
                pipeline.register_modules(**late)
    except ModelError:
        raise
    except LOADING_ERRORS as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{folder} cannot be loaded ({reason}); copy or download the pipeline again") from error
    require_tokenizer_files(folder, pipeline)
    return pipeline


@contextmanager
def without_type_warnings() -> Iterator[None]:
    """Diffusers warns of a part whose class is not the one that the pipeline's signature names, and takes it."""
    logger = logging.getLogger(DiffusionPipeline.__module__)

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Expected types for ")

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def network_class_of(entry: Any) -> type[torch.nn.Module] | None:
    """The class that an entry of model_index.json names, if it is a network of the two libraries."""
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] not in LIBRARIES:
        return None  # a tokenizer, a flag, or something that diffusers itself will judge
    found = getattr(importlib.import_module(entry[0]), entry[1], None)
    return found if isinstance(found, type) and issubclass(found, torch.nn.Module) else None


def load_network(folder: Path, network_class: Any, dtype: torch.dtype, *, mapped: bool = False) -> torch.nn.Module:
    """One network in evaluation mode. Loaded in `dtype`: a later cast would ignore what its class keeps in float32.

    `mapped`: with its parameters in the one dtype that they are stored in, if it is one. Then they are pages of the
    files, shared by all processes that load them, until somebody writes to them. Buffers have `dtype` all the same.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is missing; copy or download the pipeline again")
    network, report = network_class.from_pretrained(
        folder,
        dtype=(stored_dtype(folder) or dtype) if mapped else dtype,
        use_safetensors=True,
        variant=variant_to_load(folder),
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{folder} lacks {len(missing)} weights of its {network_class.__name__}, e.g. {missing[0]}; "
            "copy or download the pipeline again"
        )
    loaded: torch.nn.Module = network.eval()
    if mapped:
        cast_stored_buffers(loaded, dtype)
    return loaded


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The dtype of all tensors in the safetensors files that are loaded from a folder; None if there are several."""
    names: set[str] = set()
    for file in weight_files(folder):
        with safe_open(file, "pt") as opened:
            names |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118, it is no mapping
    return STORED_DTYPES.get(names.pop()) if len(names) == 1 else None


def cast_stored_buffers(network: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give the buffers that come from files the dtype that diffusers gives them: `dtype`, or the float32 that the class
    asks for."""
    in_float32 = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    for prefix, part in network.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and buffer.is_floating_point():
                kept = in_float32 & {*prefix.split("."), name}
                setattr(part, name, buffer.to(torch.float32 if kept else dtype))


def require_tokenizer_files(folder: Path, pipeline: Any) -> None:
    for name, part in pipeline.components.items():
        files = getattr(type(part), "vocab_files_names", {}).values()
        if files and not any((folder / name / file).is_file() for file in files):
            raise ModelError(f"{folder / name} holds none of {', '.join(files)}; copy or download the pipeline again")


def stored_call(folder: Path) -> dict[str, Any]:
    """The call.json of a pipeline folder: arguments with which its stock pipeline is called. Empty if there is none."""
    file = folder / "call.json"
    return read_json(file) if file.is_file() else {}


def stored_sequence_length(folder: Path) -> int | None:
    """max_sequence_length in the call.json of a pipeline folder, if there is one."""
    length = stored_call(folder).get("max_sequence_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelError(f"{folder / 'call.json'}: max_sequence_length must be a positive whole number, got {length!r}")
    return length


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelError if it cannot be read or is something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); copy or download the pipeline again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def chosen_device(name: str | None) -> torch.device:
    """The device that a command was asked for; unset: a GPU where there is one. UserError if it cannot be used."""
    if name is None:
        return torch.device("cuda" if uses_cuda() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name} cannot be used here ({reason}); leave it out, or name cpu or cuda") from error
    return device
