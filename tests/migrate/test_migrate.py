"""Conversion of Cosmos-RL configurations to recipes: the result for every key, and messages for unsupported keys."""

import math
import tomllib

from commands import wfm_command
from each_case import check_each
from migrate.configurations import COSMOS_DDRL, REASONER_SFT, SANA_VIDEO_SFT, SD3_NFT, SD3_SFT_LORA, migrate, put
from wfm_ds.migrate import keys as migrate_keys
from wfm_ds.migrate import unsupported_keys as migrate_gone
from wfm_ds.migrate.config import DDRL, NFT, SFT, VLM_SFT, WFM_SFT
from wfm_ds.migrate.translation import migrate_config, rename_old_keys, render_recipe
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import flatten_keys

main = wfm_command("migrate")
TEXTS = {SFT: SD3_SFT_LORA, NFT: SD3_NFT, DDRL: COSMOS_DDRL, VLM_SFT: REASONER_SFT}
TEXTS[WFM_SFT] = COSMOS_DDRL.replace("[model.rl]", "[model.rl]\nenabled = false")
EXPECTED = {
    SFT: {
        **{"algorithm.name": "sft", "engine.micro_batch_size": 2, "engine.gradient_accumulation": 4},
        **{
            "optimizer.lr": 2e-4,
            "optimizer.warmup_steps": 20,
            "optimizer.eps": 1e-6,
            "lora.rank": 16,
            "lora.alpha": 16,
        },
        **{"lora.init": "gaussian", "sampling.height": 768, "sampling.width": 512, "sampling.eval_steps": 28},
        **{"validation.every": 25, "checkpoint.every": 30, "algorithm.flow_shift": 3},
        **{"logging.console": True, "logging.trackers": ["tensorboard", "wandb"]},
    },
    NFT: {
        **{"algorithm.name": "diffusion_nft", "rollout.prompts_per_step": 48, "rollout.group_size": 24},
        **{"sampling.solver": "flow_sde", "sampling.noise_level": 0.7, "algorithm.old_decay": "slow"},
        **{"algorithm.advantage_std": "group", "logging.trackers": ["tensorboard"]},
    },
    DDRL: {
        **{"algorithm.name": "ddrl", "rollout.prompts_per_step": 2, "rollout.group_size": 8},
        **{"model.gradient_checkpointing": True, "engine.max_forward_batch": 1, "sampling.guidance_scale": 1},
        **{"sampling.height": 704, "sampling.width": 1280, "algorithm.train_on": [0, 2, 4]},
        **{"algorithm.ratio_norm": "literal", "engine.max_grad_norm": 0.5, "optimizer.betas": (0.9, 0.99)},
    },
    VLM_SFT: {
        **{"algorithm.name": "vlm_sft", "data.kind": "llava", "data.path": "/data/driving/train.json"},
        **{"data.media_path": "/data/driving/clips", "data.system_prompt": "Answer briefly.", "data.max_tokens": 8192},
        **{"data.pack": False, "data.video.fps": 2, "data.pixels.max": 81920, "data.workers": 8},
        **{"engine.micro_batch_size": 2, "engine.gradient_accumulation": 16, "engine.deepspeed": "zero3"},
        **{"run.steps": 250, "model.path": "models/Cosmos-Reason2-2B", "optimizer.lr": 2e-5, "optimizer.eps": 1e-8},
        **{"optimizer.warmup_steps": 20, "checkpoint.every": 50, "validation.every": 100, "validation.holdout": 0.1},
        **{"logging.trackers": ["tensorboard", "wandb"], "logging.project": "driving"},
    },
    WFM_SFT: {
        **{"algorithm.name": "sft", "algorithm.logit_mean": math.log(4), "algorithm.logit_std": 1.2},
        "algorithm.flow_shift": 1,
    },
}


@check_each("mode", TEXTS)
def test_the_command_writes_a_recipe_that_keeps_the_values(mode, tmp_path, capsys):
    (tmp_path / "config.toml").write_text(TEXTS[mode])
    assert main([str(tmp_path / "config.toml")]) == 0
    (tmp_path / "recipe.yaml").write_text(capsys.readouterr().out)
    values = flatten_keys(recipe_file.load_recipe(tmp_path / "recipe.yaml").model_dump())
    assert {key: values[key] for key in EXPECTED[mode]} == EXPECTED[mode]


