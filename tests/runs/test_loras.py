"""Initial LoRA of a run and LoRAs of teachers: accepted files, and the message for each unsuitable file."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from each_case import check_each
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.errors import UserError
from wfm_ds.export.lora_layers import LoraLayer
from wfm_ds.models import registry
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.loras import fit_rank, load_initial_lora, load_teachers
from wfm_ds.training.early_checks import check_early
from wfm_ds.training.rl import RlLoop

LAYER = "transformer_blocks.0.attn.to_k"
RUN = {"run": {"output_dir": "unused", "steps": 1}, "model": {"path": "tiny:sd3"}}
SFT = {"data": {"kind": "paired", "path": "unused"}, "algorithm": {"name": "sft"}}
RL = {"data": {"kind": "prompts", "path": "unused"}, "rollout": {"group_size": 2}}
REWARD = {"reward": {"functions": [{"name": "mock"}]}}


def recipe(lora, sampling=None, **sections):
    size = {"height": 32, "width": 32, **(sampling or {})}
    return Recipe.model_validate({**RUN, "sampling": size, "lora": lora, **sections})


def starting_from(path, **lora):
    return recipe({"rank": 2, "alpha": 6, "init_from": str(path), **lora}, **SFT)


def taught_by(weights="base", *, lora=None, **sections):
    algorithm = {"name": "dmd2", "teacher": {"weights": str(weights)}}
    return recipe({"rank": 4, "alpha": 8, **(lora or {})}, {"eval_steps": 10}, algorithm=algorithm, **RL | sections)


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")


@pytest.fixture
def file(tmp_path):
    """`file(key, inputs)`: write a file in kohya's layout with one layer (rank 2, alpha 6) and additional tensors."""

    def made(key="lora_unet_joint_blocks_0_x_block_attn_proj", inputs=32, **more):
        tensors = {f"{key}.lora_down.weight": torch.ones(2, inputs), f"{key}.lora_up.weight": torch.ones(32, 2)}
        save_file(tensors | {f"{key}.alpha": torch.tensor(6.0)} | more, tmp_path / "a.safetensors")
        return tmp_path / "a.safetensors"

    return made


def lora_tensors(rank=2, inputs=32, layer=LAYER, alpha=3.0, **more):
    generator = torch.Generator().manual_seed(0)
    A, B = torch.randn(rank, inputs, generator=generator), torch.randn(32, rank, generator=generator)
    tensors = {f"transformer.{layer}.lora_A.weight": A, f"transformer.{layer}.lora_B.weight": B}
    return tensors | {f"transformer.{layer}.alpha": torch.tensor(alpha)} | more


def error_of(load, recipe, model):
    with pytest.raises(UserError) as caught:
        load(recipe, model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- initial LoRA


def test_a_kohya_file_gives_the_values_of_its_layers(model, file):
    start = load_initial_lora(starting_from(file()), model)
    assert start.keys() == {f"transformer_blocks.0.attn.to_out.0.lora_{x}.weight" for x in "AB"}
    assert load_initial_lora(starting_from(file(), init_from=None), model) is None


@check_each(
    ("written", "lora", "said"),
    [
        ({"inputs": 64}, {}, "for another base: 1 of its 1 layers do not fit, e.g. transformer_blocks.0.attn.to_out.0"),
        ({"key": "lora_unet_double_blocks_0_img_attn_qkv"}, {}, "names are not layers of the denoiser (lora_unet_d"),
        ({}, {"rank": 4}, "lora.rank 4 and lora.alpha 6, but"),
        ({}, {"alpha": 2}, "has rank 2 and alpha 6: change them"),
        ({}, {"rslora": True}, "has rank 2 and alpha 4.24264: change them"),
        ({}, {"dora": True}, "has no magnitudes (DoRA): set it to false"),
        ({}, {"target_modules": ["to_q"]}, "has 1 layers that are not in lora.target_modules (transformer_blocks.0"),
        ({"strange": torch.zeros(1)}, {}, "(strange): name the pipeline of the LoRA"),
        ({}, {"init_from": "nowhere/lora"}, "nowhere/lora does not exist; name a .safetensors file or an export"),
    ],
)
def test_an_unsuitable_initial_lora_is_a_one_line_error(model, file, written, lora, said):
    assert said in error_of(load_initial_lora, starting_from(file(**written), **lora), model)


NFT = {**RL, **REWARD, "algorithm": {"name": "diffusion_nft"}}
GRPO = {**NFT, "algorithm": {"name": "flow_grpo"}, "sampling": {"solver": "flow_sde"}}


@check_each(
    ("lora", "sections", "said"),
    [
        (
            *({"dora": True}, {**NFT, "rollout": {"group_size": 2, "merge_lora": True}}),
            r"merge_lora only merges plain adapters, not lora\.dora",
        ),
        ({"dropout": 0.1}, GRPO, r"lora\.dropout: algorithm flow_grpo compares log-probabilities"),
        (
            *({"dora": True}, {**NFT, "model": {"path": "unused", "base_precision": "fp8"}}),
            r"lora\.dora needs the norms of the original weights",
        ),
    ],
)
def test_keys_that_exclude_each_other(lora, sections, said):
    with pytest.raises(ValueError, match=said):
        recipe(lora, **sections)


def test_the_reference_policy_differs_from_a_lora_that_the_run_starts_from():
    ddrl = {"name": "ddrl", "train_on": [0], "kl_beta": 0.1}
    sections = {**RL, **REWARD, "algorithm": ddrl, "rollout": {"policy": "reference"}}
    start = recipe({"rank": 2}, {"solver": "edm_2ab"}, **sections)
    equal = []
    for lora in (start.lora, start.lora.model_copy(update={"init_from": "start.safetensors"})):
        job = SimpleNamespace(engine=None, recipe=start.model_copy(update={"lora": lora}))
        equal.append(RlLoop(job, build_rl_algorithm(start, None), None, None, None, None).equal_policies)
    assert equal == [{"ref"}, set()]


# ---- teachers


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
    teachers = load_teachers(taught_by(tmp_path / "a.safetensors", lora=lora), model)
    tensors = teachers.pop("teacher_0")
    assert teachers == {}
    assert tensors.keys() == {f"{LAYER}.lora_{x}.weight" for x in "AB"}
    A, B = (tensors[f"{LAYER}.lora_{x}.weight"] for x in "AB")
    written = lora_tensors()
    expected = 1.5 * written[f"transformer.{LAYER}.lora_B.weight"] @ written[f"transformer.{LAYER}.lora_A.weight"]
    torch.testing.assert_close(scale * B @ A, expected)
    assert load_teachers(taught_by(), model) == {}


def test_the_teacher_init_is_the_initial_lora_of_the_run(model, tmp_path):
    written = lora_tensors(rank=4, alpha=8.0)
    save_file(written, tmp_path / "a.safetensors")
    start = taught_by("init", lora={"init_from": str(tmp_path / "a.safetensors")})
    name = f"{LAYER}.lora_A.weight"
    assert torch.equal(load_teachers(start, model)["teacher_0"][name], written[f"transformer.{name}"])


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
    message = error_of(load_teachers, taught_by(tmp_path / "a.safetensors", lora=lora), model)
    assert said in message
    assert message.startswith("teacher /")


def test_a_missing_teacher_is_refused_before_torch_is_needed(tmp_path):
    run = {"output_dir": str(tmp_path / "out"), "steps": 1}
    with pytest.raises(UserError, match="teacher /nowhere/lora does not exist: correct `weights`"):
        check_early(taught_by("/nowhere/lora", run=run))
