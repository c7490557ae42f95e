"""Invalid input gives one error message and creates no files; tests/end_to_end/ tests the exit codes."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig
from PIL import Image

from each_case import check_each
from families import change_json
from wfm_ds.data import datasets
from wfm_ds.data.buckets import Buckets
from wfm_ds.data.datasets import find_usable_samples, load_data
from wfm_ds.data.pixels import Framing
from wfm_ds.engine.adapter_layers import check_lora_layers
from wfm_ds.errors import DataError, ModelError, RecipeError, RewardError, UserError
from wfm_ds.models import registry
from wfm_ds.models.assets.few_steps import read_few_steps
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.sections import LoraRecipe
from wfm_ds.runs.model_loading import load_model
from wfm_ds.training import preflight
from wfm_ds.training.preflight import check_and_load_data, check_run


@pytest.fixture
def load(tmp_path, root, tiny_pipelines):
    """Return `load(name, data, *overrides)`, which loads a valid tiny recipe with this data and these overrides."""

    def load(name, data, *overrides):
        places = [f"run.output_dir={tmp_path / 'out'}", f"model.path={tiny_pipelines('sd3')}", f"data.path={data}"]
        return recipe_file.load_recipe(root / "tests" / "recipes" / f"{name}.yaml", [*places, *overrides])

    return load


@pytest.fixture
def rl(load, root):
    return partial(load, "sd3_nft", root / "recipes" / "prompts" / "colors")


@pytest.fixture
def sft(load, images):
    return partial(load, "sd3_sft", images)


@pytest.fixture
def ddrl(load, images):
    return partial(load, "sd3_ddrl", images)


@pytest.fixture
def dpo(load, images):
    """Return a loader of the DPO recipe with 20 pairs of the images."""
    pairs = [{"prompt": "light", "chosen": f"{i + 20}.png", "rejected": f"{i:02d}.png"} for i in range(20)]
    (images / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return partial(load, "sd3_dpo", images / "pairs.jsonl", "validation.holdout=0.2")


def load_on_cpu(recipe):
    return load_model(recipe, torch.device("cpu"))


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(40):
        Image.fromarray(np.full((32, 32, 3), 6 * i, np.uint8)).save(folder / f"{i:02d}.png")
        (folder / f"{i:02d}.json").write_text(json.dumps({"prompt": f"shade {i % 4}"}))
    return folder


def test_valid_recipes_pass_and_write_nothing(rl, sft, tmp_path):
    check_and_load_data(rl(), world_size=2)
    check_and_load_data(sft(), world_size=2)
    assert not (tmp_path / "out").exists()


def test_report_names_the_derived_numbers(sft):
    text = str(check_run(sft(), world_size=2))
    assert "samples per step           16 (8 per rank)" in text
    assert "39 to train on, 1 held out" in text
    assert "denoiser parameters        87,168, trained 86,104" in text
    assert text.endswith("all checks passed")


def test_the_report_says_how_often_prompts_chosen_by_rewards_repeat(rl, caplog):
    spread = str(check_run(rl("run.steps=40", "data.choose=reward_std"), world_size=1))
    assert "prompts                    12, by reward_std, 6.67 draws each\n" in spread
    assert "data.choose" not in caplog.text
    check_and_load_data(rl("run.steps=12", "data.choose=reward_std"), world_size=1)
    assert "draws each of its 12 prompts only 2 times: set data.choose: even, or use fewer prompts" in caplog.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flash", r"flash is not installed: install flash-attn 2\.6\.3 or newer \(pip install flash-attn"),
        ("sage", "sage has no backward pass and"),
        ("cudnn", r"cudnn supports heads of 8 to 128|cudnn does not support float32: set model\.dtype: bfloat16"),
    ],
)
def test_an_attention_kernel_that_cannot_be_used_is_refused(sft, name, words):
    assert "attention                  native" in str(check_run(sft(), world_size=1))
    with pytest.raises(UserError, match=rf"^model\.attention: {words}.*, or set it to auto or native$"):
        str(check_run(sft(f"model.attention={name}"), world_size=1))


MASTER = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}


def test_replicas_must_fit_on_a_node(sft, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", **MASTER}.items():
        monkeypatch.setenv(name, value)
    check_and_load_data(sft("engine.sequence_parallel=2"), world_size=4)
    with pytest.raises(RecipeError, match=r"engine\.sequence_parallel 4 does not divide the 2 ranks of a node"):
        check_and_load_data(sft("engine.sequence_parallel=4"), world_size=4)


@pytest.mark.parametrize("variable", ["LOCAL_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_local_reward_service_is_refused_on_two_hosts(rl, sft, monkeypatch, variable):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", variable: "1", **MASTER}.items():
        monkeypatch.setenv(name, value)
    words = "cannot be reached by 1 of 2 ranks, which run on other hosts: "
    with pytest.raises(RecipeError, match=f"^reward.spawn: true: the reward service {words}start a separate service"):
        check_and_load_data(rl(), world_size=2)
    check_and_load_data(rl(), world_size=1)
    with pytest.raises(RecipeError, match=f"^validation.held_out_rewards: their service {words}remove them"):
        check_and_load_data(sft("validation.held_out_rewards=[color]"), world_size=2)
    check_and_load_data(sft(), world_size=2)
    preflight.check_hosts(rl("reward.spawn=false", "reward.endpoint=tcp://10.0.0.5:6100"), 2, 1)


def test_local_rollout_workers_are_refused_on_two_hosts(rl, root):
    recipe = rl("rollout.mode=async", "reward.spawn=false", "reward.endpoint=tcp://10.0.0.5:6100")
    with pytest.raises(RecipeError, match=r"^rollout\.bind: ipc cannot be reached by 1 of 2 ranks"):
        preflight.check_hosts(recipe, 2, 1)
    preflight.check_hosts(recipe, 2, 2)


def test_more_ranks_than_gpus_cause_a_warning(rl, monkeypatch):
    monkeypatch.setattr(preflight, "uses_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    [warning] = preflight.host_warnings(rl(), 16)
    assert warning.startswith(
        "this machine has 8 GPUs. On several hosts: reward.spawn: true: the reward service cannot"
    )
    assert preflight.host_warnings(rl(), 8) == []
    monkeypatch.setattr(preflight, "uses_cuda", lambda: False)
    assert preflight.host_warnings(rl(), 16) == []


def test_rewards_on_gpus_are_not_started_on_a_machine_without_gpus(rl, monkeypatch, caplog):
    monkeypatch.setattr(preflight, "is_accelerator_present", lambda: False)
    check_run(rl("reward.functions=[{name: color, device: 'cuda:7'}]"), world_size=1)
    assert "the rewards were not started: this machine has no GPU for color" in caplog.text
    for name in ("REMOTE_REWARD_TOKEN", "REMOTE_REWARD_ENQUEUE_URL", "REMOTE_REWARD_FETCH_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/x")
    with pytest.raises(RewardError, match=r"remote/x: cannot connect to .*Connection refused"):
        check_run(rl("reward.functions=[{name: color, device: 'cuda:7'}, {name: remote/x}]"), world_size=1)


def test_a_network_of_a_package_that_is_not_installed_is_refused_by_the_check(sft, tiny_pipelines, tmp_path):
    folder = shutil.copytree(tiny_pipelines("sd3"), tmp_path / "model")
    change_json(folder / "model_index.json", transformer=["absent_package", "MyNetwork"])
    with pytest.raises(ModelError, match=r"absent_package\.MyNetwork, which cannot be imported"):
        check_run(sft(f"model.path={folder}"), world_size=1)


def test_lora_parameters_of_the_report_are_those_that_peft_adds(sft):
    recipe = sft("lora={rank: 4, alpha: 8}")
    model = load_on_cpu(recipe)
    model.denoiser.requires_grad_(False)
    model.denoiser.add_adapter(LoraConfig(r=4, target_modules=list(model.default_lora_targets)))
    added = sum(p.numel() for p in model.denoiser.parameters() if p.requires_grad)
    assert f"trained {added:,}" in str(check_run(recipe, world_size=1))


@check_each(
    ("overrides", "error", "message"),
    [
        (["model.path=/nowhere"], ModelError, "/nowhere does not exist"),
        (["model.path=tiny:sdxl"], UserError, "sdxl"),
        (["data.path=/nowhere"], DataError, "/nowhere"),
        (["reward.functions=[{name: colour}]"], RewardError, "did you mean color"),
        (["reward.functions=[{name: color, options: {shade: 1}}]"], RewardError, "no option shade"),
        (
            ["reward.functions=[{name: motion}]"],
            RecipeError,
            "reward motion scores videos, but the model generates images",
        ),
        (["reward.functions=[{name: color, options: {frames: all}}]"], RewardError, "reward color: frames is 'all'"),
        (["reward.functions=[{name: ocr, options: {threads: many}}]"], RewardError, "reward ocr: threads is 'many'"),
        (["reward.functions=[{name: digits}]"], RecipeError, "needs the metadata key 'label', missing in 12 of 12"),
        (["rollout.group_size=3"], RecipeError, r"= 2 \* 3 = 6 samples are not divisible by 4 ranks"),
        (["validation.prompts=/nowhere.txt"], DataError, "/nowhere.txt"),
        (["engine.deepspeed=zero9"], RecipeError, "unknown name zero9: set one of"),
        (["engine.sequence_parallel=3"], RecipeError, "engine.sequence_parallel 3 does not divide the 4 ranks"),
        (
            ["reward.spawn=false", "reward.endpoint=ipc:///tmp/nobody", "reward.start_timeout_s=1"],
            *(RewardError, "/tmp/nobody"),
        ),
        (["data.buckets=[]"], RecipeError, "data.buckets"),
        (["data.buckets=[[16, 16], [16, 16]]"], RecipeError, "buckets has a duplicate size"),
        (["data.buckets=[[16, 0]]"], RecipeError, "data.buckets"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_in_one_sentence(rl, tmp_path, overrides, error, message):
    with pytest.raises(error, match=message) as raised:
        check_and_load_data(rl(*overrides), world_size=4)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@check_each(
    ("values", "message"),
    [
        ({"reduce_bucket_size": "many"}, "zero_optimization.reduce_bucket_size: Input should be a valid integer"),
        ({"overlap_comm": [[]]}, "zero_optimization.overlap_comm: Input should be a valid boolean"),
        ({"stage": 3, "sub_group_size": -1}, "zero_optimization.sub_group_size: Input should be greater"),
    ],
)
def test_values_that_deepspeed_rejects_are_refused_with_their_key(rl, tmp_path, values, message):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, **values}}))
    with pytest.raises(RecipeError, match=f"mine.json: {message}") as raised:
        check_and_load_data(rl(f"engine.deepspeed={path}"), world_size=1)
    assert "\n" not in str(raised.value)


def test_a_check_waits_only_briefly_for_a_missing_reward_service(rl, tmp_path, monkeypatch):
    assert preflight.SERVICE_WAIT_S <= 10
    monkeypatch.setattr(preflight, "SERVICE_WAIT_S", 0.3)
    address = f"ipc://{tmp_path / 'dead'}"
    dead = rl("reward.spawn=false", f"reward.endpoint={address}")
    message = f"reward service: no reply within 0.3 s: nothing listens at {address}: start the service, or correct its"
    with pytest.raises(RewardError, match=message):
        check_run(dead, world_size=1)


def test_a_batch_larger_than_its_reward_takes_is_refused_before_anything_starts(rl, root, monkeypatch):
    monkeypatch.syspath_prepend(root / "tests" / "reward")
    check_and_load_data(rl("reward.functions=[{name: probe_rewards:Few}]"), world_size=1)
    check_and_load_data(rl("reward.functions=[{name: probe_rewards:Few, max_batch: 4}]"), world_size=1)
    with pytest.raises(RewardError, match="reward probe_rewards:Few accepts at most 4 items per batch; max_batch is 5"):
        check_and_load_data(rl("reward.functions=[{name: probe_rewards:Few, max_batch: 5}]"), world_size=1)


def test_model_of_another_family_is_refused_with_the_supported_ones(rl, tiny_pipelines, tmp_path):
    folder = shutil.copytree(tiny_pipelines("sd3"), tmp_path / "flux")
    change_json(folder / "model_index.json", _class_name="FluxPipeline")
    with pytest.raises(ModelError, match=r"FluxPipeline are not supported; supported: .*StableDiffusion3Pipeline"):
        check_and_load_data(rl(f"model.path={folder}"), world_size=1)


def test_data_without_samples_or_metadata_is_refused(sft, ddrl, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        check_and_load_data(sft(f"data.path={tmp_path / 'empty'}"), world_size=1)
    with pytest.raises(RecipeError, match=r"needs the metadata key 'label', missing in 40 of 40 prompts"):
        check_and_load_data(ddrl("reward.functions=[{name: digits}]"), 1)


def test_captions_without_prompt_are_counted_up_to_the_limit(sft, images):
    (images / "00.json").write_text('{"caption": "a typo"}')
    assert len(load_data(sft()).samples) == 38  # one invalid, one held out
    for i in range(1, 4):
        (images / f"{i:02d}.json").write_text("{}")
    with pytest.raises(DataError, match=r"4 of 40"):
        check_and_load_data(sft(), world_size=1)


def test_the_advice_about_validation_prompts_fits_the_data(rl, tmp_path):
    def find_warnings(*overrides):
        recipe = rl("validation.held_out_rewards=[jpeg_incompressibility]", *overrides)
        return preflight.validation_reward_warnings(recipe, load_data(recipe))

    many = tmp_path / "many.txt"
    many.write_text("".join(f"a dog with {n} tails\n" for n in range(40)))
    for overrides, advice in (
        (["validation.num_prompts=4"], "no alarm is possible. Set validation.num_prompts to 12"),
        (["validation.num_prompts=40"], "Add prompts to the data or to validation.prompts, until there are 32"),
        ([f"validation.prompts={many}", "validation.num_prompts=4"], "Set validation.num_prompts to 32"),
    ):
        assert find_warnings("validation.every=1", *overrides)[0].endswith(advice), overrides
    assert find_warnings("validation.every=1", f"validation.prompts={many}", "validation.num_prompts=32") == []


def test_the_report_reads_the_first_files(sft, images):
    for i in range(4):
        (images / f"{i:02d}.png").write_bytes(b"")
    check_and_load_data(sft(), world_size=1)  # a start checks file names only
    with pytest.raises(DataError, match=r"4 of 36 tested samples are invalid, .* allows 2 of 40\. .*00\.png: cannot"):
        str(check_run(sft(), world_size=1))
    assert "all checks passed" in str(check_run(sft("data.max_bad_fraction=0.2"), world_size=1))


def test_the_limit_of_broken_media_is_relative_to_the_data_set(sft, images, caplog, monkeypatch):
    (images / "00.png").write_bytes(b"")
    data = load_data(sft("validation.holdout=0"))
    assert data.num_samples == 40
    held_out = data.samples[:4]  # 1 of these 4 is broken, 1 of 40 in the data set
    one = Buckets(Framing(height=16, width=16), [(16, 16)])
    counts = []
    monkeypatch.setattr(datasets.ProgressDisplay, "advance", lambda self: counts.append((self._title, self._total)))
    assert find_usable_samples(data.samples, sft(), one, 3, dataset_size=40) == held_out[1:]
    assert "skipped" in caplog.text
    assert counts == [("checking samples", 3)] * 3  # the broken sample is not counted
    with pytest.raises(DataError, match=r"1 of 4 tested samples are invalid, .* allows 0 of 4\. "):
        find_usable_samples(held_out, sft(), one, 3, dataset_size=4)
    with pytest.raises(DataError, match=r"all 1 samples held out are invalid; repair .*00\.png: "):
        find_usable_samples(
            held_out[:1], sft("data.max_bad_fraction=0.5"), one, 3, dataset_size=40, what="samples held out"
        )


@pytest.mark.parametrize("buckets", ["[[16, 16], [16, 18]]", "auto"])
def test_unsupported_bucket_sizes_are_refused_and_others_are_checked(sft, images, buckets):
    Image.new("RGB", (64, 32)).save(images / "01.png")
    (images / "02.png").write_bytes(b"")
    with pytest.raises(RecipeError, match=r"data\.buckets: size \[\d+, \d+\] is not supported: .* must be a"):
        str(check_run(sft(f"data.buckets={buckets}", "sampling.height=128", "sampling.width=128"), world_size=1))
    assert "all checks passed" in str(check_run(sft("data.buckets=auto"), world_size=1))


FRAMES, LAYERS = "algorithm.max_num_conditional_frames", "lora.target_modules: "
EDITS = ("data.kind=folder", "data.inputs=[source]")
SEEN_EDITS = (*EDITS, "validation.held_out_rewards=[preservation]")


@check_each(
    ("kind", "family", "overrides", "message"),
    [
        ("rl", "sd3", ["sampling.height=34"], r"sampling: .*multiple of 4"),
        ("rl", "sd3", ["engine.sequence_parallel=5"], "attention heads of SD3Transformer2DModel"),
        ("rl", "sd3", ["lora.target_modules=[nope]"], f"{LAYERS}no linear layer of the denoiser ends with nope"),
        ("rl", "sd3", ["lora.target_modules=[to_q,pos_embed.proj]"], f"{LAYERS}pos_embed.proj is of type Conv2d, "),
        ("rl", "sd3", ["lora.modules_to_save=[nope]"], r"lora\.modules_to_save: no layer with weights ends with nope"),
        ("rl", "sd3", ["lora.modules_to_save=[norm_out]"], "norm_out contains .* these instead: norm_out.linear"),
        *(
            ("rl", family, ["rollout.cuda_graph=true"], rf"rollout\.cuda_graph: the network of {family} copies numbers")
            for family in ("qwen_image", "qwen_image_edit_plus")
        ),
        ("sft", "cosmos3", ["lora={modules_to_save: [action_proj_in]}"], "action_proj_in contains .*action_proj_in.fc"),
        ("sft", "sd3", [f"{FRAMES}=1"], "max_num_conditional_frames 1: sd3 supports 0 .*: change the range 0 to 1"),
        ("sft", "flux2", [*SEEN_EDITS, "data.source_size=[32,64]"], r"\[32, 64\] has another .* size \[16, 16\], with"),
        (
            *("sft", "flux2", [*SEEN_EDITS, "data.source_size=[64,68]", "data.buckets=[[16,16],[16,32]]"]),
            r"data.source_size \[64, 68\] has another aspect ratio than samples of size \[16, 32\]",
        ),
        ("sft", "flux2", [*SEEN_EDITS, "data.source_size=[64,68]"], None),
        ("sft", "flux2", [*EDITS, "data.source_size=[32,64]", "validation.held_out_rewards=[color]"], None),
        ("ddrl", "sd3", [f"{FRAMES}=1"], "sd3 supports 0 conditioning latent frames: change the range 0 to 1"),
        ("ddrl", "sd3", ["sampling.s_churn=0"], r"steps \[0, 1, 2\] add no noise"),
        ("sft", "cosmos25", [f"{FRAMES}=1"], "leaves none of 1 latent frames to predict"),
        ("sft", "cosmos25", ["sampling.num_frames=5", f"{FRAMES}=3"], "supports 0 or 1 or 2 conditioning"),
        ("sft", "cosmos25", ["sampling.num_frames=4"], r"sampling: num_frames must be 4 \* k \+ 1"),
        ("sft", "cosmos25", ["sampling.num_frames=5", f"{FRAMES}=1"], None),
        ("sft", "wan22_i2v", ["sampling.num_frames=5", f"{FRAMES}=1"], "1: wan supports 1 .*: change the range 0 to 1"),
        (
            *("sft", "wan22_i2v"),
            ["sampling.num_frames=9", "algorithm.min_num_conditional_frames=1", f"{FRAMES}=2"],
            "2: wan supports 1 conditioning latent frames: change the range 1 to 2",
        ),
    ],
)
def test_a_setting_that_the_model_lacks_is_a_recipe_error(
    rl, sft, ddrl, tiny_pipelines, kind, family, overrides, message
):
    places = [f"model.path={tiny_pipelines(family)}", *(["model.guardrail=off"] if "cosmos" in family else [])]
    recipe = {"rl": rl, "sft": sft, "ddrl": ddrl}[kind](*places, *overrides)
    if message is None:
        assert load_on_cpu(recipe).family == family
        return
    with pytest.raises(UserError, match=message) as raised:
        load_on_cpu(recipe)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "ranks", "enough", "small", "too_few"),
    [
        ("sd3", 4, "[16, 16]", "[4, 8]", "number of image tokens, 2"),
        ("sana", 9, "[64, 32]", "[32, 64]", "number of rows of patches, 8"),
    ],
)
def test_a_size_too_small_for_the_ranks_of_a_replica_is_refused(
    sft, tiny_pipelines, family, ranks, enough, small, too_few
):
    def load(size, *buckets):
        height, width = size.strip("[]").split(", ")
        sizes = [f"sampling.height={height}", f"sampling.width={width}", *buckets]
        model = f"model.path={tiny_pipelines(family)}"
        load_on_cpu(sft(model, f"engine.sequence_parallel={ranks}", *sizes))

    load(enough)
    load(enough, f"data.buckets=[{enough}]")
    for where, size, buckets in (
        ("sampling", small, []),
        ("data.buckets", enough, [f"data.buckets=[{enough}, {small}]"]),
    ):
        with pytest.raises(RecipeError, match=too_few) as refused:
            load(size, *buckets)
        assert str(refused.value).startswith(f"{where}: size {small} cannot be split over ranks: ")


def test_requirements_of_two_experts_are_checked_with_the_model(rl, tiny_pipelines):
    two, guided = (
        f"model.path={tiny_pipelines('wan22')}",
        ["sampling.guidance_scale=4", "sampling.guidance_scale_low=3"],
    )
    assert len(load_on_cpu(rl(two, *guided)).sigma_ranges) == 2
    with pytest.raises(RecipeError, match=r"sampling\.guidance_scale_low: .* has no second expert: remove the key"):
        load_on_cpu(rl(*guided))
    with pytest.raises(RecipeError, match="stage 1 cannot train a model with two experts"):
        load_on_cpu(rl(two, "engine.deepspeed=zero1"))
    with pytest.raises(RecipeError, match="guidance_scale_low needs a guidance_scale above 1"):
        rl(two, "sampling.guidance_scale_low=3")


def test_the_random_denoiser_depends_only_on_the_run_seed(sft):
    def first_weight(*overrides):
        model = load_on_cpu(sft(*overrides))
        return next(p for name, p in model.denoiser.named_parameters() if name.endswith("to_q.weight")).detach()

    stored, one = first_weight(), first_weight("model.denoiser_init=random", "run.seed=1")
    assert torch.equal(one, first_weight("model.denoiser_init=random", "run.seed=1"))
    assert not torch.equal(one, first_weight("model.denoiser_init=random", "run.seed=2"))
    assert not torch.equal(one, stored)


def test_validation_folder_replaces_the_holdout(sft, images, tmp_path):
    held = tmp_path / "held"
    held.mkdir()
    for suffix in (".png", ".json"):
        shutil.copy(images / f"07{suffix}", held / f"mine{suffix}")
    data = load_data(sft(f"validation.path={held}"))
    assert len(data.samples) == 40
    assert [s.media.path.name for s in data.held_out] == ["mine.png"]
    assert [p.text for p in data.validation_prompts] == ["shade 3"]


def test_the_report_of_pairs_counts_them_and_the_forwards_of_the_reference(dpo, images):
    lines = str(check_run(dpo(), 2)).splitlines()
    data = load_data(dpo())
    assert len(data.samples) + len(data.held_out) == 20
    assert data.held_out
    assert "recipe                     dpo, LoRA" in lines
    assert f"samples                    {len(data.samples)} to train on, {len(data.held_out)} held out" in lines
    assert "samples per step           16 (8 per rank)" in lines
    (head,) = [line.split() for line in lines if line.startswith("  GiB")]
    assert {"references", "encode", "train"} <= set(head)
    for sample in data.samples[:5]:
        sample.rejected.path.write_bytes(b"")
    with pytest.raises(DataError, match=r"of \d+ tested samples are invalid"):
        str(check_run(dpo(), 2))


def test_ddrl_takes_its_prompts_from_the_captions_of_all_media(ddrl):
    data = load_data(ddrl())
    assert len(data.samples) == 40
    assert data.held_out == []
    assert data.prompts == [sample.prompt for sample in data.samples]
    assert [prompt.text for prompt in data.validation_prompts] == [f"shade {i}" for i in range(4)]


@pytest.mark.parametrize("kind", ["index", "call", "lora", "fine"])
def test_flow_matching_on_a_distilled_model_causes_a_warning(load, rl, images, tiny_pipelines, tmp_path, caplog, kind):
    folder, lora = tmp_path / "model", tmp_path / "lora"
    shutil.copytree(tiny_pipelines("flux2" if kind == "index" else "sd3"), folder)
    lora.mkdir()
    few = json.dumps({"num_inference_steps": 4, "guidance_scale": 1.0})
    if kind == "index":
        change_json(folder / "model_index.json", is_distilled=True)
    elif kind != "fine":
        ((folder if kind == "call" else lora) / "call.json").write_text(few)
    recipe = rl(f"model.path={folder}", f"lora.init_from={lora}")
    (warning,) = preflight.few_step_warnings(recipe) or [""]
    what = {"index": f"model.path {folder}", "call": f"model.path {folder}", "lora": f"lora.init_from {lora}"}
    expected = f"{what[kind]} was distilled to few steps, which diffusion_nft undoes" if kind != "fine" else ""
    assert warning.startswith(expected)
    assert bool(warning) == bool(expected)
    student = load("sd3_dmd2", "p", f"model.path={folder}", f"lora.init_from={lora}")
    assert preflight.few_step_warnings(student) == []


@check_each(
    ("family", "call", "steps"),
    [
        ("sd3", {"guidance_scale": 1}, 4),
        ("sd3", {"guidance_scale": 2}, None),
        ("sd3", {"guidance_scale": None}, None),
        ("qwen_image", {"true_cfg_scale": 1.0}, 4),
        ("qwen_image", {"true_cfg_scale": 4.0, "guidance_scale": 1.0}, None),
        ("z_image", {"guidance_scale": 0.0}, 4),
        ("z_image", {"guidance_scale": 1.0}, None),
        ("cosmos25", {"guidance_scale": 0}, 4),
        ("wan22", {"guidance_scale": 1.0, "num_inference_steps": 9}, None),
        ("flux2_dev", {"guidance_scale": 2.5}, 4),  # an input of the network
    ],
)
def test_each_family_has_its_own_argument_for_no_guidance(tiny_pipelines, tmp_path, family, call, steps):
    folder = tiny_pipelines(family)
    (tmp_path / "call.json").write_text(json.dumps({"num_inference_steps": 4, **call}))
    index = json.loads((folder / "model_index.json").read_text())
    assert read_few_steps(tmp_path, registry.find_family(folder), index) == steps


def test_a_guided_teacher_without_a_measured_spread_causes_a_warning(load):
    (warning,) = preflight.spread_warnings(load("sd3_dmd2", "p", "rollout.group_size=1"))
    assert "set group_size to 2" in warning
    for words in (["algorithm.teacher.guidance_scale=1", "rollout.group_size=1"], []):
        assert preflight.spread_warnings(load("sd3_dmd2", "p", *words)) == []


def test_a_student_of_noisy_rollouts_is_warned_that_its_evaluation_has_no_noise(load, rl):
    noisy = ["sampling.solver=cps", "sampling.noise_level=1"]
    (warning,) = preflight.noisy_student_warnings(load("sd3_dmd2", "p", *noisy))
    assert "sampling.solver cps adds noise in the rollouts" in warning
    assert warning.endswith(": set sampling.eval_solver: cps and eval_grid: even")
    (other,) = preflight.noisy_student_warnings(load("sd3_dmd2", "p", noisy[0]))
    assert "lower sampling.noise_level" in other
    same_noise = ["sampling.eval_solver=cps", "sampling.eval_grid=even"]
    assert preflight.noisy_student_warnings(load("sd3_dmd2", "p", *noisy, *same_noise)) == []
    assert preflight.noisy_student_warnings(load("sd3_dmd2", "p")) == []
    assert preflight.noisy_student_warnings(rl(*noisy)) == []


def test_a_model_without_guidance_cannot_be_a_guided_teacher(load, tiny_pipelines):
    words = [f"model.path={tiny_pipelines('flux2_dev')}", "sampling.height=32", "sampling.width=48"]
    with pytest.raises(
        RecipeError, match=r"dmd2 has a teacher with guidance_scale 4, which this model does not support"
    ):
        load_on_cpu(load("sd3_dmd2", "p", *words))
    load_on_cpu(load("sd3_dmd2", "p", *words, "algorithm.teacher.guidance_scale=1"))


def test_a_model_with_two_experts_is_not_distilled_yet(load, tiny_pipelines):
    words = [f"model.path={tiny_pipelines('wan22')}", "sampling.num_frames=5", "algorithm.teacher.guidance_scale=1"]
    with pytest.raises(RecipeError, match="algorithm dmd2 does not support wan yet, which has two experts"):
        load_on_cpu(load("sd3_dmd2", "p", *words))


def test_a_prompt_without_a_teacher_is_refused(load, root):
    teachers = "algorithm.teachers=[{guidance_scale: 2, when: {task: ocr}}]"
    with pytest.raises(RecipeError, match="has 0 teachers by its metadata"):
        check_and_load_data(load("sd3_opd", root / "recipes" / "prompts" / "colors", teachers), 1)


def test_a_probably_unintended_recipe_causes_a_warning(ddrl, caplog):
    check_and_load_data(ddrl("algorithm.data_beta=0"), 1)
    assert "is not regularized by data" in caplog.text


def test_a_network_that_cannot_have_adapters_is_refused():
    with pytest.raises(RecipeError, match="Linear has no method add_adapter"):
        check_lora_layers(torch.nn.Linear(2, 2), LoraRecipe(), ["to_q"])
