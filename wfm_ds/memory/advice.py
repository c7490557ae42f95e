"""Compares a memory estimate with a GPU, explains failed allocations, and suggests recipe keys that save memory."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch

from wfm_ds.errors import RunError, UserError, is_out_of_memory
from wfm_ds.export.pipeline_folder import pipeline_components, read_index
from wfm_ds.memory.estimate import MemoryEstimate
from wfm_ds.models.registry import locate_pipeline
from wfm_ds.monitoring.meters import GIB
from wfm_ds.recipe.schema import Recipe
from wfm_ds.ulysses.install import ulysses_families

GPU_SIZES_GB = (24, 32, 40, 48, 80, 141, 192)  # memory sizes of GPUs in GB
USABLE_FRACTION = 0.92  # fraction of GPU memory for tensors; the CUDA context, libraries and fragmentation use the rest
SAFE_FRACTION = 0.8  # up to this fraction of GPU memory, a slightly larger batch still fits

# Memory categories of the estimate, cheapest to reduce first.
PARTS_BY_COST = (
    *("activations", "decoding beside it", "merged weights", "text encoders", "VAE"),
    *("optimizer states", "policies", "gradients", "weights"),
)
SIZE_KEYS = "sampling.height, width or num_frames"
REQUEST_PATTERN = re.compile(r"ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
UNIT_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}


def estimate_phase(phase: str) -> str:
    """Convert a phase of Stopwatch, such as "rollout", to a key of MemoryEstimate.phases, such as "sampling".

    Other names are returned unchanged.
    """
    if phase in ("rollout", "validation"):
        return "sampling"
    if phase.endswith("_forward") and phase != "group_statistics_forward":  # group statistics use training batches
        return "references"
    return "train" if phase.endswith("_train") else phase  # NAME_train is the training of an extra adapter


def fits_memory(needed: int, memory: int) -> bool:
    return needed <= USABLE_FRACTION * memory


def smallest_gpu(needed: int) -> int | None:
    """Return the memory in GB of the smallest common GPU type with at least `needed` bytes, or None."""
    return next((size for size in GPU_SIZES_GB if fits_memory(needed, size * 10**9)), None)


def suggest_keys(recipe: Recipe, estimate: MemoryEstimate) -> list[str]:
    """Return recipe keys that reduce the peak memory. Keys for the largest memory category come first."""
    if recipe.algorithm.trains_language:
        return suggest_language_keys(recipe)
    phase = estimate.phases[estimate.peak_phase]
    keys: list[str] = []
    for part in sorted(phase, key=lambda name: -phase[name]):
        keys += [key for key in suggest_part_keys(part, estimate.peak_phase, recipe) if key not in keys]
    return keys


def suggest_keys_after_oom(recipe: Recipe, phase: str, num_ranks: int) -> list[str]:
    """Return recipe keys that reduce the memory of a run after an out-of-memory error, cheapest first.

    phase: the stopwatch phase in which the error occurred, or "" if it is unknown. num_ranks: number of ranks per
    machine.
    """
    keys: list[str] = []
    if recipe.algorithm.trains_language:
        return suggest_language_keys(recipe)
    for part in PARTS_BY_COST:
        keys += [key for key in suggest_part_keys(part, estimate_phase(phase), recipe) if key not in keys]
    exhausted = [f"engine.deepspeed: {recipe.engine.deepspeed}"]
    if recipe.engine.sequence_parallel == num_ranks:
        exhausted += [f"engine.sequence_parallel above {recipe.engine.sequence_parallel}"]
    return [key for key in keys if key not in exhausted]


def suggest_language_keys(recipe: Recipe) -> list[str]:
    engine, model = recipe.engine, recipe.model
    return [
        *(["model.dtype: bfloat16"] if model.dtype == "float32" else []),
        *(["engine.deepspeed: zero3"] if engine.deepspeed != "zero3" else []),
        *([] if model.gradient_checkpointing else ["model.gradient_checkpointing: true"]),
        *(["engine.micro_batch_size: 1"] if engine.micro_batch_size > 1 else []),
        f"data.max_tokens below {recipe.data.max_tokens}",
        *(["a lora section"] if recipe.lora is None else []),
    ]


def suggest_part_keys(part: str, phase: str, recipe: Recipe) -> list[str]:
    engine, model, lora = recipe.engine, recipe.model, recipe.lora
    denoiser_dtype_keys = ["model.dtype: bfloat16"] if model.dtype == "float32" else []
    vae_dtype_keys = ["model.vae_dtype: bfloat16"] if model.vae_dtype == "float32" else []
    adapters = ["a lora section"] if lora is None else [f"lora.rank below {lora.rank}"] if lora.rank > 1 else []
    if part == "activations":
        return suggest_activation_keys(phase, recipe, denoiser_dtype_keys, vae_dtype_keys)
    if part == "decoding beside it" and phase == "sampling":
        return [*vae_dtype_keys, SIZE_KEYS]
    if part == "merged weights" and phase == "sampling" and recipe.is_rl and recipe.rl.rollout.merge_lora:
        return ["rollout.merge_lora: false"]
    if part == "VAE":
        return vae_dtype_keys
    if part == "weights":
        merges = recipe.is_rl and recipe.rl.rollout.merge_lora
        plain = lora is not None and model.base_precision is None and not merges
        frozen = ["model.base_precision: fp8"] if plain else []
        return [
            *denoiser_dtype_keys,
            "engine.deepspeed: zero3" if "zero3" not in engine.deepspeed else "more ranks",
            *frozen,
        ]
    offload = [] if recipe.algorithm.list_teachers() else ["engine.deepspeed: zero3_offload"]  # not supported together
    if part == "gradients":  # ZeRO-2 already shards them
        shared = ["engine.deepspeed: zero2"] if "zero1" in engine.deepspeed else []
        return [*adapters, *shared, *offload, "more ranks"]
    if part in ("optimizer states", "policies"):
        average = ["no ema section"] if part == "policies" and recipe.ema is not None else []
        eight_bits = part == "optimizer states" and lora is None and recipe.optimizer.name == "adamw"
        moments = ["optimizer.name: adamw8bit"] if eight_bits else []
        return [*adapters, *average, *moments, *offload, "more ranks"]
    if part in ("DeepSpeed", "gathered weights"):
        return ["reduce_bucket_size and stage3_max_reuse_distance of the DeepSpeed JSON"]
    if part == "text encoders" and phase != "texts":
        return ["data.cache_text: auto"]
    if part in ("rollouts", "texts"):
        return ["rollout.prompts_per_step, or more ranks"] if recipe.is_rl else []
    return []


def suggest_activation_keys(
    phase: str, recipe: Recipe, denoiser_dtype_keys: list[str], vae_dtype_keys: list[str]
) -> list[str]:
    """Return recipe keys that reduce the activation memory of this phase.

    denoiser_dtype_keys, vae_dtype_keys: keys that give the denoiser or the VAE a smaller dtype.
    """
    engine, several = recipe.engine, recipe.engine.micro_batch_size > 1
    terms = [f"engine.micro_batch_size below {engine.micro_batch_size}"] if several else []
    if phase == "train":
        checkpointing = [] if recipe.model.gradient_checkpointing is True else ["model.gradient_checkpointing: true"]
        return [*checkpointing, *terms, *denoiser_dtype_keys, *suggest_sharding(recipe)]
    if phase in ("sampling", "references"):
        keys = []
        if phase == "sampling":
            keys += ["sampling.guidance_batch: separate"] if recipe.joint_guidance_batches else []
            keys += ["rollout.cuda_graph: false"] if recipe.is_rl and recipe.rl.rollout.cuda_graph else []
        batch = [f"engine.max_forward_batch below {engine.max_forward_batch}"] if engine.max_forward_batch > 1 else []
        return [*keys, *batch, *denoiser_dtype_keys, *suggest_sharding(recipe)]
    if phase in ("decode", "encode"):
        return [*vae_dtype_keys, *(terms if phase == "encode" else []), SIZE_KEYS]
    return []


def suggest_sharding(recipe: Recipe) -> list[str]:
    """Return the recipe keys that enable sequence parallelism, or [] if the pipeline's networks do not support it."""
    try:
        folder = locate_pipeline(recipe.model.path, recipe.model.family, recipe.model.revision)
    except UserError:
        supports = True  # the model is not on this machine, so its networks are unknown
    else:
        supported = {network.__name__ for network in ulysses_families()}
        supports = any(name in supported for _, name in pipeline_components(read_index(folder)).values())
    return [f"engine.sequence_parallel above {recipe.engine.sequence_parallel}"] if supports else []


