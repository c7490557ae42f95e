"""Defaults of sampling options from call.json, a file in exports and in some pipeline folders."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wfm_ds.cli.sampling_options import check_options
from wfm_ds.errors import UserError
from wfm_ds.export.pipeline_folder import CALL_FILE, SCHEDULER_FILE, SCHEDULER_FOLDER, read_index
from wfm_ds.models import registry
from wfm_ds.models.assets.loading import read_call_defaults, read_json, read_max_sequence_length
from wfm_ds.models.assets.released_repos import FEW_STEP_REPOS
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.even_scheduler import even_levels, find_even_shift
from wfm_ds.recipe.shared_defaults import DEFAULT_EVAL_STEPS, DEFAULT_GUIDANCE_SCALE

MAX_STEPS = 10_000  # as in recipes
LEVEL_TOLERANCE = 1e-6  # call.json may have rounded levels


def fill_from_call(args: argparse.Namespace, repo: str, pipeline: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """Set the sampling options that the user omitted, and return the content of call.json (see read_call_defaults).

    repo: the base model as the user named it. pipeline: folder of the base model. folders: LoRA and pipeline folders;
    the first one with a call.json is used. An option that call.json does not set gets the default of recipes, except
    that --steps of a released few-step model becomes the number of steps for which the model was distilled.

    Raises UserError for invalid values in call.json or in the scheduler's config, and for contradictory options.
    """
    folder = next((folder for folder in folders if (folder / CALL_FILE).is_file()), pipeline)
    call = read_call_defaults(folder)
    family, index = registry.find_family(pipeline, args.family), read_index(pipeline)
    try:
        settings = read_levels(call)
        settings |= read_scheduler(folder, settings.get("steps", 0)) | read_guidance(call, family, index)
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder / CALL_FILE}: {error}; correct it") from error
    if args.shift is None and args.grid != "stock":
        args.shift = settings.get("shift")
    if args.guidance is None and args.guidance_low is None:
        args.guidance_low = settings.get("guidance_low")
    steps = FEW_STEP_REPOS.get(repo, DEFAULT_EVAL_STEPS)
    for name, default in (("steps", steps), ("grid", "stock"), ("guidance", DEFAULT_GUIDANCE_SCALE)):
        if getattr(args, name) is None:
            setattr(args, name, settings.get(name, default))
    if args.solver is None and args.grid == "even" and args.steps > 1:
        args.solver = settings.get("solver")
    if args.max_sequence_length is None:
        args.max_sequence_length = read_max_sequence_length(folder)
    negative = call.get("negative_prompt")
    if args.negative_prompt is None and args.guidance > 1:
        if not isinstance(negative, str | None):
            raise UserError(f"{folder / CALL_FILE}: negative_prompt must be a text, got {negative!r}; correct it")
        args.negative_prompt = negative
    has_guidance = args.embedded_guidance is None and call.get("guidance_scale") is not None
    if has_guidance and family.has_embedded_guidance(pipeline):
        args.embedded_guidance = require_number(folder / CALL_FILE, call, "guidance_scale", 0, math.inf)
    check_options(args)
    return call


def read_levels(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return {option: value} of the options steps and grid that call.json sets.

    Raises ValueError or TypeError if the noise levels are not evenly spaced or the number of steps is invalid.
    """
    sigmas = call.get("sigmas")
    steps = call.get("num_inference_steps") if sigmas is None else len(sigmas)
    if steps is None:
        return {}
    if type(steps) is not int or not 0 < steps <= MAX_STEPS:
        raise ValueError(f"num_inference_steps must be an integer from 1 to {MAX_STEPS}, got {steps!r}")
    if sigmas is None:
        return {"steps": steps}
    pairs = zip(sigmas, even_levels(steps), strict=True)
    if not all(math.isclose(sigma, level, abs_tol=LEVEL_TOLERANCE) for sigma, level in pairs):
        raise ValueError(f"sigmas must be the evenly spaced levels 1, (N - 1)/N, .. 1/N of N steps, got {sigmas}")
    return {"steps": steps, "grid": "even"}


def read_scheduler(folder: Path, steps: int) -> dict[str, Any]:
    """Return {option: value} of the options grid, shift and solver that reproduce an exported scheduler.

    folder: LoRA or pipeline folder. steps: number of steps in call.json. Grid and shift are returned only if the
    scheduler's noise levels are evenly spaced before the shift. The solver (`cps`) is returned only if the scheduler
    adds noise. Raises UserError for invalid numbers in the scheduler's config.
    """
    lora_file, pipeline_file = folder / SCHEDULER_FILE, folder / SCHEDULER_FOLDER / SCHEDULER_FILE
    file = lora_file if lora_file.is_file() else pipeline_file
    config = read_json(file) if file.is_file() else {}
    solver = {"solver": "cps"} if config.get("stochastic_sampling") else {}
    if config.get("use_dynamic_shifting"):
        return solver
    own_shift = None if config.get("shift") is None else require_number(file, config, "shift", 0, math.inf)
    shift = None
    if config.get("shift_terminal"):
        require_number(file, config, "shift_terminal", 0, 1)
        require_number(file, config, "num_train_timesteps", 1, math.inf)
        shift = find_even_shift(config, steps)
    if shift is None and file == lora_file:  # without shift_terminal, or for a single step
        shift = own_shift
    return solver if shift is None else {"grid": "even", "shift": shift, **solver}


def require_number(file: Path, config: Mapping[str, Any], name: str, low: float, high: float) -> float:
    value: Any = config.get(name)
    if type(value) not in (int, float) or not low < value < high:
        bounds = f"above {low}" if high == math.inf else f"between {low} and {high}"
        raise UserError(f"{file}: {name} must be a number {bounds}, got {value!r}; correct it")
    return float(value)


def read_guidance(call: Mapping[str, Any], family: type[DiffusionModel], index: Mapping[str, Any]) -> dict[str, Any]:
    """Return {option: value} of the guidance scales that call.json sets.

    index: model_index.json of the pipeline. Raises ValueError or TypeError for a value that is not a number.
    """
    first, *others = family.guidance_arguments
    if call.get(first) is None:
        return {}
    scales = [family.default_guidance_scale(index, call), *(float(call[name]) for name in others if call.get(name))]
    if not all(math.isfinite(scale) for scale in scales):
        raise ValueError(f"{first} must be a number, got {call[first]!r}")
    # diffusers disables guidance for scales below 1
    return dict(zip(("guidance", "guidance_low"), (max(1.0, scale) for scale in scales), strict=False))
