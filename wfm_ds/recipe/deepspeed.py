"""The DeepSpeed config: ZeRO settings from a JSON file, all other settings from the recipe.

Keys and combinations that DeepSpeed would ignore, or that would silently corrupt training, are errors.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage.filesystem import read_regular

# The folder of the repository (editable install), and the copy inside an installed wheel.
PACKAGE_FOLDER = Path(__file__).parent.parent
CONFIG_FOLDERS = (PACKAGE_FOLDER.parent / "ds_configs", PACKAGE_FOLDER / "ds_configs")

SET_BY_RECIPE = {
    "train_micro_batch_size_per_gpu": "engine.micro_batch_size",
    "gradient_accumulation_steps": "engine.gradient_accumulation",
    "gradient_clipping": "engine.max_grad_norm",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "torch_autocast": "model.dtype",
    "data_types": "model.dtype",
    "communication_data_type": "model.dtype",
    "optimizer": "optimizer",
    "scheduler": "optimizer.schedule",
}
UNSUPPORTED_KEYS = {
    "train_batch_size": "it is derived from micro-batch size, accumulation and ranks",
    "steps_per_print": "the trainer writes its own log",
    "timers": "the trainer has its own timers, which do not synchronize the device",
    "zero_allow_untested_optimizer": "the trainer sets it",
    "hybrid_engine": "it is for text generation",
    "compile": "DeepCompile is not tested with wfm_ds",
    "compression_training": "quantized weights are not tested with wfm_ds",
    "weight_quantization": "quantized weights are not tested with wfm_ds",
    "checkpoint": "the trainer defines the format, and DeepSpeed's fast writer can lose files silently",
    "flops_profiler": "it misses some attention variants",
    "comms_logger": "it misses some collectives",
    "prescale_gradients": "the trainer scales the loss",
    "gradient_predivide_factor": "the trainer scales the loss",
    "gradient_allreduce_op": "the trainer scales the loss",
    "managed_gradient_accumulation": "the trainer counts the micro-steps",
    "zero_quantized_weights": "quantized gathers change the predictions",
    "zero_quantized_nontrainable_weights": "quantized gathers change the predictions",
    "zero_quantized_gradients": "quantized gradients are not tested with wfm_ds",
    "mics_shard_size": "MiCS is not tested with wfm_ds",
    "mics_hierarchical_params_gather": "MiCS is not tested with wfm_ds",
    "zenflow": "ZenFlow is not tested with wfm_ds",
    "compute_grad_norm": "NaN gradients are detected by the norm",
}
KNOWN_KEYS = frozenset({"zero_optimization", "zero_force_ds_cpu_optimizer", "aio", "wall_clock_breakdown"})
KNOWN_ZERO_KEYS = frozenset(
    {
        *("stage", "contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "leaf_module"),
        *("allgather_partitions", "allgather_bucket_size", "round_robin_gradients", "ignore_unused_parameters"),
        *("offload_param", "offload_optimizer", "sub_group_size", "zero_hpz_partition_size", "memory_efficient_linear"),
        *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_module_granularity_threshold"),
        *("stage3_max_live_parameters", "stage3_max_reuse_distance", "log_trace_cache_warnings"),
    }
)


def policy_copies(policies: frozenset[str], *, lora: bool) -> frozenset[str]:
    """Return the policies that need a separate copy of the weights. With LoRA, `ref` needs none."""
    return policies - {"ref"} if lora else policies


# {(section, key) that needs unsharded weights, so not ZeRO-3: reason}
NEEDS_WHOLE_WEIGHTS = {
    ("rollout", "merge_lora"): "adds adapters to whole layers",
    ("rollout", "cuda_graph"): "needs weights at fixed addresses",
    ("lora", "dora"): "needs the norms of whole weights",
    ("lora", "modules_to_save"): "copies whole layers",
}


def build_deepspeed_config(
    recipe: Recipe, *, accumulation: int, policies: frozenset[str], world_size: int, ranks_per_node: int
) -> dict[str, Any]:
    """Return the config dict for deepspeed.initialize.

    accumulation: micro-batches (backward passes) per optimizer step. policies: names of all policies except the trained
    one. Raises RecipeError if a setting is not supported or does not fit the recipe.
    """
    source = find_deepspeed_config(recipe.engine.deepspeed)
    from_json = read_deepspeed_config(source)
    zero = add_overlap_default(check_keys(from_json, source), lora=recipe.lora is not None)
    check_combinations(from_json, zero, recipe, policies, source)
    if "zero_hpz_partition_size" in zero:
        zero["zero_hpz_partition_size"] = _hpz_partition_size(zero, world_size, ranks_per_node, source)
    if zero["stage"] == 3:
        # DeepSpeed's default, true, permanently replaces torch.nn.functional.linear in the whole process.
        zero.setdefault("memory_efficient_linear", False)
    return from_json | {"zero_optimization": zero} | _keys_from_recipe(recipe, accumulation, zero["stage"])


def add_overlap_default(zero: dict[str, Any], *, lora: bool) -> dict[str, Any]:
    """Return the ZeRO settings, with a default of `overlap_comm` if the JSON file does not set it.

    At stages 1 and 2, overlap makes DeepSpeed synchronize the device after each backward pass. This pays off for full
    weights but not for adapters. At stage 3, overlap prefetches weights without synchronization.
    """
    return {"overlap_comm": zero["stage"] == 3 or not lora} | zero


def find_deepspeed_config(name: str) -> Path:
    """Return the JSON file of a path (with a slash or .json) or a name in ds_configs/. Raises RecipeError."""
    if "/" in name or name.endswith(".json"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise RecipeError(f"engine.deepspeed: {path.absolute()} not found: set a path or a name in ds_configs/")
        return path
    known = {path.stem: path for folder in reversed(CONFIG_FOLDERS) for path in sorted(folder.glob("*.json"))}
    if name not in known:
        raise RecipeError(
            f"engine.deepspeed: unknown name {name}: set one of {', '.join(sorted(known))}, or a .json path"
        )
    return known[name]


def read_deepspeed_config(source: Path) -> dict[str, Any]:
    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        if duplicates:
            raise RecipeError(f"{source}: duplicate keys {', '.join(duplicates)}: remove one of each")
        return dict(pairs)

    try:
        content = json.loads(read_regular(source), object_pairs_hook=reject_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{source}: not a readable JSON file ({error}): correct it, or set another one") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{source}: expected a JSON object, got {type(content).__name__}")
    return content


def check_keys(from_json: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Return a copy of `zero_optimization`. Raises RecipeError for unknown or unsupported keys in the config."""
    taken = sorted(from_json.keys() & SET_BY_RECIPE.keys())
    if taken:
        hints = ", ".join(f"{key} (set {SET_BY_RECIPE[key]} in the recipe)" for key in taken)
        raise RecipeError(f"{source}: remove {hints}")
    _reject_unknown_keys(from_json, KNOWN_KEYS, "", source)
    zero = from_json.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3) or isinstance(zero["stage"], bool):
        raise RecipeError(f"{source}: zero_optimization.stage must be 1, 2 or 3: policies need ZeRO's fp32 masters")
    _reject_unknown_keys(zero, KNOWN_ZERO_KEYS, "zero_optimization.", source)
    return dict(zero)