def test_rewards_keep_weights_and_clips():
    rewards = Recipe.model_validate(sections_of(tomllib.loads(SD3_NFT))).reward.functions
    assert [(f.name, f.weight, f.clip) for f in rewards] == [
        ("ocr", 1, (-5, 5)),
        ("jpeg_compressibility", 0.5, (-5, 1)),
    ]


def test_guidance_of_the_edm_sampler_is_one_less():
    migration = migrate(COSMOS_DDRL, **{"model.rl.guidance": 0.5, "model.rl.data_beta": 0.0})
    assert migration.values["sampling.guidance_scale"] == 1.5
    assert "sampling.guidance_scale is w = 1 + g: 0.5 in Cosmos-RL is 1.5 here" in migration.notes


def test_missing_values_have_a_placeholder_and_an_error(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(SANA_VIDEO_SFT)
    assert main([str(tmp_path / "config.toml")]) == 2
    out, err = capsys.readouterr()
    assert "  # steps: FILL IN, " in out
    assert err == "error: the recipe is incomplete; fill in run.steps\n"
    (tmp_path / "filled.yaml").write_text(out.replace("  # steps: FILL IN, ", "  steps: 5  # "))
    recipe = recipe_file.load_recipe(tmp_path / "filled.yaml")
    assert (recipe.model.gradient_checkpointing, recipe.sampling.num_frames) == (False, 49)
    assert (recipe.engine.deepspeed, recipe.ema.decay) == ("zero3", 0.9999)


def test_misspelt_and_moved_keys_are_corrected_and_reported():
    nft, sft = migrate(SD3_NFT), migrate(SANA_VIDEO_SFT)
    assert nft.values["algorithm.timestep_fraction"] == 0.5
    assert any("timestep_fraction is read as" in line for line in nft.renamed)
    assert any("model_gradient_checkpointig is read as" in line for line in sft.renamed)
    assert any("policy.diffusers_config.train_frames is called" in line for line in sft.renamed)


def test_a_hub_name_becomes_a_folder_with_a_download_command():
    migration = migrate(SANA_VIDEO_SFT)
    assert migration.values["model.path"] == "models/SANA-Video_2B_480p_diffusers"
    assert any("hf download Efficient-Large-Model/SANA-Video_2B_480p_diffusers" in note for note in migration.notes)


def test_unknown_keys_are_listed_and_known_ones_without_a_counterpart_have_a_reason():
    migration = migrate(SD3_NFT, **{"train.train_policy.kl_bta": 1, "rollout.parallelism.tp_size": 1})
    text = render_recipe(migration, "config.toml")
    assert migration.unknown == ["train.train_policy.kl_bta"]
    assert "#   rollout.parallelism.tp_size: the launcher sets" in text
    assert "Unknown keys" in text


@check_each("mode", TEXTS)
def test_every_key_of_a_configuration_is_accounted_for(mode):
    config = tomllib.loads(TEXTS[mode])
    migration = migrate_config(config)
    mapped = {row.cosmos_key for row in migrate_keys.KEY_MAPPINGS if mode in row.modes}
    assert (
        set(rename_old_keys(flatten_keys(config, whole=migrate_keys.WHOLE_TABLES))[0])
        <= mapped | migration.unsupported.keys()
    )


@check_each(
    ("content", "error"),
    [
        ("a = [", "not valid TOML"),
        (f"a = {'[' * 20_000}{']' * 20_000}", "not valid TOML"),
        (f"{'.'.join('b' * 5_000)} = 1", "nested too deeply"),
    ],
)
def test_a_file_that_is_not_toml_is_an_error(content, error, tmp_path, capsys):
    (tmp_path / "config.toml").write_text(content)
    assert main([str(tmp_path / "config.toml")]) == 2
    message = capsys.readouterr().err
    assert error in message
    assert len(message) < 500


def test_a_device_without_an_end_is_not_read_into_memory(capsys):
    assert main(["/dev/zero"]) == 2
    assert "/dev/zero: not a Cosmos-RL configuration" in capsys.readouterr().err


# A different value for each mapped key, and other keys that it depends on.
EMA, LORA = {"train.ema_enable": True}, {"policy.lora.r": 4}
SAVING = {"train.ckpt.enable_checkpoint": True}
DIFFUSERS, SAMPLE, POLICY = "policy.diffusers", "policy.diffusers.sample", "train.train_policy"
REWARD, VIDEO = "model.rl.reward_config", "dataloader_train.video_dataloader"
CHANGES = {
    "policy.model_name_or_path": ("/other", {}),
    "policy.model_gradient_checkpointing": (False, {}),
    f"{DIFFUSERS}.max_prompt_length": (77, {}),
    "train.param_dtype": ("float32", {}),
    f"{DIFFUSERS}.training_dtype": ("float32", {}),
    "policy.lora.r": (5, {}),
    "policy.lora.lora_alpha": (3.0, LORA),
    "policy.lora.target_modules": (["to_q"], LORA),
    "policy.lora.lora_dropout": (0.1, LORA),
    "policy.lora.use_rslora": (True, LORA),
    "policy.lora.init_lora_weights": ("gaussian", {**LORA, "policy.lora.init_lora_weights": True}),
    "policy.parallelism.dp_shard_size": (8, {"policy.lora": None, "policy.parallelism.dp_shard_size": 1}),
    "policy.parallelism.dp_replicate_size": (
        2,
        {"policy.lora": None, "policy.parallelism.dp_shard_size": 8, "policy.parallelism.n_init_replicas": 1},
    ),
    "train.fsdp_offload": (True, {}),
    f"{POLICY}.mini_batch": (4, {}),
    "train.train_batch_per_replica": (48, {}),
    "policy.parallelism.cp_size": (2, {}),
    "policy.parallelism.n_init_replicas": (3, {}),
    "rollout.n_generation": (12, {}),
    "rollout.n_generation_mini_batch": (6, {}),
    "train.optm_grad_norm_clip": (0.1, {}),
    "train.optm_lr": ({"global": 3e-5}, {}),
    "train.optm_betas": ([0.8, 0.9], {}),
    "train.epsilon": (1e-7, {}),
    "train.optm_weight_decay": (0.3, {}),
    "train.optm_warmup_steps": (0.5, {}),
    "train.optm_decay_type": ("cosine", {}),
    "train.optm_min_lr_factor": (0.1, {}),
    "train.ema_enable": (True, {"train.ema_enable": False}),
    "train.ema_decay": (0.5, EMA),
    "train.ema_update_step_interval": (7, EMA),
    "train.max_num_steps": (7, {}),
    f"{POLICY}.use_remote_reward": (True, {}),
    "train.output_dir": ("elsewhere", {}),
    "train.seed": (9, {}),
    "train.resume": (True, {}),
    "train.ckpt.enable_checkpoint": (True, {"train.ckpt.enable_checkpoint": False}),
    "train.ckpt.save_freq": (11, SAVING),
    "train.ckpt.export_safetensors": (False, SAVING),
    "train.ckpt.max_keep": (1, {}),
    "validation.enable": (False, {}),
    "validation.freq": (13, {}),
    "validation.val_before_train": (True, {}),
    "validation.n_generation": (3, {}),
    "validation.dataset.local_dir": ("prompts.txt", {}),
    "logging.logger": ([], {}),
    "logging.project_name": ("mine", {}),
    "logging.multi_modal_log_interval": (4, {}),
    f"{POLICY}.dataset.name": ("geneval", {}),
    f"{POLICY}.dataset.local_dir": ("/other/data", {}),
    f"{POLICY}.dataset.split": ("test", {}),
    f"{POLICY}.dataset.test_size": (0.25, {}),
    f"{POLICY}.dataloader_shuffle": (False, {}),
    f"{POLICY}.dataloader_num_workers": (5, {}),
    "custom.dataset.annotation_path": ("/other.jsonl", {}),
    "custom.dataset.media_path": ("/other", {}),
    "custom.dataset.system_prompt": ("Answer at length.", {}),
    "custom.vision.fps": (4, {}),
    "custom.vision.max_frames": (32, {}),
    "custom.vision.min_pixels": (784, {}),
    "custom.vision.max_pixels": (50176, {}),
    "policy.model_max_length": (1024, {}),
    f"{DIFFUSERS}.inference_size": ([256, 320], {}),
    f"{DIFFUSERS}.train_frames": (17, {f"{DIFFUSERS}.is_video": True}),
    f"{SAMPLE}.num_steps": (5, {}),
    f"{SAMPLE}.eval_num_steps": (5, {}),
    f"{SAMPLE}.guidance_scale": (2.5, {}),
    f"{SAMPLE}.solver": ("dance", {}),
    f"{SAMPLE}.deterministic_sampling": (True, {f"{SAMPLE}.noise_level": None}),
    f"{SAMPLE}.noise_level": (0.9, {}),
    f"{DIFFUSERS}.weighting_scheme": ("mode", {}),
    f"{DIFFUSERS}.logit_mean": (0.3, {}),
    f"{DIFFUSERS}.logit_std": (0.8, {}),
    f"{DIFFUSERS}.train_flow_shift": (1.5, {}),
    f"{DIFFUSERS}.timesteps_fraction": (0.8, {f"{DIFFUSERS}.timestep_fraction": None}),
    f"{DIFFUSERS}.nft_beta": (0.1, {}),
    f"{DIFFUSERS}.weight_copy_decay_type": (1, {}),
    f"{POLICY}.kl_beta": (0.2, {}),
    f"{POLICY}.advantage_high": (2.0, {}),
    f"{POLICY}.unbiased_advantage": (True, {}),
    f"{POLICY}.batch_size_per_optimize": (24, {}),
    f"{POLICY}.remote_reward.reward_fns": ([{"name": "color"}], {}),
    f"{POLICY}.remote_reward.reward_fn": (
        {"color": 2.0},
        {f"{POLICY}.remote_reward.reward_fns": None, f"{POLICY}.remote_reward.reward_fn": {"ocr": 1}},
    ),
    f"{POLICY}.remote_reward.reward_clip_min": (-1.0, {}),
    f"{POLICY}.remote_reward.reward_clip_max": (1.0, {}),
    f"{POLICY}.remote_reward.scale": (2.0, {}),
    "checkpoint.load_path": ("/other", {"checkpoint.load_path": None}),
    "model.net.sac_config.mode": ("none", {}),
    "model_parallel.context_parallel_size": (4, {}),
    "model_parallel.data_parallel_size": (2, {}),
    "model.ema.enabled": (False, {}),
    "model.ema.rate": (0.05, {}),
    "model.ema.iteration_shift": (1000, {}),
    "model.precision": ("float32", {}),
    "job.project": ("p", {}),
    "job.group": ("g", {}),
    "job.name": ("n", {}),
    "trainer.max_iter": (5, {}),
    "trainer.seed": (4, {}),
    "trainer.grad_accum_iter": (2, {}),
    "trainer.run_validation": (False, {}),
    "trainer.validation_iter": (9, {}),
    "trainer.callbacks": ([{"name": "every_n_sample_reg", "args": {"every_n": 3}}], {}),
    "checkpoint.save_iter": (8, {}),
    "optimizer.lr": (1.0, {}),
    "optimizer.betas": ([0.5, 0.5], {}),
    "optimizer.eps": (1e-5, {}),
    "optimizer.weight_decay": (0.5, {}),
    "scheduler.warm_up_steps": ([3], {}),
    f"{VIDEO}.dataset_dir": ("/other", {}),
    f"{VIDEO}.num_frames": (61, {}),
    f"{VIDEO}.video_size": ([832, 480], {}),
    f"{VIDEO}.num_workers": (8, {}),
    f"{VIDEO}.offline_text_embedding": (True, {}),
    f"{VIDEO}.batch_size": (3, {}),
    f"{VIDEO}.dataloader.batch_size": (3, {}),
    f"{VIDEO}.dataloader.num_workers": (3, {}),
    f"{VIDEO}.dataloader.dataset.num_video_frames": (61, {f"{VIDEO}.num_frames": None}),
    f"{VIDEO}.dataloader.dataset.resolution": ("480", {f"{VIDEO}.video_size": [832, 480]}),
    "dataloader_val.video_dataloader.dataset_dir": ("/val", {}),
    "model.conditioner": ([{"name": "text", "type": "text_attr", "dropout_rate": 0.2}], {}),
    "model.sde.p_mean": (0.1, {}),
    "model.sde.p_std": (0.9, {}),
    "model.min_num_conditional_frames": (0, {}),
    "model.max_num_conditional_frames": (1, {}),
    "model.loss_scale": (1.0, {}),
    "model.dp_replicate_size": (2, {"model.fsdp_shard_size": 8, "model.dp_replicate_size": 1}),
    "model.fsdp_shard_size": (8, {"model.fsdp_shard_size": 1, "model.dp_replicate_size": 8}),
    "model.rl.num_rollout": (4, {}),
    "model.rl.on_policy": (False, {}),
    "model.rl.sample_steps": (15, {}),
    "model.rl.use_same_seed": (False, {}),
    "model.rl.solver_option": ("1euler", {}),
    "model.rl.s_churn": (0.5, {}),
    "model.rl.s_t_min": ("0.1", {}),
    "model.rl.s_t_max": (50.0, {}),
    "model.rl.s_noise": (1.1, {}),
    "model.rl.guidance": (3.0, {"model.rl.data_beta": 0.0}),
    "model.rl.train_on": ([1], {}),
    "model.rl.update_ref_every_iter": (4, {}),
    "model.rl.clip_ratio": (1e-3, {}),
    "model.rl.kl_beta": (0.2, {}),
    "model.rl.data_beta": (0.2, {}),
    "model.rl.use_rl_sigma_and_noise": (False, {}),
    "model.rl.data_on_first_only": (True, {}),
    "model.rl.exp_reward": (True, {}),
    "model.rl.min_num_conditional_frames": (1, {}),
    "model.rl.max_num_conditional_frames": (2, {}),
    f"{REWARD}.adv_clip_max": (2.0, {}),
    f"{REWARD}.remote_reward.reward_fn": ("ocr", {}),
    f"{REWARD}.remote_reward.score_key": ("vq_reward", {}),
    f"{REWARD}.remote_reward.enabled": (False, {f"{REWARD}.fake_reward.enabled": True}),
    f"{REWARD}.remote_reward.reward_clip_min": (-1.0, {}),
    f"{REWARD}.remote_reward.reward_clip_max": (1.0, {}),
    f"{REWARD}.aesthetic.enabled": (True, {}),
    f"{REWARD}.image_reward.enabled": (True, {}),
    f"{REWARD}.fake_reward.enabled": (True, {}),
}
# Recipes support a single value of these keys. Other values are reported as unsupported or belong to another key.
ONE_VALUE = {
    "train.optm_name": "Adam",
    "train.epoch": 3,
    f"{POLICY}.mu_iterations": 2,
    f"{DIFFUSERS}.inference_frames": 9,
    f"{POLICY}.advantage_low": -1.0,
}


def sections_of(config):
    """Return the sections of the recipe without writing a file."""
    sections = {"model": {"path": "a/folder"}}
    for key, value in migrate_config(config).values.items():
        sections.setdefault(key.partition(".")[0], {})[key.partition(".")[2]] = value
    return sections


def resolved(config):
    return flatten_keys(Recipe.model_validate(sections_of(config)).model_dump())


CHANGING = [row for row in migrate_keys.KEY_MAPPINGS if row.cosmos_key not in ONE_VALUE]


@check_each("row", CHANGING)
def test_every_mapped_key_changes_the_resolved_recipe(row):
    for mode in row.modes:
        value, setting = CHANGES[row.cosmos_key]
        config = tomllib.loads(TEXTS[mode])
        for key, other in setting.items():
            put(config, key, other)
        before = resolved(config)
        put(config, row.cosmos_key, value)
        after = resolved(config)
        changed = {key for key in before | after if before.get(key) != after.get(key)}
        assert any(key == target or key.startswith(f"{target}.") for key in changed for target in row.targets)


@check_each("key", sorted(ONE_VALUE))
def test_an_unsupported_value_is_reported(key):
    migration = migrate(SD3_NFT, **{key: ONE_VALUE[key], "train.max_num_steps": None})
    assert key in migration.unsupported or any("Cosmos-RL clips to -1 to 5" in note for note in migration.notes)


def test_the_page_holds_the_table_of_keys(root, capsys):
    assert main(["--keys"]) == 0
    assert capsys.readouterr().out in (root / "docs" / "migrating.md").read_text()


def test_the_tables_name_recipe_keys_and_no_key_twice():
    seen = [
        (row.cosmos_key, target, mode)
        for row in migrate_keys.KEY_MAPPINGS
        for target in row.targets
        for mode in row.modes
    ]
    assert len(seen) == len(set(seen))
    assert migrate_gone.find_reason("rollout.parallelism.anything") is not None
    assert migrate_gone.find_reason("rollout.anything") is None
