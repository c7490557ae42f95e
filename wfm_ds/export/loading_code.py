"""Python code that loads an export with diffusers."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

from wfm_ds.export.pipeline_folder import CALL_FILE, REPLACEABLE_CONFIGS, pipeline_components, read_index
from wfm_ds.export.weights import LORA_FILES, LORA_PREFIX, WHOLE_LAYER_FILES
from wfm_ds.models.assets.hub import snapshot_origin
from wfm_ds.models.assets.loading import read_call_json, resolve_pipeline_class
from wfm_ds.models.assets.weight_files import pipeline_variant

SAFETY_CHECKER = "safety_checker"


def loading_lines(base: Path, exported: Path, lora: bool) -> str:
    """Return Python code that loads the result of `export_weights` with diffusers, or with a pipeline class of wfm_ds.

    base: folder of the pipeline that was trained. lora: whether the export is a LoRA. Raises ModelError if the base
    folder's model_index.json cannot be read.
    """
    pipeline = base if lora else exported
    hub_origin = snapshot_origin(pipeline)
    arguments = [json.dumps(str(pipeline))]
    if hub_origin is not None:
        arguments = [json.dumps(hub_origin[0]), f'revision="{hub_origin[1]}"']
    arguments += [f"{name}=None" for name in _components_to_disable(pipeline)]
    if variant := pipeline_variant(pipeline):
        arguments.append(f'variant="{variant}"')
    pipeline_class = resolve_pipeline_class(read_index(pipeline))
    is_stock = pipeline_class.__module__.startswith("diffusers.")
    module, name = (
        ("diffusers", "DiffusionPipeline") if is_stock else (pipeline_class.__module__, pipeline_class.__name__)
    )
    lines = [f"from {module} import {name}"]
    if _builds_safety_checker(pipeline):
        lines.append(
            "# diffusers builds a safety checker, which needs its package, unless you pass safety_checker=...:"
        )
    lines.append(f"pipe = {name}.from_pretrained({', '.join(arguments)})")
    if lora:
        name = json.dumps(str(exported))
        # If the pipeline class has no LoRA loader, use the network's loader, or add a loader to the network.
        has_loader = hasattr(pipeline_class, "load_lora_weights")
        loader = "load_lora_weights" if has_loader else f"{LORA_PREFIX}.load_lora_adapter"
        if not has_loader and (network := _network_without_loader(pipeline)) is not None:
            lines.append("from diffusers.loaders import PeftAdapterMixin  # the network class does not have it")
            bases = f"(type(pipe.{LORA_PREFIX}), PeftAdapterMixin)"
            lines.append(f'pipe.{LORA_PREFIX}.__class__ = type("{network}", {bases}, {{}})')
        for part, file in LORA_FILES.items():
            if (exported / file).exists():
                part_argument = "" if part == LORA_PREFIX else f", load_into_{part}=True"
                lines.append(f'pipe.{loader}({name}, weight_name="{file}", adapter_name="default"{part_argument})')
            if (exported / WHOLE_LAYER_FILES[part]).exists():
                layers_file = json.dumps(str(exported / WHOLE_LAYER_FILES[part]))
                lines.append("from safetensors.torch import load_file  # the fully trained layers")
                lines.append(f"pipe.{part}.load_state_dict(load_file({layers_file}), strict=False)")
        for component, file in REPLACEABLE_CONFIGS.items():
            if (exported / file).exists():
                class_name = json.loads((exported / file).read_text(encoding="utf-8"))["_class_name"]
                lines.append(f"from diffusers import {class_name}")
                lines.append(f"pipe.{component} = {class_name}.from_pretrained({name})")
    if (exported / CALL_FILE).exists() and read_call_json(exported) != read_call_json(base):
        lines.append(f"# pass the call arguments in {exported / CALL_FILE}, with which it was trained")
    return "\n".join(lines)


def _network_without_loader(pipeline: Path) -> str | None:
    """Return the denoiser's class name if this class cannot load a LoRA in diffusers, and otherwise None."""
    import diffusers

    _, class_name = pipeline_components(read_index(pipeline)).get(LORA_PREFIX, (None, None))
    network = getattr(diffusers, str(class_name), None)
    return class_name if network is not None and not hasattr(network, "load_lora_adapter") else None


def _components_to_disable(pipeline: Path) -> list[str]:
    """Return the components that must be passed as None, because the folder lacks them, such as SD3's T5."""
    index = read_index(pipeline)
    optional = getattr(resolve_pipeline_class(index), "_optional_components", [])
    return [
        name
        for name, (_, class_name) in pipeline_components(index).items()
        if class_name is None and name not in optional
    ]


def _builds_safety_checker(pipeline: Path) -> bool:
    """Return whether diffusers creates a safety checker that the folder does not contain (Cosmos-Predict2.5)."""
    index = read_index(pipeline)
    parameters = inspect.signature(resolve_pipeline_class(index)).parameters
    return SAFETY_CHECKER in parameters and pipeline_components(index).get(SAFETY_CHECKER, (None, None))[1] is None