def memory_verdict(recipe: Recipe, estimate: MemoryEstimate, memory: int | None) -> str:
    """Return a line for `--check` that says whether the peak fits into `memory` bytes of GPU memory.

    memory: None if the machine has no GPU. The line then names the smallest GPU with enough memory.
    """
    if memory is None:
        size = smallest_gpu(estimate.peak_bytes)
        if size is not None:
            return f"  fits a GPU of {size} GB"
        return f"  does not fit a GPU of {GPU_SIZES_GB[-1]} GB: change {', '.join(suggest_keys(recipe, estimate))}"
    size_text = f"the {memory / GIB:.0f} GiB of this GPU"
    if fits_memory(estimate.peak_bytes, memory):
        return f"  fits {size_text}"
    return (
        f"  does not fit {size_text} ({USABLE_FRACTION:.0%} usable): change {', '.join(suggest_keys(recipe, estimate))}"
    )


class OutOfMemory(UserError):
    """The device of this rank is out of memory, which the user can fix by changing recipe keys.

    No checkpoint is saved after this error. The previous checkpoint remains usable.
    """


@contextmanager
def explain_out_of_memory(
    device: torch.device, advice: Callable[[str], Sequence[str]], phase: Callable[[], str | None]
) -> Iterator[None]:
    """Convert out-of-memory errors in the block to OutOfMemory errors with advice.

    phase: returns the phase in which the error occurred, or None if it is unknown. advice: returns the recipe keys to
    change for a phase ("" for an unknown phase), best first.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RunError) or not is_out_of_memory(error):  # a RunError may report another process
            raise
        name = phase() or ""
        raise OutOfMemory(out_of_memory_message(error, device, name, advice(name))) from error


def out_of_memory_message(error: BaseException, device: torch.device, phase: str, advice: Sequence[str]) -> str:
    """Return a message: `out of memory on cuda:0 in phase train: requested 2.0 GiB more, ...; change KEY, or KEY`."""
    match = REQUEST_PATTERN.search(str(error))
    request = f"requested {_format_bytes(float(match[1]) * UNIT_BYTES[match[2]])} more, " if match else ""
    in_phase = f" in phase {phase}" if phase else ""
    change = f"; change {', or '.join(advice)}" if advice else ""
    return f"out of memory on {device}{in_phase}: {request}{describe_memory_usage(device)}{change}"


def describe_memory_usage(device: torch.device) -> str:
    """Describe this process's peak memory, the device's total memory and, on a GPU, the memory of other processes."""
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        total = psutil.virtual_memory().total
        allowed = f" (limit per process: {_format_bytes(limit)})" if 0 < limit < total else ""
        return f"the peak of the process was {_format_bytes(peak)}, this machine has {_format_bytes(total)}{allowed}"
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return (
        f"the peak of tensors was {_format_bytes(peak)}, the GPU has {_format_bytes(total)}, others use "
        f"{_format_bytes(others)} of it"
    )


def _format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
