from pathlib import Path

import pytest
import torch

from benchmarks import flops
from benchmarks.released import RELEASED
from wfm_ds.recipe import file as recipe_file


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("sd35m", 2.243),
        ("sana", 1.605),
        ("wan1.3b", 1.419),
        ("wan14b", 14.288),
        ("wan21_i2v", 16.395),
        ("cosmos2b", 2.059),
        ("cosmos2b_actions", 2.127),
        ("ti2v5b", 5.0),
        ("z_image", 6.155),
        ("flux2_dev", 32.223),
        ("flux_kontext", 11.901),
        ("ltx2", 18.876),
        ("hunyuan_video15", 8.327),
    ],
)
def test_released_dimensions_give_the_published_number_of_parameters(name, billions):
    with torch.device("meta"):
        denoiser = RELEASED[name].transformer()
    assert sum(p.numel() for p in denoiser.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)


DIFFERENT = [name for name in RELEASED if name != "qwen_image_edit_2509"]  # its layers are those of 2511


@pytest.mark.parametrize(("name", "algorithm"), [*((name, "sft") for name in DIFFERENT), ("cosmos2b", "nft")])
@pytest.mark.ci_cases("sd35m-sft", "wan1.3b-sft", "cosmos2b-nft")
def test_a_family_takes_a_released_model_of_its_size(name, algorithm):
    recipe, subject = (
        flops.make_published_recipe(algorithm, RELEASED[name]),
        flops.CountedModel.from_released(RELEASED[name]),
    )
    counted = flops.count_sample_flops(recipe, subject)
    assert set(subject.texts(recipe.lora is not None)) == subject.model.conditioning_keys
    tokens = subject.model.num_tokens(flops.latent_shape(recipe, subject.model))
    parameters = sum(p.numel() for n, p in subject.model.unwrapped_denoiser.named_parameters() if "lora" not in n)
    # Most layers see each token, with 2 FLOPs for a multiply-add; if texts have separate layers, half of the layers do.
    assert 2 * counted.forward > parameters * tokens
    if algorithm == "sft":
        assert counted.forward == counted.forward_without_adapters
        assert 1.98 * counted.forward < counted.backward <= 2 * counted.forward
    else:
        assert counted.forward_without_adapters < counted.forward < 1.05 * counted.forward_without_adapters
        assert counted.forward < counted.backward < 2 * counted.forward


def test_texts_of_a_released_model_are_as_long_as_the_recipe_says():
    shapes = {
        length: RELEASED["sd35m"].conditioning_shapes(frozen=False, max_sequence_length=length)
        for length in (None, 128)
    }
    assert [texts["prompt_embeds"].shape[1] for texts in shapes.values()] == [333, 205]
    assert [texts["pooled_prompt_embeds"].shape[1] for texts in shapes.values()] == [2048, 2048]


def test_the_source_images_of_a_recipe_are_counted(root):
    recipe = recipe_file.load_recipe(root / "recipes" / "flux2_klein_edit_nft.yaml")
    model = flops.CountedModel.from_recipe(recipe).model
    assert model.num_tokens(flops.latent_shape(recipe, model)) == 2 * (384 // 16) ** 2  # the sample and its source


@pytest.fixture
def tiny(monkeypatch, root):
    monkeypatch.chdir(root)  # the recipe's paths are relative to it
    return "tests/recipes/sd3_nft.yaml"


def test_a_recipe_is_counted_purpose_by_purpose(tiny, tiny_pipelines, capsys):
    words = [f"model.path={tiny_pipelines('sd3')}", "algorithm.old_decay=copy", "run.steps=4"]
    assert flops.main([tiny, *words, "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "diffusion_nft, LoRA, 2 ranks" in printed
    assert "one RL step, mean of 4" in printed
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:3] for line in printed.splitlines() if "|" in line}
    assert (cells["rollout"], cells["policy"], cells["ref"]) == (["4", "32"], ["1", "16"], ["1", "16"])
    assert cells["all"] == ["6", "64"]
    assert "old" not in cells


def test_the_rows_add_up_to_the_samples_at_the_cost_of_one(tiny, tiny_pipelines):
    recipe = recipe_file.load_recipe(Path(tiny), [f"model.path={tiny_pipelines('sd3')}", "run.steps=2"])
    count = flops.RecipeCost.from_recipe(recipe, flops.CountedModel.from_recipe(recipe), 2)
    *rows, total = flops.cost_rows(count.steps, count.flops, count.derived.num_replicas)
    assert [row["purpose"] for row in rows] == ["rollout", "policy", "ref", "old"]
    assert [row["samples"] for row in rows] == [32, 16, 16, 8]  # the old policy is not used in the first step
    with_adapters, base = count.flops.forward, count.flops.forward_without_adapters
    assert total["forward FLOP"] == (32 + 16 + 8) * with_adapters + 16 * base
    assert total["backward FLOP"] == 16 * count.flops.backward


def test_several_recipes_make_a_table(tiny, tiny_pipelines, capsys):
    assert flops.main([tiny, "tests/recipes/sd3_nft_full.yaml", f"model.path={tiny_pipelines('sd3')}"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("| `sd3_nft.yaml` | 32 x 32 x 1 | rollout 4, policy 1, ref 1, old 0.5 | ")
    assert second.startswith("| `sd3_nft_full.yaml` | ")


def test_a_recipe_that_cannot_be_counted_is_an_error(tiny, capsys):
    assert flops.main([tiny, "model.path=models/none"]) == 2
    assert "models/none does not exist" in capsys.readouterr().err
    assert flops.main([tiny, "--model", "sd35m", "sampling.height=500"]) == 2
    assert capsys.readouterr().err.startswith("error: sampling: height must be a multiple of 16")
    assert flops.main(["--algo", "nft"]) == 2
    assert capsys.readouterr().err == "error: give a recipe, or --model and --algo\n"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (1e3, "1 k"), (2.4434e12, "2.44 T"), (3e24, "3e+03 Z")]
)
def test_prefixes(value, text):
    assert flops.format_flops(value) == text
