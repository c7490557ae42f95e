"""Run the checks of training/preflight.py on a recipe one by one, then check memory and disk space."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import psutil
import torch

from wfm_ds.algorithms import engine_policy_copies
from wfm_ds.cli.doctor.finding import DoctorFinding, run_check
from wfm_ds.data.datasets import load_data
from wfm_ds.distributed.accelerator import uses_cuda
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.errors import UserError
from wfm_ds.memory.advice import SAFE_FRACTION, fits_memory, suggest_keys
from wfm_ds.memory.estimate import MemoryEstimate, estimate_memory
from wfm_ds.models.assets.meta_loading import load_on_meta_device
from wfm_ds.monitoring.meters import GIB
from wfm_ds.recipe.deepspeed import build_deepspeed_config
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.check_report import start_summary
from wfm_ds.runs.model_loading import find_family
from wfm_ds.runs.output_folder import find_run_start
from wfm_ds.runs.storage_copies import require_writable_storage
from wfm_ds.storage.filesystem import ACCESS_KEY, ENDPOINT, REGION, SECRET_KEY, existing_parent
from wfm_ds.training import language_builder, preflight
from wfm_ds.training.reward_checks import check_rewards

STORAGE_ADVICE = (
    f"create the bucket, and set {ACCESS_KEY}, {SECRET_KEY}, {ENDPOINT} and {REGION}, or AWS's own variables, to "
    "credentials that may list, read, write and delete there"
)


def recipe_findings(recipe: Recipe, world_size: int) -> Iterator[DoctorFinding]:
    """Check a recipe and yield the findings in the order in which to fix them.

    Starts the reward service if a run would start it. Writes only a temporary object at checkpoint.storage.
    """
    yield from (DoctorFinding("recipe", "warning", doubt) for doubt in recipe.algorithm.list_warnings())
    yield from (DoctorFinding("hosts", "warning", doubt) for doubt in preflight.host_warnings(recipe, world_size))
    yield run_check("batch", lambda: batch_summary(recipe, world_size))
    if recipe.algorithm.trains_language:
        yield run_check("model and data", lambda: language_builder.language_summary(recipe))
        yield from storage_findings(recipe, world_size)
        return
    yield run_check("model", lambda: f"{recipe.model.path}, family {find_family(recipe).family}")
    data = run_check("data", lambda: data_summary(recipe))
    yield data
    if data.level == "ok":
        yield from (
            DoctorFinding("prompts", "warning", doubt)
            for doubt in preflight.prompt_choice_warnings(recipe, load_data(recipe))
        )
    if recipe.all_reward_settings is not None and data.level == "ok":
        yield run_check("rewards", lambda: reward_summary(recipe))
    yield from storage_findings(recipe, world_size)
    try:
        sizes = estimate_from_config(recipe, world_size)
    except UserError as error:
        yield DoctorFinding("memory", "warning", f"cannot be estimated: {error}")
    else:
        yield memory_finding(recipe, sizes)
        yield disk_finding(recipe, sizes)


def storage_findings(recipe: Recipe, world_size: int) -> Iterator[DoctorFinding]:
    yield run_check("output", lambda: start_summary(find_run_start(recipe, world_size)))
    if recipe.checkpoint.storage is not None:
        yield run_check("storage", lambda: storage_summary(recipe), STORAGE_ADVICE)


def batch_summary(recipe: Recipe, world_size: int) -> str:
    derived = derive_run_sizes(recipe, world_size)
    policies = engine_policy_copies(recipe)
    build_deepspeed_config(
        recipe, accumulation=derived.accumulation, policies=policies, world_size=world_size, ranks_per_node=world_size
    )
    return f"{derived.samples_per_step} samples a step, {derived.samples_per_rank} on each of {derived.replicas_text}"


def data_summary(recipe: Recipe) -> str:
    data = load_data(recipe)
    num_samples = "a stream of" if recipe.data.streaming else len(data.samples)
    return f"{len(data.prompts)} prompts, {num_samples} samples, {len(data.held_out)} held out"


def reward_summary(recipe: Recipe) -> str:
    check_rewards(preflight.limit_service_wait(recipe), load_data(recipe))
    preflight.require_reachable_rewards(recipe)
    preflight.check_spawned_rewards(recipe)
    functions = recipe.all_reward_settings.functions if recipe.all_reward_settings is not None else []
    return f"{', '.join(function.name for function in functions)}: ready"


def storage_summary(recipe: Recipe) -> str:
    assert recipe.checkpoint.storage is not None
    require_writable_storage(recipe)
    return f"{recipe.checkpoint.storage} is writable and readable"


# ---- memory and disk space


def estimate_from_config(recipe: Recipe, world_size: int) -> MemoryEstimate:
    """Estimate memory and disk space from the pipeline's configuration, without loading weights. Raises UserError."""
    settings = recipe.model
    model = load_on_meta_device(
        settings.path,
        dtype=DTYPES[settings.dtype],
        user_family=settings.family,
        revision=settings.revision,
        max_sequence_length=settings.max_sequence_length,
        fps=recipe.sampling.fps,
        inputs=recipe.data.inputs,
        embedded_guidance=settings.embedded_guidance,
        source_size=recipe.data.source_size,
    )
    device = "cuda" if uses_cuda() else "cpu"
    is_uncached = recipe.data.cache_text == "off" and recipe.data.cache_dir is None
    keeps_encoders = is_uncached or recipe.data.streaming or bool(model.text_inputs)
    return estimate_memory(recipe, model, world_size, device=device, keeps_encoders=keeps_encoders)


def memory_finding(recipe: Recipe, sizes: MemoryEstimate) -> DoctorFinding:
    if uses_cuda():
        free, needed = torch.cuda.mem_get_info()[0], sizes.peak_bytes
        device = "on a GPU"
    else:
        free, needed = psutil.virtual_memory().available, sizes.peak_bytes * sizes.world_size
        device = f"on this machine for {sizes.world_size} ranks"
    phase = sizes.phases[sizes.peak_phase]
    parts = ", ".join(f"{phase[part] / GIB:.2f} {part}" for part in sorted(phase, key=lambda name: -phase[name])[:4])
    text = (
        f"estimated peak {needed / GIB:.2f} GiB, free {free / GIB:.2f} GiB {device}; a rank in the phase "
        f"{sizes.peak_phase}: {parts}"
    )
    if fits_memory(needed, free) and needed <= SAFE_FRACTION * free:
        return DoctorFinding("memory", "ok", text)
    keys = suggest_keys(recipe, sizes)
    if not fits_memory(needed, free):
        return DoctorFinding("memory", "error", text, f"change {', '.join(keys)}")
    return DoctorFinding("memory", "warning", text, f"little margin: consider {', '.join(keys[:2])}")


def disk_finding(recipe: Recipe, sizes: MemoryEstimate) -> DoctorFinding:
    existing = existing_parent(recipe.run.output_dir.absolute())
    free = shutil.disk_usage(existing).free
    settings = recipe.checkpoint
    exports = 1 + (recipe.run.steps // settings.export_every if settings.export_every else 0)
    needed = (settings.keep + 1) * sizes.checkpoint_bytes + exports * sizes.export_bytes
    text = (
        f"{needed / GIB:.2f} GiB for {settings.keep + 1} checkpoints and {exports} exports, {free / GIB:.2f} GiB free "
        f"at {existing}"
    )
    if needed > free:
        return DoctorFinding(
            "disk space", "error", text, "lower checkpoint.keep, raise checkpoint.export_every, or move run.output_dir"
        )
    return DoctorFinding("disk space", "ok", text)
