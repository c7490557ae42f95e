"""Read the defaults and requirements of a model that its recipe needs, without loading weights."""

from __future__ import annotations

import inspect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineSummary:
    """Default sample size, guidance scale and inputs of a diffusers pipeline."""

    path: str
    title: str
    is_video: bool
    height: int
    width: int
    num_frames: int
    guidance_scale: float
    needs_image: bool = False
    inputs: tuple[str, ...] = ()  # required conditioning inputs
    optional_inputs: tuple[str, ...] = ()
    revision: str | None = None
    num_steps: int | None = None  # denoising steps of a few-step model
    needs_no_guardrail: bool = False  # a tiny model of a family that has a guardrail
    has_experts: bool = False  # two networks for high and low noise
    has_fixed_shift: bool = True  # False: a scheduler whose noise levels have no timestep shift


@dataclass(frozen=True, slots=True)
class LanguageModelSummary:
    path: str
    title: str


def read_pipeline(path: str) -> PipelineSummary:
    from wfm_ds.models import registry
    from wfm_ds.models.assets.few_steps import find_few_steps
    from wfm_ds.models.assets.loading import read_call_defaults, read_json, resolve_pipeline_class
    from wfm_ds.models.assets.released_repos import RELEASED_REPOS
    from wfm_ds.recipe.tiny import TINY_PREFIX

    revision = RELEASED_REPOS.get(path)
    folder = registry.resolve_pipeline(path, revision=revision, weights=False)
    family = registry.find_family(folder)
    index = read_json(folder / "model_index.json")
    name = index["_class_name"]
    parameters = inspect.signature(resolve_pipeline_class(index).__call__).parameters
    call = {key: parameter.default for key, parameter in parameters.items()} | read_call_defaults(folder)
    has_size = call.get("height") is not None
    side = None if has_size else family.default_image_size
    if side is None and not has_size:  # the pipeline computes its default size like this
        side = read_json(folder / "transformer" / "config.json")["sample_size"]
        side *= 2 ** (len(read_json(folder / "vae" / "config.json")["block_out_channels"]) - 1)
    frames = call.get("num_frames", call.get("frames", 1)) if family.is_video else 1
    specs, num_steps = family.input_specs, find_few_steps(path, folder, family)
    return PipelineSummary(
        path=path,
        title=f"{path} ({family.family}, {name})",
        is_video=family.is_video,
        height=side or call["height"],
        width=side or call["width"],
        num_frames=frames,
        guidance_scale=1.0 if num_steps is not None else family.default_guidance_scale(index, call),
        needs_image=family.needs_first_frame(folder),
        inputs=tuple(name for name, spec in specs.items() if spec.required),
        optional_inputs=tuple(name for name, spec in specs.items() if not spec.required),
        revision=revision,
        num_steps=num_steps,
        needs_no_guardrail=family.has_guardrail and path.startswith(TINY_PREFIX),
        has_experts=any(index.get("transformer_2") or ()),
        has_fixed_shift=not read_json(folder / "scheduler" / "scheduler_config.json").get("use_karras_sigmas"),
    )


def read_language_model(path: str) -> LanguageModelSummary:
    from wfm_ds.language.model import check_config
    from wfm_ds.models.assets.language_folders import locate_language_model

    return LanguageModelSummary(path, f"{path} ({check_config(locate_language_model(path)).model_type})")
