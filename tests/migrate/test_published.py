"""Defaults that the configurations of the published runs rely on: sharding, weight averages, the scoring service, and
the epoch length."""

from commands import wfm_command
from each_case import check_each
from migrate.configurations import COSMOS_DDRL, SANA_VIDEO_SFT, SD3_NFT, migrate
from wfm_ds.migrate.translation import render_recipe

main = wfm_command("migrate")
POLICY, RL = "train.train_policy", "model.rl"
WEB = "dataloader_train.video_dataloader.dataloader"


def test_ranks_that_share_a_sample_are_sequence_parallel():
    migration = migrate(COSMOS_DDRL)
    assert migration.values["engine.sequence_parallel"] == 2
    assert "model_parallel.context_parallel_size" not in migration.unsupported
    assert any("is for 32 GPUs" in note for note in migration.notes)  # 2 x 4 x 4


@check_each(("shards", "replicas", "config"), [(8, 1, "zero3"), (8, 2, "zero3_hpz"), (1, 8, "zero2")])
def test_shards_and_replicas_of_the_weights_name_the_deepspeed_json(shards, replicas, config):
    sizes = {"model.fsdp_shard_size": shards, "model.dp_replicate_size": replicas}
    assert migrate(COSMOS_DDRL, **sizes).values["engine.deepspeed"] == config
    sizes = {f"policy.parallelism.dp_{name}_size": n for name, n in (("shard", shards), ("replicate", replicas))}
    assert migrate(SANA_VIDEO_SFT, **sizes).values["engine.deepspeed"] == config
    adapters = migrate(SANA_VIDEO_SFT, **sizes, **{"policy.lora": {"r": 4}})
    assert adapters.values["engine.deepspeed"] == "zero2"


def test_blocks_are_recomputed_unless_the_configuration_says_none():
    assert migrate(COSMOS_DDRL).values["model.gradient_checkpointing"] is True
    said = migrate(COSMOS_DDRL, **{"model.net.sac_config.mode": "none"})
    assert said.values["model.gradient_checkpointing"] is False


def test_the_average_that_is_on_by_default_is_written_with_its_last_decay():
    migration = migrate(COSMOS_DDRL, **{"trainer.max_iter": 2001})
    assert (migration.values["ema.decay"], migration.values["ema.every"]) == (0.99604, 1)
    assert any(note.startswith("ema: ") for note in migration.notes)
    assert "ema.decay" not in migrate(COSMOS_DDRL, **{"model.ema.enabled": False}).values


def test_gradients_of_several_rounds_and_batches_of_samples_are_more_groups():
    rounds, batch = "trainer.grad_accum_iter", "dataloader_train.video_dataloader.batch_size"
    assert migrate(COSMOS_DDRL).values["rollout.prompts_per_step"] == 2
    assert migrate(COSMOS_DDRL, **{rounds: 3, batch: 2}).values["rollout.prompts_per_step"] == 12


def test_deviations_are_of_n_minus_1_where_a_service_scores():
    assert migrate(COSMOS_DDRL).values["algorithm.std_unbiased"] is True
    assert migrate(SD3_NFT, **{f"{POLICY}.use_remote_reward": True}).values["algorithm.std_unbiased"] is True
    assert migrate(SD3_NFT).values["algorithm.std_unbiased"] is False
    ignored = {f"{POLICY}.use_remote_reward": True, f"{POLICY}.unbiased_advantage": True}
    assert migrate(SD3_NFT, **ignored).values["algorithm.advantage_std"] == "group"


def test_ddrl_asks_the_service_for_the_output_that_the_score_key_names():
    [function] = migrate(COSMOS_DDRL).values["reward.functions"]
    assert function == {"name": "remote/dance_grpo", "options": {"output": "overall_reward"}, "clip": [-5.0, 5.0]}
    key = f"{RL}.reward_config.remote_reward.score_key"
    migration = migrate(COSMOS_DDRL, **{key: "vq_reward+mq_reward"})
    assert migration.values["reward.functions"][0]["options"] == {"output": "vq_reward+mq_reward"}
    assert key not in migration.unsupported


