"""Loads a pipeline from its folder, and rejects incomplete folders, which plain diffusers may accept."""

from __future__ import annotations

import importlib
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers.utils.logging
import torch
import transformers.utils.logging
from diffusers import DiffusionPipeline
from diffusers.guiders.guider_utils import GUIDER_CONFIG_NAME, BaseGuidance
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from wfm_ds.distributed.accelerator import uses_cuda
from wfm_ds.distributed.progress import show_wait
from wfm_ds.errors import ModelError, UserError
from wfm_ds.models.assets.hub import display_name
from wfm_ds.models.assets.weight_files import UNUSED_WEIGHT_SUFFIXES, list_weight_files, select_variant
from wfm_ds.storage.filesystem import read_regular, shorten_error

# Errors that the libraries raise for missing or damaged files or files that do not match their configs.
LOADING_ERRORS = (
    *(OSError, ValueError, TypeError, RuntimeError, AttributeError, ImportError, LookupError, SafetensorError),
    *(ArithmeticError, AssertionError, StrictDataclassError),  # for invalid config values
)
BUFFER_DTYPES = ("I64", "BOOL")  # counters and masks in buffers
MAX_TIMESTEPS, MAX_LAYERS = 1_000_000, 10_000
LAYER_KEY = re.compile(r"layers|blocks|depth")
USE_ORIGINAL = "use the original pipeline, with F32, BF16 or F16 weights in safetensors files"
SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # safetensors' names
ABSENT_COMPONENT = [None, None]  # entry of an absent component in model_index.json


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    libraries = [lib for lib in (diffusers.utils.logging, transformers.utils.logging) if lib.is_progress_bar_enabled()]
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in libraries:
            library.enable_progress_bar()


