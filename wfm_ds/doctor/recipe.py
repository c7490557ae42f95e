"""Checks of a recipe: the checks of training/preflight.py one by one, memory, and disk space."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import psutil
import torch

from wfm_ds.algorithms import engine_policies
from wfm_ds.data.datasets import load_data
from wfm_ds.distributed.accelerator import uses_cuda
from wfm_ds.doctor.finding import Finding, attempt
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.errors import UserError
from wfm_ds.models.empty import load_empty
from wfm_ds.monitoring.stopwatch import GIB
from wfm_ds.recipe.deepspeed import deepspeed_config
from wfm_ds.recipe.derived import derive
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.estimate import Estimate, estimate
from wfm_ds.run.fit import ROOMY, advice, fits
from wfm_ds.run.folder import find_start
from wfm_ds.run.model import family_of
from wfm_ds.run.stored import require_storage
from wfm_ds.storage.filesystem import ACCESS_KEY, ENDPOINT, REGION, SECRET_KEY
from wfm_ds.training import language_build, preflight

SERVICE_TIMEOUT_S = 15.0  # for a reward service that is already running; one started here has the recipe's timeout
STORAGE_ADVICE = (
    f"create the bucket, and set {ACCESS_KEY}, {SECRET_KEY}, {ENDPOINT} and {REGION}, or AWS's own variables, to "
    "credentials that may list, read, write and delete there"
)


def recipe_findings(recipe: Recipe, world_size: int) -> Iterator[Finding]:
    """Yield the findings in the order in which to fix them. Starts the reward service if the recipe does.

    Writes nothing except a temporary object at checkpoint.storage.
    """
    yield from (Finding("recipe", "warning", doubt) for doubt in recipe.algorithm.doubts())
    yield attempt("batch", lambda: batch(recipe, world_size))
    if recipe.algorithm.trains_language:
        yield attempt("model and data", lambda: language_build.summary(recipe))
        yield from places(recipe, world_size)
        return
    yield attempt("model", lambda: f"{family_of(recipe).__name__}")
    data = attempt("data", lambda: data_text(recipe))
    yield data
    if data.level == "ok":
        yield from (
            Finding("prompts", "warning", doubt) for doubt in preflight.choice_doubts(recipe, load_data(recipe))
        )
    if recipe.scoring is not None and data.level == "ok":
        yield attempt("rewards", lambda: reward_text(recipe))
    yield from places(recipe, world_size)
    try:
        sizes = estimated(recipe, world_size)
    except UserError as error:
        yield Finding("memory", "warning", f"cannot be estimated: {error}")
    else:
        yield memory_finding(recipe, sizes)
        yield space_finding(recipe, sizes)


def places(recipe: Recipe, world_size: int) -> Iterator[Finding]:
    """Yield findings about the output folder and checkpoint.storage."""
    yield attempt("output", lambda: preflight.beginning(find_start(recipe, world_size)))
    if recipe.checkpoint.storage is not None:
        yield attempt("storage", lambda: storage_text(recipe), STORAGE_ADVICE)


def batch(recipe: Recipe, world_size: int) -> str:
    derived = derive(recipe, world_size)
    policies = engine_policies(recipe)
    deepspeed_config(
        recipe,
        accumulation=derived.accumulation,
        policies=policies,
        world_size=world_size,
        ranks_per_node=world_size,
    )
    return f"{derived.samples_per_step} samples a step, {derived.samples_per_rank} on each of {derived.replicas}"


def data_text(recipe: Recipe) -> str:
    data = load_data(recipe)
    num_samples = "a stream of" if recipe.data.streaming else len(data.samples)
    return f"{len(data.prompts)} prompts, {num_samples} samples, {len(data.held_out)} held out"


def reward_text(recipe: Recipe) -> str:
    reward = recipe.reward
    if reward is not None and reward.endpoint is not None:
        reward = reward.model_copy(update={"start_timeout_s": min(SERVICE_TIMEOUT_S, reward.start_timeout_s)})
        recipe = recipe.model_copy(update={"reward": reward})
    data = load_data(recipe)
    preflight.check_rewards(recipe, list({p.id: p for p in [*data.prompts, *data.shown]}.values()))
    preflight.check_spawned_rewards(recipe)
    functions = recipe.scoring.functions if recipe.scoring is not None else []
    return f"{', '.join(function.name for function in functions)}: ready"


def storage_text(recipe: Recipe) -> str:
    assert recipe.checkpoint.storage is not None
    require_storage(recipe)
    return f"{recipe.checkpoint.storage} is writable and readable"


# ---- memory and disk space


def estimated(recipe: Recipe, world_size: int) -> Estimate:
    """Estimate memory and disk space from the pipeline's configuration, without loading weights. Raises UserError."""
    settings = recipe.model
    model = load_empty(
        settings.path,
        dtype=DTYPES[settings.dtype],
        own_family=settings.family,
        revision=settings.revision,
        max_sequence_length=settings.max_sequence_length,
        fps=recipe.sampling.fps,
        inputs=recipe.data.inputs,
        embedded_guidance=settings.embedded_guidance,
    )
    device = "cuda" if uses_cuda() else "cpu"
    is_uncached = recipe.data.cache_text == "off" and recipe.data.cache_dir is None
    keeps_encoders = is_uncached or recipe.data.streaming
    return estimate(recipe, model, world_size, device=device, keeps_encoders=keeps_encoders)


def memory_finding(recipe: Recipe, sizes: Estimate) -> Finding:
    """Compare the estimated peak of a rank with free GPU memory; on CPUs, of all ranks with free host memory."""
    if uses_cuda():
        free, needed = torch.cuda.mem_get_info()[0], sizes.peak
        device = "on a GPU"
    else:
        free, needed = psutil.virtual_memory().available, sizes.peak * sizes.world_size
        device = f"on this machine for {sizes.world_size} ranks"
    phase = sizes.phases[sizes.peak_phase]
    parts = ", ".join(f"{phase[part] / GIB:.2f} {part}" for part in sorted(phase, key=lambda name: -phase[name])[:4])
    text = (
        f"estimated peak {needed / GIB:.2f} GiB, free {free / GIB:.2f} GiB {device}; a rank in the phase "
        f"{sizes.peak_phase}: {parts}"
    )
    if not fits(needed, free):
        return Finding("memory", "error", text, f"change {', '.join(advice(recipe, sizes))}")
    if needed > ROOMY * free:
        return Finding("memory", "warning", text, f"little margin: consider {', '.join(advice(recipe, sizes)[:2])}")
    return Finding("memory", "ok", text)


def space_finding(recipe: Recipe, sizes: Estimate) -> Finding:
    """Compare the free disk space with checkpoint.keep + 1 checkpoints (one is being written) and all exports."""
    folder = recipe.run.output_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    settings = recipe.checkpoint
    exports = 1 + (recipe.run.steps // settings.export_every if settings.export_every else 0)
    needed = (settings.keep + 1) * sizes.checkpoint_bytes + exports * sizes.export_bytes
    text = (
        f"{needed / GIB:.2f} GiB for {settings.keep + 1} checkpoints and {exports} exports, {free / GIB:.2f} GiB free "
        f"at {existing}"
    )
    if needed > free:
        return Finding(
            "disk space", "error", text, "lower checkpoint.keep, raise checkpoint.export_every, or move run.output_dir"
        )
    return Finding("disk space", "ok", text)
