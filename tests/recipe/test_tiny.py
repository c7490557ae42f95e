"""--tiny: the settings that a tiny recipe keeps; all other settings are replaced."""

import json
from pathlib import Path

import pytest

from each_case import check_each
from wfm_ds.demos.tiny_data import write_tiny_data
from wfm_ds.errors import RecipeError
from wfm_ds.models import registry
from wfm_ds.models.assets.released_repos import RELEASED_REPOS
from wfm_ds.models.tiny import FAMILIES, LANGUAGE_FAMILIES
from wfm_ds.models.tiny.pipelines import PIPELINES
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe import shipped_recipes
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.recipe.tiny import TINY_FAMILIES, describe_tiny_recipe, find_tiny_family

NAMES = shipped_recipes.list_recipe_names()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return the user's cache folder with all built-in data sets."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WFM_CACHE", str(folder))
        yield folder


def texts(values):
    """Return all strings in a recipe's values."""
    if isinstance(values, dict | list):
        inner = values.values() if isinstance(values, dict) else values
        return [text for value in inner for text in texts(value)]
    return [values] if isinstance(values, str) else []


def load(name, *overrides, world_size=1):
    return recipe_file.load_tiny_recipe(Path(name), overrides, world_size=world_size)


@check_each("name", NAMES)
@pytest.mark.slow
def test_a_tiny_recipe_names_only_files_that_exist_and_keeps_what_the_recipe_is(name, cache):
    full, tiny = recipe_file.load_recipe(Path(name)), load(name)
    write_tiny_data(tiny)
    for text in texts(tiny.model_dump(mode="json", exclude={"run": {"output_dir"}})):
        assert "/" not in text or Path(text).exists(), text
        assert "://" not in text
    assert str(tiny.run.output_dir) == f"outputs/tiny/{name}"
    assert (tiny.run.steps, tiny.model.dtype) == (2, "float32")
    assert tiny.model.path.startswith("tiny:")
    assert (tiny.algorithm.name, tiny.lora is None) == (full.algorithm.name, full.lora is None)
    assert tiny.ema == (full.ema and full.ema.model_copy(update={"every": 1}))
    assert full.engine.deepspeed.startswith(tiny.engine.deepspeed)
    assert tiny.optimizer == full.optimizer
    assert tiny.algorithm.conditioning_frame_range == full.algorithm.conditioning_frame_range
    assert tiny.data.inputs == full.data.inputs
    for key in ("solver", "guidance_scale", "guidance_scale_low", "grid", "noise_level", "same_noise"):
        assert getattr(tiny.sampling, key) == getattr(full.sampling, key)
    assert (tiny.sampling.num_frames > 1) == (full.sampling.num_frames > 1)
    assert tiny.is_async == full.is_async
    kinds = {"cosmos": "paired", "lerobot": "paired"}
    assert tiny.data.kind == kinds.get(full.data.kind, full.data.kind)
    for world_size in (1, 2, 4):
        derive_run_sizes(load(name, world_size=world_size), world_size)


def test_values_set_by_the_user_are_kept(cache):
    tiny = load("cp_nft", "run.steps=5", "sampling.height=48", "reward.functions=[{name: mock}]", "run.output_dir=x")
    assert (tiny.run.steps, tiny.sampling.height, str(tiny.run.output_dir)) == (5, 48, "x")
    assert [function.name for function in tiny.rl.reward.functions] == ["mock"]
    assert load("sd3_nft", "algorithm.name=awm").algorithm.name == "awm"
    with pytest.raises(RecipeError, match=r"override run\.stepz=2: run\.stepz is not a key"):
        load("cp_nft", "run.stepz=2")


def test_a_reward_without_weights_stays_and_is_not_held_out_and_trained(cache):
    video, camera = load("wan_video_nft"), load("sana_wm_nft")
    assert [one.name for one in video.validation.held_out_rewards] == ["motion"]
    assert [one.name for one in video.rl.reward.functions] == ["color"]
    assert [(one.name, one.weight) for one in camera.rl.reward.functions] == [("consistency", 0.3)]
    assert [one.name for one in load("wan22_i2v_nft").rl.reward.functions] == ["jpeg_compressibility"]  # no colours
    actions = load("cosmos3_nano_actions_nft").rl.reward.functions
    assert [one.name for one in actions] == ["consistency", "brightness"]


