"""Recipes of vision-language models: sections that they reject and keys that they read."""

import pytest

from each_case import check_each
from wfm_ds.errors import RecipeError
from wfm_ds.memory.advice import suggest_keys_after_oom
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.algorithms import VlmSftAlgorithm
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.runs.model_revision import set_revision

GOOD = """\
run: {output_dir: out, steps: 3}
model:
  path: tiny:qwen25vl
data: {kind: llava, path: [a.json, b.jsonl]}
algorithm:
  name: vlm_sft
engine: {micro_batch_size: 2, gradient_accumulation: 3}
"""


@pytest.fixture
def load(tmp_path):
    def load(*overrides, text=GOOD):
        (tmp_path / "mine.yaml").write_text(text)
        return recipe_file.load_recipe(tmp_path / "mine.yaml", overrides)

    return load


def test_a_recipe_of_a_language_model_has_no_sampling_and_its_dump_none_either(load, tmp_path):
    recipe = load()
    assert isinstance(recipe.algorithm, VlmSftAlgorithm)
    assert "sampling" not in recipe_file.dump_recipe(recipe)
    assert load(text=recipe_file.dump_recipe(recipe)) == recipe
    assert derive_run_sizes(recipe, 4).samples_per_step == 24  # rows


def test_the_stored_recipe_of_a_run_keeps_the_commit_of_its_hub_model(load):
    """A run stores the commit in model.revision; resuming reads the stored recipe."""
    stored = recipe_file.dump_recipe(set_revision(load("model.path=owner/reasoner"), "0" * 40))
    assert load(text=stored).model.revision == "0" * 40


@check_each(
    ("override", "words"),
    [
        ("model.gradient_checkpointing=attention", "attention is only for diffusion models: set it to true"),
        ("sampling.height=64", "vlm_sft does not read the section sampling: remove it"),
        ("rollout.group_size=4", "vlm_sft does not read the section rollout: remove it"),
        ("data.kind=paired", "lists and URLs are for webdataset and pairs"),
        ("data.media_path=gs://bucket/media", "reads local or s3:// annotations and media"),
        ("data.path=[http://host/a.json]", "reads local or s3:// annotations and media"),
        ("data.fps=8", "vlm_sft with data.kind llava does not read data.fps: remove it"),
        ("data.caption_dropout=0.1", "does not read data.caption_dropout: remove it"),
        ("validation.prompts=a.txt", "does not read validation.prompts: remove it"),
        ("data.pixels={min: 9, max: 4}", "min 9 is above max 4: raise max"),
        ("algorithm.freeze=[vision, merger, language]", "lists all parts, so nothing would train"),
        ("model.attention=flash", "vlm_sft supports auto and native"),
        ("model.vae_dtype=bfloat16", "vae_dtype: only read with a diffusion model; remove it"),
        ("engine.compile=true", "engine.compile is not for vlm_sft, its sequence lengths vary: remove the key"),
        ("algorithm.train_on=questions", "algorithm.train_on: expected"),
    ],
)
def test_keys_of_other_models_are_refused(load, override, words):
    with pytest.raises(RecipeError, match=words.replace(".", r"\.")):
        load(override)


def test_advised_keys_after_out_of_memory(load):
    told = suggest_keys_after_oom(load("model.dtype=float32"), "train", 1)
    assert told[:3] == ["model.dtype: bfloat16", "engine.deepspeed: zero3", "model.gradient_checkpointing: true"]
    roomy = load("model.dtype=bfloat16", "model.gradient_checkpointing=true", "engine.deepspeed=zero3", "lora.rank=4")
    assert suggest_keys_after_oom(roomy, "train", 1) == ["engine.micro_batch_size: 1", "data.max_tokens below 4096"]


def test_lora_freezes_all_of_the_base(load):
    load("lora.rank=4")
    with pytest.raises(RecipeError, match="a lora section already freezes the whole base"):
        load("lora.rank=4", "algorithm.freeze=[vision]")


@check_each("override", ["data.max_tokens=64", "data.media_path=/data", "data.pack=false"])
def test_other_recipes_do_not_read_their_keys(root, override):
    key = override.partition("=")[0].replace(".", r"\.")
    with pytest.raises(RecipeError, match=f"does not read {key}"):
        recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_sft.yaml", [override])
    with pytest.raises(RecipeError, match=r"algorithm sft needs captioned images or videos"):
        recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_sft.yaml", ["data.kind=llava"])