def load_pipeline(
    folder: Path,
    required: Sequence[str],
    component_dtype: Callable[[str], torch.dtype],
    extra: Mapping[str, Any],
    mapped: Sequence[str] = (),
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Load the diffusers pipeline in `folder` to the CPU, offline, from safetensors only.

    required: names of components that must not be null in model_index.json.
    component_dtype: function that maps the name of a network to its dtype.
    extra: {name: component} for components that the folder does not contain.
    mapped: names of networks to keep memory-mapped in their stored dtype (see load_network).
    overrides: {name: component} to set after construction, without diffusers' type checks.
    Raises ModelError if a required component is null, or if files are missing, damaged or do not match their configs.
    """
    index = read_json(folder / "model_index.json")
    replaced = {*extra, *overrides}
    check_components(folder, index, replaced)
    absent = [name for name, entry in index.items() if entry == ABSENT_COMPONENT]
    if absent_names := [name for name in required if name in absent or name not in index]:
        raise ModelError(
            f"{folder} has no {', '.join(absent_names)}, but {index['_class_name']} needs it; use a complete pipeline"
        )
    with translate_loading_errors(folder), hide_progress_bars(), show_wait(f"loading {display_name(folder)}"):
        networks = {
            name: load_network(folder / name, network_class, component_dtype(name), mapped=name in mapped)
            for name, entry in index.items()
            if name not in replaced and (network_class := resolve_network_class(entry)) is not None
        }
        # diffusers rejects an absent component (SD3 without T5) unless it is passed as None.
        parts = networks | dict.fromkeys(absent) | dict(extra) | dict.fromkeys(overrides)
        # DiffusionPipeline itself would reload the optional components of the class (such as Wan's denoiser) in
        # float32 and discard ours.
        pipeline_class = resolve_pipeline_class(index)
        with silence_expected_warnings():
            pipeline = pipeline_class.from_pretrained(folder, local_files_only=True, **parts)
            pipeline.register_modules(**overrides)
    require_tokenizer_files(folder, pipeline)
    return pipeline


@contextmanager
def translate_loading_errors(path: Path) -> Iterator[None]:
    """Convert errors of the libraries inside the context to a ModelError about the file or folder `path`."""
    try:
        yield
    except ModelError:  # also a ValueError
        raise
    except LOADING_ERRORS as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{path} cannot be loaded ({reason}); copy or download the pipeline again") from error


@contextmanager
def silence_expected_warnings() -> Iterator[None]:
    """Hide the warnings about the types of components and about guiders, which users cannot act on."""
    loggers = [logging.getLogger(one.__module__) for one in (DiffusionPipeline, BaseGuidance)]

    def is_other_warning(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("Expected types for ", "Guiders are currently an experimental"))

    for logger in loggers:
        logger.addFilter(is_other_warning)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_other_warning)


def resolve_network_class(entry: Any) -> type[torch.nn.Module] | None:
    """Return the network class that an entry of model_index.json names, or None if the entry is not a network.

    Raises ModelError if the class cannot be imported.
    """
    member = resolve_component_class(entry)
    is_network = member is not None and issubclass(member, (diffusers.ModelMixin, transformers.PreTrainedModel))
    return member if is_network else None


def resolve_pipeline_network(entry: list[str | None]) -> type[torch.nn.Module] | None:
    """Return the network class that an entry names in a subpackage of diffusers.pipelines, or None."""
    library, name = map(str, entry)
    member = getattr(getattr(diffusers.pipelines, library, None), name, None)
    return member if isinstance(member, type) and issubclass(member, diffusers.ModelMixin) else None


def resolve_component_class(entry: Any) -> type | None:
    """Return the class that an entry of model_index.json names.

    Returns None for entries that are not classes, and for classes in a subpackage of diffusers.pipelines. Raises
    ModelError if the class cannot be imported.
    """
    if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(name, str) for name in entry):
        return None  # a flag, or an absent component
    library, name = entry
    try:
        if hasattr(diffusers.pipelines, library):
            return None
        member = getattr(importlib.import_module(library), name, None)
    except Exception as error:  # the import runs code of the package
        message = f"the pipeline has a component of class {library}.{name}, which cannot be imported"
        raise ModelError(f"{message} ({shorten_error(error)}); install the package that contains it") from error
    return member if isinstance(member, type) else None


def resolve_pipeline_class(index: Mapping[str, Any]) -> Any:
    """Return the pipeline class that a model_index.json names: of diffusers, or of the module of its transformer.

    Returns DiffusionPipeline if there is no such class. Raises ModelError if the transformer cannot be imported.
    """
    name = str(index.get("_class_name"))
    if hasattr(diffusers, name):
        return getattr(diffusers, name)
    network = resolve_component_class(index.get("transformer"))
    return DiffusionPipeline if network is None else getattr(sys.modules[network.__module__], name, DiffusionPipeline)


def check_components(folder: Path, index: Mapping[str, Any], replaced: Collection[str] = ()) -> None:
    """Raise ModelError if a component has an unsupported format, such as quantized weights, or a suspicious config.

    Missing folders and files are accepted. replaced: names of components that are not loaded from the folder.
    """
    for name, entry in index.items():
        if name in replaced:
            continue
        if resolve_network_class(entry) is not None:
            check_weight_files(folder / name)
        elif isinstance(entry, list):
            check_configs(folder / name)


def check_configs(folder: Path) -> None:
    for file in sorted(folder.glob("*config.json")):
        check_config(file, read_json(file))


def check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError if a component's config declares quantized weights or an implausibly large number."""
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "an unknown method") if isinstance(quantization, dict) else "?"
        raise ModelError(f"{file}: the weights are quantized ({str(method)[:40]}); {USE_ORIGINAL}")
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_config(file, value)
        sizes = value if isinstance(value, list) else [value]
        most = MAX_TIMESTEPS if key == "num_train_timesteps" else MAX_LAYERS if LAYER_KEY.search(key) else math.inf
        if any(isinstance(size, int | float) and size > most for size in sizes):
            raise ModelError(f"{file}: {key} is {str(value)[:40]}, but at most {most} is plausible; correct the file")


def check_weight_files(folder: Path) -> None:
    """Raise ModelError if a network's folder has quantized weights, or weights in another format than safetensors."""
    check_configs(folder)
    files = list_weight_files(folder)
    others = sorted(file.name for file in folder.glob("*") if file.suffix in {*UNUSED_WEIGHT_SUFFIXES, ".gguf"})
    if not files and others:
        kind = (
            "quantized (GGUF)" if others[0].endswith(".gguf") else "not in safetensors, and pickled files can run code"
        )
        raise ModelError(f"{folder}: the weights ({others[0]}) are {kind}; {USE_ORIGINAL}")
    if unsupported := sorted(read_stored_dtypes(folder) - {*SAFETENSORS_DTYPES, *BUFFER_DTYPES}):
        raise ModelError(f"{folder}: weights are stored as {', '.join(unsupported)}; {USE_ORIGINAL}")


