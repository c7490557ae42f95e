"""The identity of a run's samples: digests of all that decides what a sample is, compared by trainer and worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from wfm_ds.engine.attention import in_use
from wfm_ds.errors import RecipeError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.fingerprint import fingerprint
from wfm_ds.recipe.schema import Recipe
from wfm_ds.user_class import import_class, is_user_class, source_file

ELSEWHERE = {"model": {"path", "attention"}, "lora": {"init_from"}}  # keys that may differ from machine to machine


def identity(recipe: Recipe, model: DiffusionModel) -> dict[str, str]:
    """Short digests by section of the recipe, and of the pipeline's own files under `pipeline`."""
    sections: dict[str, Any] = {
        "model": recipe.model,
        "lora": recipe.lora,
        "sampling": recipe.sampling,
        "algorithm": recipe.algorithm,
    }
    parts = [name for name in model.pipeline.components if (model.path / name).is_dir()]
    plain = {
        name: None if section is None else section.model_dump(mode="json", exclude=ELSEWHERE.get(name))
        for name, section in sections.items()
    }
    if recipe.rl.algorithm.compares_log_probs:
        # Log-probabilities of two kernels may differ by more than a clip range.
        plain["model.attention and engine.compile"] = [in_use(model.bare_denoiser), recipe.engine.compile]
    plain["rollout.base_precision"] = recipe.rollout_precision
    plain["rollout.merge_lora"] = recipe.rl.rollout.merge_lora
    plain["run.seed"] = recipe.run.seed
    plain["classes of your own"] = own_code(recipe)
    plain["reward.functions"] = [f.name for f in recipe.rl.reward.functions]
    return {name: _digest(value) for name, value in plain.items()} | {"pipeline": fingerprint(model.path, parts)[:16]}


def own_code(recipe: Recipe) -> dict[str, str]:
    """Digests of the files that define the user's algorithm and family: a worker must not run another version."""
    own = {"algorithm.name": recipe.algorithm.name, "model.family": recipe.model.family or ""}
    classes = {
        path: import_class(path, object, key=key, error=RecipeError) for key, path in own.items() if is_user_class(path)
    }
    return {path: hashlib.sha256(source_file(found).read_bytes()).hexdigest() for path, found in classes.items()}


def require_same(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> None:
    """Raises RecipeError that names what differs."""
    different = sorted(name for name in ours.keys() | theirs.keys() if theirs.get(name) != ours.get(name))
    if different:
        raise RecipeError(
            f"this worker's {', '.join(different)} differ from the trainer's: start it with the recipe.yaml of the "
            "run's output folder and the same pipeline"
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
