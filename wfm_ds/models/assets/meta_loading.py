"""Loads pipelines on torch's meta device, where networks have shapes but no values. Only config files are read."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from wfm_ds.models import registry
from wfm_ds.models.assets.loading import (
    check_components,
    read_json,
    read_max_sequence_length,
    resolve_component_class,
    resolve_network_class,
    resolve_pipeline_class,
    resolve_pipeline_network,
    translate_loading_errors,
)
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.source_images import SourceSize
from wfm_ds.recipe.shared_defaults import DEFAULT_FPS

META_DEVICE = torch.device("meta")


def load_on_meta_device(
    path: str | Path,
    *,
    dtype: torch.dtype,
    user_family: str | None = None,
    revision: str | None = None,
    max_sequence_length: int | None = None,
    fps: float = DEFAULT_FPS,
    inputs: Collection[str] = (),
    embedded_guidance: float | None = None,
    source_size: SourceSize = "target",
) -> DiffusionModel:
    """Load a pipeline on the meta device, without weights and tokenizers. The pipeline cannot encode text.

    Raises ModelError if the pipeline is missing or unsupported, if a config is invalid, or if the network does not
    support `embedded_guidance`.
    """
    folder = registry.resolve_pipeline(path, user_family, revision, weights=False)
    family = registry.find_family(folder, user_family)
    registry.check_embedded_guidance(family, folder, embedded_guidance)
    family.check_folder(folder)
    index = read_json(folder / "model_index.json")
    replaced = family.placeholder_components() | ({"safety_checker": nn.Identity()} if family.has_guardrail else {})
    check_components(folder, index, replaced)
    pipeline_class: Any = resolve_pipeline_class(index)
    accepted = list(inspect.signature(pipeline_class.__init__).parameters)[1:]
    parts: dict[str, Any] = {name: None for name in accepted if name not in index or isinstance(index[name], list)}
    parts |= {name: value for name, value in index.items() if name in accepted and not isinstance(value, list)}
    with translate_loading_errors(folder):
        parts |= {
            name: build_meta_component(folder / name, index[name])
            for name in parts
            if isinstance(index.get(name), list) and name not in replaced
        }
        parts |= replaced
        pipeline = pipeline_class(**parts)
    return family(
        pipeline,
        folder,
        dtype=dtype,
        device=META_DEVICE,
        max_sequence_length=max_sequence_length or read_max_sequence_length(folder),
        fps=fps,
        inputs=inputs,
        embedded_guidance=embedded_guidance,
        source_size=source_size,
    )


def build_meta_component(folder: Path, entry: list[str | None]) -> Any:
    """Build a network on the meta device, or a scheduler, from an entry of model_index.json.

    Returns None for other entries, such as tokenizers.
    """
    network = resolve_network_class(entry) or resolve_pipeline_network(entry)
    if network is None:
        member: Any = resolve_component_class(entry)
        is_scheduler = member is not None and issubclass(member, diffusers.SchedulerMixin)
        return member.from_pretrained(folder) if is_scheduler else None
    network_class: Any = network
    with META_DEVICE:
        if issubclass(network_class, diffusers.ModelMixin):
            return network_class.from_config(read_json(folder / "config.json"))
        return network_class(network_class.config_class.from_pretrained(folder, local_files_only=True))
