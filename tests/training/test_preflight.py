"""Bad input gives one message and leaves nothing behind. The exit codes are tested in tests/end_to_end/."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig
from PIL import Image

from each_case import check_each
from wfm_ds.data.buckets import Buckets
from wfm_ds.data.datasets import find_usable_samples, load_data
from wfm_ds.data.pixels import Framing
from wfm_ds.errors import DataError, ModelError, RecipeError, RewardError, UserError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.runs.model_loading import load_model
from wfm_ds.training import preflight
from wfm_ds.training.preflight import check_and_load_data
from wfm_ds.training.run_check import check_run


@pytest.fixture
def rl(tmp_path, root, tiny_pipelines):
    """A recipe that passes, changed by overrides."""
    prompts = root / "recipes" / "prompts" / "colors"

    def recipe(*overrides):
        return recipe_file.load_recipe(
            root / "tests" / "recipes" / "sd3_nft.yaml",
            [
                f"run.output_dir={tmp_path / 'out'}",
                f"model.path={tiny_pipelines('sd3')}",
                f"data.path={prompts}",
                *overrides,
            ],
        )

    return recipe


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(40):
        Image.fromarray(np.full((32, 32, 3), 6 * i, np.uint8)).save(folder / f"{i:02d}.png")
        (folder / f"{i:02d}.json").write_text(json.dumps({"prompt": f"shade {i % 4}"}))
    return folder


@pytest.fixture
def sft(tmp_path, root, tiny_pipelines, images):
    def recipe(*overrides):
        return recipe_file.load_recipe(
            root / "tests" / "recipes" / "sd3_sft.yaml",
            [
                f"run.output_dir={tmp_path / 'out'}",
                f"model.path={tiny_pipelines('sd3')}",
                f"data.path={images}",
                *overrides,
            ],
        )

    return recipe


def test_good_recipes_pass_and_write_nothing(rl, sft, tmp_path):
    check_and_load_data(rl(), world_size=2)
    check_and_load_data(sft(), world_size=2)
    assert not (tmp_path / "out").exists()


def test_report_names_the_derived_numbers(sft):
    text = str(check_run(sft(), world_size=2))
    assert "samples per step           16 (8 per rank)" in text
    assert "39 to train on, 1 held out" in text
    assert "denoiser parameters        87,168, trained 86,104" in text
    assert text.endswith("all checks passed")


def test_report_says_how_often_prompts_come_that_rewards_choose_among(rl, caplog):
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
def test_a_kernel_of_attention_that_cannot_serve_is_refused(sft, name, words):
    assert "attention                  native" in str(check_run(sft(), world_size=1))
    with pytest.raises(UserError, match=rf"^model\.attention: {words}.*, or set it to auto or native$"):
        str(check_run(sft(f"model.attention={name}"), world_size=1))


def test_replicas_must_fit_on_a_node(sft, monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "2")
    check_and_load_data(sft("engine.sequence_parallel=2"), world_size=4)
    with pytest.raises(RecipeError, match=r"engine\.sequence_parallel 4 does not divide the 2 ranks of a node"):
        check_and_load_data(sft("engine.sequence_parallel=4"), world_size=4)


@pytest.mark.parametrize("variable", ["LOCAL_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_service_for_one_host_is_refused_on_two(rl, sft, monkeypatch, variable):
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setenv(variable, "1")
    words = "cannot be reached by 1 of 2 ranks, which run on other hosts: "
    with pytest.raises(RecipeError, match=f"^reward.spawn: true: the reward service {words}start a separate service"):
        check_and_load_data(rl(), world_size=2)
    check_and_load_data(rl(), world_size=1)
    with pytest.raises(RecipeError, match=f"^validation.held_out_rewards: their service {words}remove them"):
        check_and_load_data(sft("validation.held_out_rewards=[color]"), world_size=2)
    check_and_load_data(sft(), world_size=2)
    preflight.check_hosts(rl("reward.spawn=false", "reward.endpoint=tcp://10.0.0.5:6100"), 2, 1)


def test_rollout_workers_for_one_host_are_refused_on_two(rl, root):
    recipe = rl("rollout.mode=async", "reward.spawn=false", "reward.endpoint=tcp://10.0.0.5:6100")
    with pytest.raises(RecipeError, match=r"^rollout\.bind: ipc cannot be reached by 1 of 2 ranks"):
        preflight.check_hosts(recipe, 2, 1)
    preflight.check_hosts(recipe, 2, 2)


def test_more_ranks_than_gpus_are_warned_of(rl, monkeypatch):
    monkeypatch.setattr(preflight, "uses_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    [warning] = preflight.host_warnings(rl(), 16)
    assert warning.startswith(
        "this machine has 8 GPUs. On several hosts: reward.spawn: true: the reward service cannot"
    )
    assert preflight.host_warnings(rl(), 8) == []
    monkeypatch.setattr(preflight, "uses_cuda", lambda: False)
    assert preflight.host_warnings(rl(), 16) == []


def test_rewards_on_gpus_are_not_started_on_a_machine_without(rl, monkeypatch, caplog):
    monkeypatch.setattr(preflight, "is_accelerator_present", lambda: False)
    check_run(rl("reward.functions=[{name: color, device: 'cuda:7'}]"), world_size=1)
    assert "the rewards were not started: this machine has no GPU for color" in caplog.text


def test_lora_parameters_of_the_report_are_those_that_peft_adds(sft):
    recipe = sft("lora={rank: 4, alpha: 8}")
    model = load_model(recipe, torch.device("cpu"))
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
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(rl, tmp_path, overrides, error, message):
    with pytest.raises(error, match=message) as raised:
        check_and_load_data(rl(*overrides), world_size=4)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_batch_larger_than_its_reward_takes_is_refused_before_anything_starts(rl, root, monkeypatch):
    monkeypatch.syspath_prepend(root / "tests" / "reward")
    check_and_load_data(rl("reward.functions=[{name: probe_rewards:Few}]"), world_size=1)
    check_and_load_data(rl("reward.functions=[{name: probe_rewards:Few, max_batch: 4}]"), world_size=1)
    with pytest.raises(RewardError, match="reward probe_rewards:Few accepts at most 4 items per batch; max_batch is 5"):
        check_and_load_data(rl("reward.functions=[{name: probe_rewards:Few, max_batch: 5}]"), world_size=1)


def test_model_of_another_family_is_refused_with_the_supported_ones(rl, tiny_pipelines, tmp_path):
    folder = tmp_path / "flux"
    shutil.copytree(tiny_pipelines("sd3"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}))
    with pytest.raises(ModelError, match=r"FluxPipeline are not supported; supported: .*StableDiffusion3Pipeline"):
        check_and_load_data(rl(f"model.path={folder}"), world_size=1)


def test_endpoint_that_does_not_answer_is_an_error_in_time(rl, tmp_path):
    recipe = rl("reward.spawn=false", f"reward.endpoint=ipc://{tmp_path}/nobody", "reward.start_timeout_s=1")
    with pytest.raises(RewardError, match="nobody"):
        check_and_load_data(recipe, world_size=1)


def test_empty_data_folder_is_refused(sft, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        check_and_load_data(sft(f"data.path={tmp_path / 'empty'}"), world_size=1)


def test_captions_without_prompt_are_counted_up_to_the_limit(sft, images):
    (images / "00.json").write_text('{"caption": "a typo"}')
    assert len(load_data(sft()).samples) == 38  # one bad, one held out
    for i in range(1, 4):
        (images / f"{i:02d}.json").write_text("{}")
    with pytest.raises(DataError, match=r"4 of 40"):
        check_and_load_data(sft(), world_size=1)


def test_report_looks_into_the_first_files(sft, images):
    for i in range(4):
        (images / f"{i:02d}.png").write_bytes(b"")
    check_and_load_data(sft(), world_size=1)  # a start looks at names only
    with pytest.raises(DataError, match=r"4 of 36 tested samples are invalid, .* allows 2 of 40\. .*00\.png: cannot"):
        str(check_run(sft(), world_size=1))
    assert "all checks passed" in str(check_run(sft("data.max_bad_fraction=0.2"), world_size=1))


def test_few_broken_media_are_judged_by_the_size_of_their_data_set(sft, images, caplog):
    (images / "00.png").write_bytes(b"")
    data = load_data(sft("validation.holdout=0"))
    assert data.num_samples == 40
    held_out = data.samples[:4]  # a quarter of these are broken, of the data set a fortieth
    one = Buckets(Framing(height=16, width=16), [(16, 16)])
    assert find_usable_samples(held_out, sft(), one, 3, dataset_size=40) == held_out[1:]
    assert "skipped" in caplog.text
    with pytest.raises(DataError, match=r"1 of 4 tested samples are invalid, .* allows 0 of 4\. "):
        find_usable_samples(held_out, sft(), one, 3, dataset_size=4)
    with pytest.raises(DataError, match=r"all 1 samples held out are invalid; repair .*00\.png: "):
        find_usable_samples(
            held_out[:1], sft("data.max_bad_fraction=0.5"), one, 3, dataset_size=40, what="samples held out"
        )


@pytest.mark.parametrize("buckets", ["[[16, 16], [16, 18]]", "auto"])
def test_sizes_of_buckets_that_the_family_has_not_are_refused_and_others_are_looked_into(sft, images, buckets):
    Image.new("RGB", (64, 32)).save(images / "01.png")
    (images / "02.png").write_bytes(b"")
    with pytest.raises(RecipeError, match=r"data\.buckets: size \[\d+, \d+\] is not supported: .* must be a"):
        str(check_run(sft(f"data.buckets={buckets}", "sampling.height=128", "sampling.width=128"), world_size=1))
    assert "all checks passed" in str(check_run(sft("data.buckets=auto"), world_size=1))


@pytest.mark.parametrize(
    ("buckets", "said"),
    [("[]", "data.buckets"), ("[[16, 16], [16, 16]]", "buckets has a duplicate size"), ("[[16, 0]]", "data.buckets")],
)
def test_a_list_of_sizes_that_says_nothing_is_refused(sft, buckets, said):
    with pytest.raises(RecipeError, match=said):
        sft(f"data.buckets={buckets}")


def test_size_that_the_family_cannot_make_is_a_recipe_error(rl):
    with pytest.raises(RecipeError, match=r"sampling: .*multiple of 4"):
        load_model(rl("sampling.height=34"), torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        (
            "sd3",
            [],
            r"max_num_conditional_frames 1: sd3 supports 0 conditioning latent frames: change the range 0 to 1",
        ),
        ("cosmos25", [], "leaves none of 1 latent frames to predict"),
        (
            "cosmos25",
            ["sampling.num_frames=5", "algorithm.max_num_conditional_frames=3"],
            "supports 0 or 1 or 2 conditioning",
        ),
        ("cosmos25", ["sampling.num_frames=4"], r"sampling: num_frames must be 4 \* k \+ 1"),
        ("cosmos25", ["sampling.num_frames=5"], None),
        (
            "wan22_i2v",
            ["sampling.num_frames=5"],
            "1: wan supports 1 conditioning latent frames: change the range 0 to 1",
        ),
        (
            "wan22_i2v",
            [
                "sampling.num_frames=9",
                "algorithm.min_num_conditional_frames=1",
                "algorithm.max_num_conditional_frames=2",
            ],
            "2: wan supports 1 conditioning latent frames: change the range 1 to 2",
        ),
    ],
)
def test_given_frames_that_the_family_cannot_take_are_a_recipe_error(sft, tiny_pipelines, family, overrides, message):
    guardrail = "off" if family == "cosmos25" else "stock"
    base = [f"model.path={tiny_pipelines(family)}", f"model.guardrail={guardrail}"]
    recipe = sft(*base, "algorithm.max_num_conditional_frames=1", *overrides)
    if message is None:
        assert load_model(recipe, torch.device("cpu")).family == family
        return
    with pytest.raises(RecipeError, match=message) as raised:
        load_model(recipe, torch.device("cpu"))
    assert "\n" not in str(raised.value)


def test_a_model_whose_heads_are_fewer_than_the_ranks_of_a_replica_is_refused(rl):
    load_model(rl("engine.sequence_parallel=4"), torch.device("cpu"))
    with pytest.raises(UserError, match="attention heads of SD3Transformer2DModel"):
        load_model(rl("engine.sequence_parallel=5"), torch.device("cpu"))


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
        load_model(sft(model, f"engine.sequence_parallel={ranks}", *sizes), torch.device("cpu"))

    load(enough)
    load(enough, f"data.buckets=[{enough}]")
    for where, size, buckets in (
        ("sampling", small, []),
        ("data.buckets", enough, [f"data.buckets=[{enough}, {small}]"]),
    ):
        with pytest.raises(RecipeError, match=too_few) as refused:
            load(size, *buckets)
        assert str(refused.value).startswith(f"{where}: size {small} cannot be split over ranks: ")


def test_lora_layers_that_cannot_be_trained_or_exported_are_a_recipe_error(rl):
    for key, message in (
        ("target_modules=[nope]", "target_modules: no linear layer of the denoiser ends with nope"),
        ("target_modules=[to_q,pos_embed.proj]", "target_modules: pos_embed.proj is of type Conv2d, "),
        ("modules_to_save=[nope]", "modules_to_save: no layer with weights ends with nope"),
        ("modules_to_save=[norm_out]", "modules_to_save: norm_out contains .* these instead: norm_out.linear"),
    ):
        with pytest.raises(RecipeError, match=rf"lora\.{message}"):
            load_model(rl(f"lora.{key}"), torch.device("cpu"))


def test_what_two_experts_need_is_checked_with_the_model(rl, tiny_pipelines):
    two, guided = (
        f"model.path={tiny_pipelines('wan22')}",
        ["sampling.guidance_scale=4", "sampling.guidance_scale_low=3"],
    )
    assert len(load_model(rl(two, *guided), torch.device("cpu")).sigma_ranges) == 2
    with pytest.raises(RecipeError, match=r"sampling\.guidance_scale_low: .* has no second expert: remove the key"):
        load_model(rl(*guided), torch.device("cpu"))
    with pytest.raises(RecipeError, match="stage 1 cannot train a model with two experts"):
        load_model(rl(two, "engine.deepspeed=zero1"), torch.device("cpu"))
    with pytest.raises(RecipeError, match="guidance_scale_low needs a guidance_scale above 1"):
        rl(two, "sampling.guidance_scale_low=3")


def test_random_denoiser_follows_from_the_run_seed(sft):
    def first_weight(*overrides):
        model = load_model(sft(*overrides), torch.device("cpu"))
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


@pytest.fixture
def dpo(tmp_path, root, tiny_pipelines, images):
    """A recipe about twenty pairs of the images."""
    pairs = [{"prompt": "light", "chosen": f"{i + 20}.png", "rejected": f"{i:02d}.png"} for i in range(20)]
    (images / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))

    def recipe(*overrides):
        return recipe_file.load_recipe(
            root / "tests" / "recipes" / "sd3_dpo.yaml",
            [
                f"run.output_dir={tmp_path / 'out'}",
                f"model.path={tiny_pipelines('sd3')}",
                f"data.path={images / 'pairs.jsonl'}",
                "validation.holdout=0.2",
                *overrides,
            ],
        )

    return recipe


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


@pytest.fixture
def ddrl(tmp_path, root, tiny_pipelines, images):
    def recipe(*overrides):
        return recipe_file.load_recipe(
            root / "tests" / "recipes" / "sd3_ddrl.yaml",
            [
                f"run.output_dir={tmp_path / 'out'}",
                f"model.path={tiny_pipelines('sd3')}",
                f"data.path={images}",
                *overrides,
            ],
        )

    return recipe


def test_ddrl_takes_its_prompts_from_the_captions_of_all_media(ddrl):
    data = load_data(ddrl())
    assert len(data.samples) == 40
    assert data.held_out == []
    assert data.prompts == [sample.prompt for sample in data.samples]
    assert [prompt.text for prompt in data.validation_prompts] == [f"shade {i}" for i in range(4)]


def test_rewards_must_be_able_to_score_the_captions(ddrl):
    with pytest.raises(RecipeError, match=r"needs the metadata key 'label', missing in 40 of 40 prompts"):
        check_and_load_data(ddrl("reward.functions=[{name: digits}]"), 1)


def test_a_recipe_that_is_probably_not_meant_is_warned_of(ddrl, caplog):
    check_and_load_data(ddrl("algorithm.data_beta=0"), 1)
    assert "is not regularized by data" in caplog.text


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        (
            "sd3",
            ["algorithm.max_num_conditional_frames=1"],
            r"sd3 supports 0 conditioning latent frames: change the range 0 to 1",
        ),
        ("sd3", ["sampling.s_churn=0"], r"steps \[0, 1, 2\] add no noise"),
    ],
)
def test_what_the_family_cannot_do_in_ddrl_is_refused(ddrl, tiny_pipelines, family, overrides, message):
    recipe = ddrl(f"model.path={tiny_pipelines(family)}", *overrides)
    with pytest.raises(RecipeError, match=message):
        load_model(recipe, torch.device("cpu"))