def _reject_unknown_keys(keys: Mapping[str, Any], known: frozenset[str], prefix: str, source: Path) -> None:
    for key in keys:
        if key in UNSUPPORTED_KEYS:
            raise RecipeError(f"{source}: remove {prefix}{key}: {UNSUPPORTED_KEYS[key]}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"supported keys: {', '.join(sorted(known))}"
            raise RecipeError(f"{source}: {prefix}{key} is not supported by wfm_ds; {hint}")


def check_combinations(
    from_json: Mapping[str, Any], zero: Mapping[str, Any], recipe: Recipe, policies: frozenset[str], source: Path
) -> None:
    lora = recipe.lora is not None
    copies = ", ".join(sorted(policy_copies(policies, lora=lora)))
    devices = [_offload_device(zero, part, source) for part in ("offload_optimizer", "offload_param")]
    if "nvme" in devices and copies:
        raise RecipeError(f"{source}: offload to nvme does not support weight copies ({copies}): use cpu")
    if any(devices) and recipe.algorithm.list_teachers():
        raise RecipeError(f"{source}: {recipe.algorithm.name} does not support offload yet: use zero2 or zero3")
    if any(devices) and from_json.get("zero_force_ds_cpu_optimizer", True):
        raise RecipeError(f"{source}: offload needs zero_force_ds_cpu_optimizer: false (torch's AdamW)")
    if any(devices) and recipe.optimizer.name != "adamw":
        raise RecipeError(
            f"{source}: with offload the moments are on the host, so optimizer.name: {recipe.optimizer.name} saves no "
            "GPU memory: set it to adamw, or use zero2 or zero3"
        )
    if zero.get("memory_efficient_linear"):
        raise RecipeError(f"{source}: zero_optimization.memory_efficient_linear must be false: it replaces linear()")
    for (section, key), why in NEEDS_WHOLE_WEIGHTS.items() if zero["stage"] == 3 else ():
        is_read = section == "lora" or not recipe.is_async  # workers have whole weights
        if is_read and getattr(getattr(recipe, section), key, None):
            raise RecipeError(
                f"{source}: ZeRO stage 3 shards the weights, but {section}.{key} {why}: use zero2, or remove the key"
            )
    if recipe.engine.compile and zero["stage"] == 3 and "leaf_module" not in zero:
        raise RecipeError(
            f"{source}: engine.compile cannot compile blocks in which ZeRO stage 3 gathers weights: use zero2, or, to "
            "train all weights, list the blocks in zero_optimization.leaf_module (docs/performance.md)"
        )
    if recipe.model.fp8_training is not None and zero["stage"] == 3:
        raise RecipeError(
            f"{source}: model.fp8_training keeps the weights of ZeRO stage 3 gathered: use zero1 or zero2"
        )
    if "leaf_module" in zero and lora:
        raise RecipeError(f"{source}: zero_optimization.leaf_module fails in the backward pass of LoRA: remove it")
    if "leaf_module" in zero and not recipe.model.gradient_checkpointing:
        raise RecipeError(f"{source}: zero_optimization.leaf_module needs model.gradient_checkpointing: true")


def require_idle_expert_support(recipe: Recipe) -> None:
    """Raise RecipeError if a model with several experts uses ZeRO stage 1 or optimizer offload.

    With these settings, DeepSpeed would reduce or offload only the gradients of the last micro-batch's expert.
    """
    source = find_deepspeed_config(recipe.engine.deepspeed)
    zero = read_deepspeed_config(source)["zero_optimization"]
    reason = "only the expert of the last micro-batch of a step would get its gradients"
    if zero["stage"] == 1:
        raise RecipeError(
            f"{source}: ZeRO stage 1 cannot train a model with two experts ({reason}): use zero2 or zero3"
        )
    if _offload_device(zero, "offload_optimizer", source) is not None:
        raise RecipeError(
            f"{source}: offload_optimizer does not support a model with two experts ({reason}): use zero3"
        )


def _offload_device(zero: Mapping[str, Any], part: str, source: Path) -> str | None:
    """Return the device of the ZeRO section `part`, such as `offload_optimizer`: cpu, nvme, or None without offload."""
    settings = zero.get(part)
    if settings is None:
        return None
    device = settings.get("device") if isinstance(settings, dict) else None
    if device not in ("none", "cpu", "nvme"):
        raise RecipeError(f"{source}: zero_optimization.{part}.device must be cpu, nvme or none, got {device!r}")
    if "super_offload" in settings:
        raise RecipeError(f"{source}: remove zero_optimization.{part}.super_offload: it is not tested with wfm_ds")
    return None if device == "none" else str(device)


def _hpz_partition_size(zero: Mapping[str, Any], world_size: int, ranks_per_node: int, source: Path) -> int:
    size = ranks_per_node if zero["zero_hpz_partition_size"] == "auto" else zero["zero_hpz_partition_size"]
    if zero["stage"] != 3 or not isinstance(size, int) or size < 1 or world_size % size:
        raise RecipeError(
            f"{source}: zero_hpz_partition_size = {size} needs stage 3 and must divide the {world_size} ranks; "
            'use "auto" for the ranks of a node'
        )
    return size


def _keys_from_recipe(recipe: Recipe, accumulation: int, stage: int) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.engine.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": recipe.engine.max_grad_norm,  # DeepSpeed's default clips to 1
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        # DeepSpeed's throughput timer synchronizes the device in every forward pass and micro-step.
        "timers": {"throughput": {"enabled": False}},
    }
    if recipe.model.dtype == "bfloat16":
        keys |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
        if stage > 1:  # at stage 1 this selects another optimizer class; see engine/optimizer.py
            keys["data_types"] = {"grad_accum_dtype": "fp32"}
    return keys
