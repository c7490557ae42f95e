"""Digests of everything that determines a run's samples. A worker compares its digests with the trainer's at start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from wfm_ds.engine.attention_kernels import current_kernel
from wfm_ds.errors import RecipeError
from wfm_ds.models.assets.weight_files import fingerprint_folders
from wfm_ds.models.base import DiffusionModel
from wfm_ds.recipe.schema import Recipe
from wfm_ds.user_class import import_class, is_user_class, source_file

MACHINE_KEYS = {"model": {"path", "attention"}, "lora": {"init_from"}}  # keys that may differ between machines


def compute_identity(recipe: Recipe, model: DiffusionModel) -> dict[str, str]:
    """Return {setting: short digest} for everything that affects samples, including the pipeline's files."""
    parts = [name for name in model.pipeline.components if (model.path / name).is_dir()]
    sections = {name: getattr(recipe, name) for name in ("model", "lora", "sampling", "algorithm")}
    plain: dict[str, Any] = {
        name: section and section.model_dump(mode="json", exclude=MACHINE_KEYS.get(name))
        for name, section in sections.items()
    }
    if recipe.rl.algorithm.compares_log_probs:
        # Log-probabilities of two attention kernels may differ by more than the clip range.
        plain["model.attention and engine.compile"] = [current_kernel(model.unwrapped_denoiser), recipe.engine.compile]
        plain["engine.fused_norms"] = recipe.engine.fused_norms
    plain["rollout.base_precision"] = recipe.rollout_precision
    plain["rollout.merge_lora"] = recipe.rl.rollout.merge_lora
    plain["rollout.history"] = recipe.rl.rollout.history.clips > 0
    plain["data.inputs"] = sorted([*recipe.data.inputs, *recipe.data.reward_inputs])
    plain["data.source_size"] = recipe.data.source_size
    plain["run.seed"] = recipe.run.seed
    plain["classes of your own"] = hash_user_classes(recipe)
    plain["reward.functions"] = [f.name for f in recipe.rl.reward.functions]
    packed = {name: json.dumps(value, sort_keys=True).encode() for name, value in plain.items()}
    digests = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in packed.items()}
    return {**digests, "pipeline": fingerprint_folders(model.path, parts)[:16]}


def hash_user_classes(recipe: Recipe) -> dict[str, str]:
    """Return {class path: SHA-256 of its source file} for the user's classes."""
    paths = {"algorithm.name": recipe.algorithm.name, "model.family": recipe.model.family or ""}
    classes = {
        path: import_class(path, object, key=key, error=RecipeError)
        for key, path in paths.items()
        if is_user_class(path)
    }
    return {path: hashlib.sha256(source_file(cls).read_bytes()).hexdigest() for path, cls in classes.items()}


def require_same_identity(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> None:
    """Raise RecipeError if a digest of the trainer (`theirs`) differs from the digest of this worker (`ours`)."""
    different = sorted(name for name in ours.keys() | theirs.keys() if theirs.get(name) != ours.get(name))
    if different:
        raise RecipeError(
            f"this worker's {', '.join(different)} differ from the trainer's: start it with recipe.yaml from the "
            "run's output folder and with the same pipeline"
        )
