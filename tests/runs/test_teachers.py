"""LoRAs of teachers: their conversion to the rank of the run, and the message for each unsuitable file."""

import pytest
import torch
from safetensors.torch import save_file

from each_case import check_each
from wfm_ds.errors import UserError
from wfm_ds.export.lora_layers import LoraLayer
from wfm_ds.models import registry
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.teachers import fit_rank, load_teachers
from wfm_ds.training.early_checks import check_early

LAYER = "transformer_blocks.0.attn.to_k"


def recipe(weights="base", *, lora=None, output_dir="out", **sections):
    return Recipe(
        data={"kind": "prompts", "path": "unused"},
        sampling={"height": 32, "width": 32, "eval_steps": 10},
        algorithm={"name": "dmd2", "teacher": {"weights": str(weights)}},
        rollout={"group_size": 1},
        run={"output_dir": str(output_dir), "steps": 1},
        **{"model": {"path": "tiny:sd3"}, "lora": {"rank": 4, "alpha": 8, **(lora or {})}, **sections},
    )


def lora_tensors(rank=2, inputs=32, layer=LAYER, alpha=3.0, **more):
    generator = torch.Generator().manual_seed(0)
    A, B = torch.randn(rank, inputs, generator=generator), torch.randn(32, rank, generator=generator)
    tensors = {f"transformer.{layer}.lora_A.weight": A, f"transformer.{layer}.lora_B.weight": B}
    return tensors | {f"transformer.{layer}.alpha": torch.tensor(alpha)} | more


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")


@check_each("rank, alpha, scale", [(2, 3.0, 2.0), (4, 8.0, 2.0), (1, 8.0, 0.5), (4, 1.0, 3.0)])
def test_a_lora_of_another_rank_and_scale_gives_the_same_update(rank, alpha, scale):
    layer = LoraLayer(torch.randn(rank, 5), torch.randn(6, rank), alpha)
    fitted = fit_rank(layer, 4, scale)
    assert fitted.rank == 4
    assert fitted.scale == pytest.approx(scale)
    torch.testing.assert_close(fitted.delta(), layer.delta())
    if layer.scale == scale:
        assert torch.equal(fitted.B[:, :rank], layer.B)


@check_each("lora, scale", [({}, 2.0), ({"rslora": True}, 4.0)])
def test_a_teacher_is_loaded_under_its_policy_in_the_scale_of_the_run(model, tmp_path, lora, scale):
    save_file(lora_tensors(), tmp_path / "a.safetensors")
    teachers = load_teachers(recipe(tmp_path / "a.safetensors", lora=lora), model)
    tensors = teachers.pop("teacher_0")
    assert teachers == {}
    assert tensors.keys() == {f"{LAYER}.lora_{x}.weight" for x in "AB"}
    A, B = (tensors[f"{LAYER}.lora_{x}.weight"] for x in "AB")
    written = lora_tensors()
    expected = 1.5 * written[f"transformer.{LAYER}.lora_B.weight"] @ written[f"transformer.{LAYER}.lora_A.weight"]
    torch.testing.assert_close(scale * B @ A, expected)
    assert load_teachers(recipe(), model) == {}


def test_the_teacher_init_is_the_initial_lora_of_the_run(model, tmp_path):
    save_file(lora_tensors(rank=4, alpha=8.0), tmp_path / "a.safetensors")
    start = recipe("init", lora={"init_from": str(tmp_path / "a.safetensors")})
    assert torch.equal(
        load_teachers(start, model)["teacher_0"][f"{LAYER}.lora_A.weight"],
        lora_tensors(rank=4)[f"transformer.{LAYER}.lora_A.weight"],
    )


MAGNITUDE = {f"transformer.{LAYER}.lora_magnitude_vector": torch.ones(32)}


@check_each(
    "written, lora, said",
    [
        ({"inputs": 64}, {}, "is for another base: 1 of its 1 layers do not fit"),
        ({"layer": "blocks.0.attn1.to_q"}, {}, "is for another base: 1 of its 1 layers do not fit"),
        ({"rank": 8}, {}, "has rank 8, more than lora.rank 4: raise lora.rank"),
        ({}, {"target_modules": ["to_q"]}, "has 1 layers that are not in lora.target_modules"),
        (MAGNITUDE, {}, "is a DoRA, which teachers do not support"),
        ({}, {"dora": True}, "do not support lora.dora and lora.modules_to_save yet"),
    ],
)
def test_an_unsuitable_teacher_is_a_one_line_error(model, tmp_path, written, lora, said):
    save_file(lora_tensors(**written), tmp_path / "a.safetensors")
    with pytest.raises(UserError) as caught:
        load_teachers(recipe(tmp_path / "a.safetensors", lora=lora), model)
    assert said in str(caught.value)
    assert str(caught.value).startswith("teacher /")
    assert "\n" not in str(caught.value)


def test_a_missing_teacher_is_refused_before_torch_is_needed(tmp_path):
    with pytest.raises(UserError, match="teacher /nowhere/lora does not exist: correct `weights`"):
        check_early(recipe("/nowhere/lora", output_dir=tmp_path / "out"))
