"""Compares a memory estimate with the memory of a GPU, and suggests recipe keys that reduce the memory."""

from __future__ import annotations

from wfm_ds.memory.estimate import MemoryEstimate
from wfm_ds.monitoring.meters import GIB
from wfm_ds.recipe.schema import Recipe

GPU_SIZES_GB = (24, 32, 40, 48, 80, 141, 192)  # memory sizes of GPUs in GB
USABLE_FRACTION = 0.92  # of GPU memory; the CUDA context, library workspaces and fragmentation use the rest
SAFE_FRACTION = 0.8  # up to this fraction a slightly larger batch still fits

# Memory categories of the estimate, cheapest to reduce first.
PARTS_BY_COST = (
    *("activations", "decoding beside it", "merged weights", "text encoders", "VAE"),
    *("optimizer states", "policies", "gradients", "weights"),
)
SIZE_KEYS = "sampling.height, width or num_frames"
ESTIMATE_PHASES = {
    **dict.fromkeys(("rollout", "validation"), "sampling"),
    **dict.fromkeys(("old_forward", "ref_forward", "ema_forward"), "references"),
}


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

    Keys that cannot be changed further are omitted. phase: the stopwatch phase in which the error occurred, or "" if
    unknown. num_ranks: number of ranks per machine.
    """
    keys: list[str] = []
    if recipe.algorithm.trains_language:
        return suggest_language_keys(recipe)
    for part in PARTS_BY_COST:
        keys += [key for key in suggest_part_keys(part, ESTIMATE_PHASES.get(phase, phase), recipe) if key not in keys]
    exhausted = [f"engine.deepspeed: {recipe.engine.deepspeed}"]
    if recipe.engine.sequence_parallel == num_ranks:
        exhausted += [f"engine.sequence_parallel above {recipe.engine.sequence_parallel}"]
    return [key for key in keys if key not in exhausted]


def suggest_language_keys(recipe: Recipe) -> list[str]:
    """Return recipe keys that reduce the memory of a vision-language run, cheapest first."""
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
    """Return recipe keys that reduce the memory category `part` in this phase, cheapest first."""
    engine, model, lora = recipe.engine, recipe.model, recipe.lora
    shorter = ["model.dtype: bfloat16"] if model.dtype == "float32" else []
    pixels = ["model.vae_dtype: bfloat16"] if model.vae_dtype == "float32" else []
    adapters = ["a lora section"] if lora is None else [f"lora.rank below {lora.rank}"] if lora.rank > 1 else []
    if part == "activations":
        return suggest_activation_keys(phase, recipe, shorter, pixels)
    if part == "decoding beside it" and phase == "sampling":
        return [*pixels, SIZE_KEYS]
    if part == "merged weights" and phase == "sampling" and recipe.is_rl and recipe.rl.rollout.merge_lora:
        return ["rollout.merge_lora: false"]
    if part == "VAE":
        return pixels
    if part == "weights":
        merges = recipe.is_rl and recipe.rl.rollout.merge_lora
        plain = lora is not None and model.base_precision is None and not merges
        frozen = ["model.base_precision: fp8"] if plain else []
        return [*shorter, "engine.deepspeed: zero3" if "zero3" not in engine.deepspeed else "more ranks", *frozen]
    if part == "gradients":  # ZeRO-2 already shards them
        shared = ["engine.deepspeed: zero2"] if "zero1" in engine.deepspeed else []
        return [*adapters, *shared, "engine.deepspeed: zero3_offload", "more ranks"]
    if part in ("optimizer states", "policies"):
        average = ["no ema section"] if part == "policies" and recipe.ema is not None else []
        eight_bits = part == "optimizer states" and lora is None and recipe.optimizer.name == "adamw"
        moments = ["optimizer.name: adamw8bit"] if eight_bits else []
        return [*adapters, *average, *moments, "engine.deepspeed: zero3_offload", "more ranks"]
    if part in ("DeepSpeed", "gathered weights"):
        return ["reduce_bucket_size and stage3_max_reuse_distance of the DeepSpeed JSON"]
    if part == "text encoders" and phase != "texts":
        return ["data.cache_text: auto"]
    if part in ("rollouts", "texts"):
        return ["rollout.prompts_per_step, or more ranks"] if recipe.is_rl else []
    return []


def suggest_activation_keys(phase: str, recipe: Recipe, shorter: list[str], pixels: list[str]) -> list[str]:
    """Return recipe keys that reduce the activation memory of this phase.

    shorter: keys that give the denoiser a smaller dtype. pixels: keys that give the VAE a smaller dtype.
    """
    engine, several = recipe.engine, recipe.engine.micro_batch_size > 1
    terms = [f"engine.micro_batch_size below {engine.micro_batch_size}"] if several else []
    if phase == "train":
        checkpointing = [] if recipe.model.gradient_checkpointing else ["model.gradient_checkpointing: true"]
        return [*checkpointing, *terms, *shorter, f"engine.sequence_parallel above {engine.sequence_parallel}"]
    if phase in ("sampling", "references"):
        keys = []
        if phase == "sampling":
            keys += ["sampling.guidance_batch: separate"] if recipe.joint_guidance_batches else []
            keys += ["rollout.cuda_graph: false"] if recipe.is_rl and recipe.rl.rollout.cuda_graph else []
        batch = [f"engine.max_forward_batch below {engine.max_forward_batch}"] if engine.max_forward_batch > 1 else []
        return [*keys, *batch, *shorter, f"engine.sequence_parallel above {engine.sequence_parallel}"]
    if phase in ("decode", "encode"):
        return [*pixels, *(terms if phase == "encode" else []), SIZE_KEYS]
    return []


def memory_verdict(recipe: Recipe, estimate: MemoryEstimate, memory: int | None) -> str:
    """Return a line for `--check` that says whether the peak fits into `memory` bytes.

    If `memory` is None, the line names the smallest GPU with enough memory.
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