def require_no_unexpected_weights(folder: Path, network: torch.nn.Module, unexpected: Sequence[str]) -> None:
    """Raise ModelError if a weight file has tensors that the network does not use, such as scales of float8 weights.

    unexpected: names of the tensors that the network did not load. Accepts buffers, tensors that the network's class
    declares as unused, and, for transformers networks, tensors of absent modules.
    """
    patterns = getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ()
    modules, buffers = dict(network.named_modules()), dict(network.named_buffers())
    is_encoder = not isinstance(network, diffusers.ModelMixin)
    unused = [
        key
        for key in sorted(unexpected)
        if key not in buffers
        and not any(re.search(pattern, key) for pattern in patterns)
        and not (is_encoder and key.rpartition(".")[0] not in modules)
    ]
    if unused:
        raise ModelError(
            f"{folder} has {len(unused)} weights that {type(network).__name__} does not use, e.g. {unused[0]}: "
            f"they may be scales of quantized weights or belong to another config; {USE_ORIGINAL}"
        )


def load_network(folder: Path, network_class: Any, dtype: torch.dtype, *, mapped: bool = False) -> torch.nn.Module:
    """Load one network in evaluation mode. Raises ModelError if its folder or weights are missing.

    mapped: keep the parameters memory-mapped in their stored dtype, if all stored tensors have the same dtype. All
    processes of the machine then share the memory of these parameters. Buffers are cast to `dtype`.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is missing; copy or download the pipeline again")
    network, report = network_class.from_pretrained(
        folder,
        dtype=(weights_dtype(folder) or dtype) if mapped else dtype,
        use_safetensors=True,
        variant=select_variant(folder),
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{folder} lacks {len(missing)} weights of {network_class.__name__}, e.g. {missing[0]}; "
            "copy or download the pipeline again"
        )
    require_no_unexpected_weights(folder, network, report["unexpected_keys"])
    loaded: torch.nn.Module = network.eval()
    if mapped:
        cast_persistent_buffers(loaded, dtype)
    return loaded


def read_stored_dtypes(folder: Path) -> set[str]:
    """Return the dtypes in a folder's weight files, such as "BF16". Raises ModelError for a damaged file."""
    names: set[str] = set()
    for file in list_weight_files(folder):
        try:
            with safe_open(file, "pt") as opened:
                names |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118, not a mapping
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be loaded ({error}); copy or download the pipeline again") from error
    return names


def weights_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of the tensors in a folder's safetensors files, or None if they have different dtypes."""
    names = read_stored_dtypes(folder)
    return SAFETENSORS_DTYPES.get(names.pop()) if len(names) == 1 else None


def cast_persistent_buffers(network: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast persistent buffers to `dtype`, except buffers that the network's class keeps in float32."""
    float32_names = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    for prefix, part in network.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and buffer.is_floating_point():
                needs_float32 = float32_names & {*prefix.split("."), name}
                setattr(part, name, buffer.to(torch.float32 if needs_float32 else dtype))


def require_tokenizer_files(folder: Path, pipeline: Any) -> None:
    for name, part in pipeline.components.items():
        files = getattr(type(part), "vocab_files_names", {}).values()
        if files and not any((folder / name / file).is_file() for file in files):
            raise ModelError(f"{folder / name} has none of {', '.join(files)}; copy or download the pipeline again")


def read_call_json(folder: Path) -> dict[str, Any]:
    """Return the pipeline call arguments in the folder's call.json, or {} if there is no such file."""
    file = folder / "call.json"
    return read_json(file) if file.is_file() else {}


def read_call_defaults(folder: Path) -> dict[str, Any]:
    """Return the content of call.json and, for a pipeline or LoRA with a guider, its scale as `guidance_scale`."""
    call = read_call_json(folder)
    files = (folder / GUIDER_CONFIG_NAME, folder / "guider" / GUIDER_CONFIG_NAME)
    config = next((read_json(file) for file in files if file.is_file()), None)
    if config is None:
        return call
    return {**call, "guidance_scale": config.get("guidance_scale") if config.get("enabled", True) else 1.0}


def read_max_sequence_length(folder: Path) -> int | None:
    """Return max_sequence_length from the folder's call.json, or None. Raises ModelError if the value is invalid."""
    length = read_call_json(folder).get("max_sequence_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelError(f"{folder / 'call.json'}: max_sequence_length must be a positive integer, got {length!r}")
    return length


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError if the file is unreadable or contains no object."""
    try:
        content = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({error}); copy or download the pipeline again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must contain a JSON object, got {type(content).__name__}")
    return content


def read_weight_map(index: Path) -> dict[str, str]:
    """Return {tensor name: file name} from a shard index. Raises ModelError if the index is invalid."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{index} has no weight_map of file names; copy or download the model again")
    return weight_map


def select_device(name: str | None) -> torch.device:
    """Return device `name`. None selects the GPU or, without one, the CPU. Raises UserError for an unusable device."""
    if name is None:
        return torch.device("cuda" if uses_cuda() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name} cannot be used ({reason}); omit it, or choose cpu or cuda") from error
    return device