def test_replicas_fit_the_ranks(cache):
    name = "wan_long_video_sft_lora"
    assert [load(name, world_size=n).engine.sequence_parallel for n in (1, 2, 3, 4)] == [1, 2, 1, 2]


def test_windows_and_trained_steps_fit_few_denoising_steps(cache):
    assert load("cp_ddrl_2b").algorithm.train_on == [0, 2, 4]
    assert load("sd3_mix_grpo").sampling.window.model_dump(include={"size", "range"}) == {"size": 4, "range": (0, 5)}
    assert load("wan22_i2v_flow_grpo").sampling.window.indices == [1, 3]
    assert load("z_image_flow_grpo").sampling.window.range == (1, 2)
    assert load("sd3_flow_grpo_fast").sampling.window.range == (0, 3)  # as noisy as the first half of ten steps


def test_offload_services_trackers_and_uploads_are_off(tmp_path, cache):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"defaults: {shipped_recipes.require_recipe('sd3_nft')}\n"
        "engine: {deepspeed: zero2, compile: true}\n"
        "model: {base_precision: fp8, attention: cudnn, revision: abc}\n"
        "optimizer: {name: adamw8bit}\n"
        "rollout: {mode: async, devices: ['cuda:1'], bind: 'tcp://10.0.0.1:5000', keys: /secret,"
        " policy_folder: /shared}\n"
        "reward: {functions: [{name: my.module:Judge, options: {url: 'http://judge'}}]}\n"
        "validation: {prompts: /data/prompts.txt, held_out_rewards: [hpsv3]}\n"
        "logging: {trackers: [tensorboard, wandb], wandb: {entity: us}}\n"
        "checkpoint: {storage: 's3://bucket/run'}\n"
        "export: {push_to_hub: us/model}\n"
    )
    tiny = load(recipe)
    dumped = json.dumps(tiny.model_dump(mode="json"))
    words = ("tcp:", "secret", "/shared", "http:", "s3:", "us/model", "abc", "cuda:", "/data/")
    assert [word for word in words if word in dumped] == []
    assert tiny.model.base_precision is None
    assert (tiny.engine.compile, tiny.optimizer.name, tiny.logging.trackers) == (False, "adamw", ["tensorboard"])
    assert str(tiny.run.output_dir) == "outputs/tiny/mine"


def test_every_family_and_released_model_is_known():
    assert {family.name for family in TINY_FAMILIES} == {*PIPELINES, *LANGUAGE_FAMILIES}
    for repo in RELEASED_REPOS:
        assert find_tiny_family(repo).name in FAMILIES


@check_each("family", [name for name in FAMILIES if name not in ("digits", "edits", "moving", "world")])
def test_a_local_pipeline_is_known_by_its_files(family, tiny_pipelines):
    assert find_tiny_family(str(tiny_pipelines(family))).name == family


@check_each("name", FAMILIES)
def test_a_family_is_described_like_its_model(name, tiny_pipelines):
    tiny, model = find_tiny_family(f"tiny:{name}"), registry.find_family(tiny_pipelines(name))
    assert (tiny.is_video, tiny.action_size is not None) == (model.is_video, "actions" in model.input_specs)


def test_an_unknown_model_needs_a_family(tmp_path, cache):
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: {shipped_recipes.require_recipe('sd3_nft')}\nmodel: {{path: /models/mine}}\n")
    with pytest.raises(RecipeError, match=r"model\.path /models/mine: .* add model\.path=tiny:FAMILY \(sd3, "):
        load(path)
    assert load(path, "model.path=tiny:sd3").model.path == "tiny:sd3"


def test_inputs_without_built_in_data_are_an_error(tmp_path, cache):
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: {shipped_recipes.require_recipe('wan_sft_lora')}\ndata: {{inputs: [depth]}}\n")
    with pytest.raises(RecipeError, match=r"data\.inputs depth: --tiny has data with"):
        load(path)


def test_one_log_line_lists_the_replaced_values(cache):
    assert describe_tiny_recipe(load("cp_nft")) == (
        "--tiny: tiny:cosmos25; 32 x 32, 5 frames; data prompts/colors (built in); reward motion + color; 2 steps; "
        "output in outputs/tiny/cp_nft"
    )
