"""Detects models and LoRAs that were distilled to few denoising steps without guidance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wfm_ds.models.assets.loading import read_call_defaults, read_json
from wfm_ds.models.assets.released_repos import FEW_STEP_REPOS

if TYPE_CHECKING:
    from wfm_ds.models.base import DiffusionModel

MAX_FEW_STEPS = 6  # a model without guidance counts as distilled if it needs at most this number of steps
FLUX2_STEPS = 4  # steps of the distilled FLUX.2-klein, which has is_distilled in its model_index.json


def find_few_steps(path: str, folder: Path, family: type[DiffusionModel]) -> int | None:
    """Return the number of denoising steps that a model was distilled to, or None if it was not distilled.

    path: value of model.path. folder: local folder with model_index.json.
    """
    index = read_json(folder / "model_index.json")
    steps = FEW_STEP_REPOS.get(path) or read_few_steps(folder, family, index)
    if steps is None and index.get("is_distilled"):
        return FLUX2_STEPS
    return steps


def read_few_steps(folder: Path, family: type[DiffusionModel], index: Mapping[str, Any]) -> int | None:
    """Return the number of denoising steps in the call.json of a model or LoRA.

    Returns None if call.json is missing, does not disable guidance, or sets more than MAX_FEW_STEPS steps.
    index: content of model_index.json.
    """
    call = read_call_defaults(folder)
    steps, scale = call.get("num_inference_steps"), call.get(family.guidance_arguments[0])
    if not isinstance(steps, int) or steps > MAX_FEW_STEPS or not isinstance(scale, int | float):
        return None
    return steps if family.default_guidance_scale(index, call) <= 1 else None