def test_nft_asks_the_service_for_the_output_that_the_score_key_names():
    functions = [{"name": "dance_grpo", "score_key": "vq_reward+mq_reward"}, {"name": "pickscore", "weight": 0.5}]
    remote = {f"{POLICY}.use_remote_reward": True, f"{POLICY}.remote_reward.reward_fns": functions}
    made = migrate(SD3_NFT, **remote).values["reward.functions"]
    assert [f["name"] for f in made] == ["remote/dance_grpo", "remote/pickscore"]
    assert [f["options"] for f in made] == [{"output": "vq_reward+mq_reward"}, {"output": "pickscore"}]
    assert [f["weight"] for f in made] == [1.0, 0.5]
    made = migrate(SD3_NFT, **remote | {f"{POLICY}.remote_reward.reward_fns": None}).values["reward.functions"]
    assert made[0]["options"] == {"output": "overall_reward"}


def test_the_run_length_can_be_given_on_the_command_line(tmp_path, capsys):
    for text in (SANA_VIDEO_SFT, COSMOS_DDRL):
        (tmp_path / "config.toml").write_text(text)
        assert main([str(tmp_path / "config.toml"), "--steps", "70"]) == 0
        assert "  steps: 70\n" in capsys.readouterr().out


def test_epochs_of_captioned_media_on_this_machine_are_counted(tmp_path):
    for i in range(41):
        (tmp_path / f"{i}.json").write_text("{}")
    data = {f"{POLICY}.dataset.local_dir": str(tmp_path), "train.train_batch_per_replica": 2}
    # 41 samples on 8 ranks: 6 each, with repeats; 3 batches of 2 in each of 10 epochs.
    assert migrate(SANA_VIDEO_SFT, **data).values["run.steps"] == 30
    assert migrate(SANA_VIDEO_SFT, **data, **{"train.max_num_steps": 7}).values["run.steps"] == 7


def test_epochs_of_prompts_on_this_machine_are_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ocr").mkdir()
    (tmp_path / "ocr" / "train.txt").write_text('a sign with "go"\n' * 100)
    # 100 prompts x 24 samples x 3 epochs / (576 x 2 samples per step).
    counted = {"train.max_num_steps": None, "train.epoch": 3}
    assert migrate(SD3_NFT, **counted).values["run.steps"] == 6
    elsewhere = migrate(SD3_NFT, **counted, **{f"{POLICY}.dataset.name": "geneval"})
    assert "run.steps" in elsewhere.missing
    assert "--steps" in elsewhere.unsupported["train.epoch"]


def test_keys_of_mock_data_and_tar_shards_are_known():
    loader = {
        **dict.fromkeys(("use_cache", "cache_replay_name", "pin_memory", "webdataset"), False),
        **dict.fromkeys(("batch_size", "num_workers", "cache_size", "concat_size"), 2),
        "cache_augment_fn": {"name": "a name", "args": {"n": 1.8}},
        "dataset": {
            **{"resolution": "480", "num_video_frames": 93, "len_t5": 512, "t5_dim": 1024},
            **dict.fromkeys(("video_decoder_name", "augmentor_name", "caption_type", "embedding_type"), "a name"),
        },
    }
    migration = migrate(COSMOS_DDRL, **{"dataloader_train.video_dataloader": {"dataloader": loader}})
    assert migration.unknown == []
    sizes = ("sampling.height", "sampling.width", "sampling.num_frames", "data.workers", "engine.micro_batch_size")
    assert [migration.values[key] for key in sizes] == [432, 768, 93, 2, 2]
    assert sum(key.startswith(WEB) for key in migration.unsupported) == 14


def test_without_weights_to_load_the_denoiser_is_random_and_its_architecture_is_asked_for():
    migration = migrate(COSMOS_DDRL, **{"checkpoint.load_path": None})
    assert migration.values["model.denoiser_init"] == "random"
    assert "model.path" in migration.missing
    assert "model.denoiser_init" not in migrate(COSMOS_DDRL).values


def test_printed_lines_are_not_broken_inside_a_word():
    text = render_recipe(
        migrate(COSMOS_DDRL, **{"checkpoint.load_path": "nvidia/Cosmos-Predict2.5-14B" + "-long" * 9}), "c"
    )
    assert f"models/Cosmos-Predict2.5-14B{'-long' * 9}\n" in text
