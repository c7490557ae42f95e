"""Initial LoRA of a run: accepted files, and the error message for each unsuitable file."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from each_case import check_each
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.errors import UserError
from wfm_ds.models import registry
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.initial_lora import load_initial_lora
from wfm_ds.training.rl import RlLoop


def recipe(path, **lora):
    return Recipe(
        run={"output_dir": "unused", "steps": 1},
        model={"path": "unused"},
        data={"kind": "paired", "path": "unused"},
        sampling={"height": 32, "width": 32},
        algorithm={"name": "sft"},
        lora={"rank": 2, "alpha": 6, "init_from": str(path), **lora},
    )


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


def test_a_kohya_file_gives_the_values_of_its_layers(model, file):
    start = load_initial_lora(recipe(file()), model)
    assert start.keys() == {f"transformer_blocks.0.attn.to_out.0.lora_{x}.weight" for x in "AB"}
    assert load_initial_lora(recipe(file(), init_from=None), model) is None


@check_each(
    ("written", "lora", "said"),
    [
        ({"inputs": 64}, {}, "for another base: 1 of its 1 layers do not fit, e.g. transformer_blocks.0.attn.to_out.0"),
        (
            {"key": "lora_unet_double_blocks_0_img_attn_qkv"},
            {},
            "names are not layers of the denoiser (lora_unet_d",
        ),
        ({}, {"rank": 4}, "lora.rank 4 and lora.alpha 6, but"),
        ({}, {"alpha": 2}, "has rank 2 and alpha 6: change them"),
        ({}, {"rslora": True}, "has rank 2 and alpha 4.24264: change them"),
        ({}, {"dora": True}, "has no magnitudes (DoRA): set it to false"),
        ({}, {"target_modules": ["to_q"]}, "has 1 layers that are not in lora.target_modules (transformer_blocks.0"),
        ({"strange": torch.zeros(1)}, {}, "(strange): name the pipeline of the LoRA"),
        ({}, {"init_from": "nowhere/lora"}, "nowhere/lora does not exist; name a .safetensors file or an export"),
    ],
)
def test_unsuitable_files_are_one_line_errors(model, file, written, lora, said):
    path = file(**written)
    with pytest.raises(UserError) as caught:
        load_initial_lora(recipe(path, **lora), model)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_that_exclude_each_other():
    rl = {"rollout": {"group_size": 2, "merge_lora": True}, "reward": {"functions": [{"name": "color"}]}}
    base = {
        "run": {"output_dir": "unused", "steps": 1},
        "model": {"path": "unused"},
        "data": {"kind": "prompts", "path": "unused"},
        "sampling": {"height": 32, "width": 32},
        "algorithm": {"name": "diffusion_nft"},
        **rl,
    }
    with pytest.raises(ValueError, match=r"merge_lora only merges plain adapters, not lora\.dora"):
        Recipe(**base, lora={"dora": True})
    sde = {"height": 32, "width": 32, "solver": "flow_sde"}
    plain = {**base, "rollout": {"group_size": 2}}
    with pytest.raises(ValueError, match=r"lora\.dropout: algorithm flow_grpo compares log-probabilities"):
        Recipe(**{**plain, "algorithm": {"name": "flow_grpo"}, "sampling": sde}, lora={"dropout": 0.1})
    with pytest.raises(ValueError, match=r"lora\.dora needs the norms of the original weights"):
        Recipe(**{**plain, "model": {"path": "unused", "base_precision": "fp8"}}, lora={"dora": True})


def test_the_reference_policy_differs_from_a_lora_that_the_run_starts_from():
    start = Recipe.model_validate(
        {
            "run": {"output_dir": "unused", "steps": 1},
            "model": {"path": "unused"},
            "lora": {"rank": 2},
            "data": {"kind": "prompts", "path": "unused"},
            "sampling": {"height": 16, "width": 16, "solver": "edm_2ab"},
            "algorithm": {"name": "ddrl", "train_on": [0], "kl_beta": 0.1},
            "rollout": {"policy": "reference"},
            "reward": {"functions": [{"name": "mock"}]},
        }
    )
    equal = []
    for lora in (start.lora, start.lora.model_copy(update={"init_from": "start.safetensors"})):
        job = SimpleNamespace(engine=None, recipe=start.model_copy(update={"lora": lora}))
        equal.append(RlLoop(job, build_rl_algorithm(start, None), None, None, None, None).equal_policies)
    assert equal == [{"ref"}, set()]
