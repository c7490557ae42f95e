"""User files that must be identical on the trainer and its workers."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wfm_ds.engine import attention_kernels
from wfm_ds.errors import RecipeError
from wfm_ds.models import registry
from wfm_ds.recipe.file import load_recipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.rollout.remote.identity import compute_identity, hash_user_classes, require_same_identity

SOURCE = """\
from wfm_ds.recipe.algorithms import RlSettings

class Keys(RlSettings):
    pass

class Mine:
    Settings = Keys
"""


def recipe(algorithm):
    return Recipe.model_validate(
        {
            "run": {"output_dir": "out", "steps": 3},
            "model": {"path": "tiny:sd3"},
            "data": {"kind": "prompts", "path": "p"},
            "sampling": {"height": 32, "width": 32, **({"solver": "flow_sde"} if algorithm == "flow_grpo" else {})},
            "algorithm": {"name": algorithm},
            "rollout": {"group_size": 4},
            "reward": {"functions": [{"name": "color"}]},
        }
    )


def test_a_changed_user_file_has_another_identity(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "versioned.py").write_text(SOURCE)
    ours = hash_user_classes(recipe("versioned:Mine"))
    assert ours.keys() == {"versioned:Mine"}
    (tmp_path / "versioned.py").write_text(SOURCE + "\n# changed\n")
    theirs = hash_user_classes(recipe("versioned:Mine"))
    assert theirs != ours
    with pytest.raises(RecipeError, match="classes of your own differ from the trainer's"):
        require_same_identity({"classes of your own": str(theirs)}, {"classes of your own": str(ours)})
    sys.modules.pop("versioned")


def test_a_built_in_algorithm_has_no_user_file():
    assert hash_user_classes(recipe("diffusion_nft")) == {}


@pytest.mark.parametrize(("algorithm", "same"), [("flow_grpo", False), ("diffusion_nft", True)])
def test_a_worker_computes_as_the_trainer_where_log_probabilities_are_compared(algorithm, same, tiny_pipelines):
    def digests(*changes, kernel="native"):
        asked = recipe(algorithm).model_dump(mode="json", exclude_unset=True)
        for name, value in changes:
            section, key = name.split(".")
            asked.setdefault(section, {})[key] = value
        model = registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")
        attention_kernels.use_kernel(model.denoiser, kernel)
        return compute_identity(Recipe.model_validate(asked), model)

    trainer = digests()
    assert digests(("model.attention", "native")) == trainer  # the digest depends on the resolved kernel
    assert digests(("sampling.grid", "even")) != trainer
    assert digests(("model.embedded_guidance", 2.0))["model"] != trainer["model"]
    assert (digests(kernel="cudnn") == trainer) is same
    assert (digests(("engine.compile", True)) == trainer) is same
    assert (digests(("engine.fused_norms", True)) == trainer) is same
    if not same:
        with pytest.raises(RecipeError, match=r"this worker's model\.attention and engine\.compile differ"):
            require_same_identity(trainer, digests(kernel="cudnn"))


def test_a_worker_without_histories_is_not_one_of_a_run_with_histories(tmp_path):
    files = SimpleNamespace(path=tmp_path, pipeline=SimpleNamespace(components={}))
    path = Path(__file__).parent.parent / "recipes" / "cosmos25_i2v_nft.yaml"
    plain, two, three = (
        compute_identity(load_recipe(path, ["data.path=.", f"rollout.history={{clips: {clips}}}"]), files)
        for clips in (0, 2, 3)
    )
    require_same_identity(two, three)  # the number of clips is part of each task
    with pytest.raises(RecipeError, match=r"this worker's rollout\.history differ"):
        require_same_identity(two, plain)


def test_a_worker_has_the_inputs_of_the_trainer(tmp_path):
    """Otherwise its samples would lack a source image, without an error."""
    files = SimpleNamespace(path=tmp_path, pipeline=SimpleNamespace(components={}))
    path = Path(__file__).parent.parent / "recipes" / "sd3_nft.yaml"

    def identity(*overrides):
        return compute_identity(load_recipe(path, ["data.kind=folder", "data.path=.", *overrides]), files)

    trainer = identity("data.inputs=[source, source_2]")
    for words in (["data.inputs=[source]"], ["data.inputs=[source, source_2]", "data.source_size=stock"]):
        with pytest.raises(RecipeError, match=r"this worker's data\.(inputs|source_size) differ"):
            require_same_identity(trainer, identity(*words))
