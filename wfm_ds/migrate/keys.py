"""The table that maps Cosmos-RL keys to recipe keys.

Cosmos-RL has two configuration formats for diffusion models. The first is for its diffusers trainers (SFT and
DiffusionNFT), with `[policy]`, `[train]` and others. The second is for `--wfm-mode` (DDRL and SFT), with `[model]`,
`[trainer]` and others. Vision-language models use the first format, with `[custom.dataset]` and `[custom.vision]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from wfm_ds.migrate import diffusers_values as diffusion
from wfm_ds.migrate import language_values as vlm
from wfm_ds.migrate import rewards
from wfm_ds.migrate import wfm_values as wfm
from wfm_ds.migrate.config import DDRL, NFT, POLICY, SFT, VLM_SFT, WFM_SFT, ValueConverter, choice_converter
from wfm_ds.migrate.rewards import WFM_REWARD
from wfm_ds.migrate.wfm_values import VIDEO_DATA

DIFFUSERS_MODES, WFM_MODES = (SFT, NFT), (DDRL, WFM_SFT)
TRAINER_MODES = (*DIFFUSERS_MODES, VLM_SFT)
ABSENT = object()  # marks a key without default value, because None can be a default value


@dataclass(frozen=True, slots=True)
class KeyMapping:
    """Maps a Cosmos-RL key to a recipe key, or to several recipe keys if `convert` returns a tuple.

    default: Cosmos-RL's default value, which the recipe gets if the configuration does not set the key.
    """

    cosmos_key: str
    recipe_key: str | tuple[str, ...]
    convert: ValueConverter = lambda value, _: value
    default: Any = ABSENT
    modes: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.recipe_key,) if isinstance(self.recipe_key, str) else self.recipe_key


REMOTE_REWARD = f"{POLICY}.remote_reward"
WFM_REMOTE = f"{WFM_REWARD}.remote_reward"
SAMPLE, PARALLELISM = "policy.diffusers.sample", "policy.parallelism"
WEB_DATA = f"{VIDEO_DATA}.dataloader"
BATCH_KEYS = ("engine.micro_batch_size", "engine.max_forward_batch")
SIZE_KEYS = ("sampling.height", "sampling.width")

DTYPE = choice_converter({"bfloat16": "bfloat16", "float32": "float32"})
LORA_INIT = choice_converter({"gaussian": "gaussian", True: "default"})
OLD_DECAY = choice_converter({0: "copy", 1: "standard", 2: "slow"})
EDM_SOLVER = choice_converter({"2ab": "edm_2ab", "1euler": "edm_euler"})

# Rows for several modes come first, because a later row overrides an earlier row's default for the same recipe key.
MAPPINGS_BY_MODES: dict[tuple[str, ...], tuple[KeyMapping, ...]] = {
    TRAINER_MODES: (
        KeyMapping("policy.model_name_or_path", "model.path", diffusion.model_folder),
        KeyMapping("policy.model_gradient_checkpointing", "model.gradient_checkpointing", default=True),
        KeyMapping("train.param_dtype", "model.dtype", DTYPE),
        KeyMapping("policy.lora.r", "lora.rank", default=8),
        KeyMapping("policy.lora.lora_alpha", "lora.alpha", default=8),
        KeyMapping("policy.lora.target_modules", "lora.target_modules", diffusion.lora_targets),
        KeyMapping("policy.lora.lora_dropout", "lora.dropout"),
        KeyMapping("policy.lora.use_rslora", "lora.rslora"),
        KeyMapping("policy.lora.init_lora_weights", "lora.init", LORA_INIT, default=True),
        KeyMapping(f"{PARALLELISM}.dp_shard_size", "engine.deepspeed", diffusion.zero_stage, default=1),
        KeyMapping(f"{PARALLELISM}.dp_replicate_size", "engine.deepspeed", diffusion.zero_stage, default=1),
        KeyMapping("train.fsdp_offload", "engine.deepspeed", diffusion.zero_stage, default=False),
        KeyMapping(f"{POLICY}.mini_batch", "engine.micro_batch_size", default=2),
        KeyMapping("train.optm_grad_norm_clip", "engine.max_grad_norm", default=1.0),
        KeyMapping("train.optm_name", "optimizer.name", choice_converter({"AdamW": "adamw"})),
        KeyMapping("train.optm_lr", "optimizer.lr", diffusion.learning_rate, default=1e-6),
        KeyMapping("train.optm_betas", "optimizer.betas", default=[0.9, 0.999]),
        KeyMapping("train.epsilon", "optimizer.eps", default=1e-6),
        KeyMapping("train.optm_weight_decay", "optimizer.weight_decay", default=0.01),
        KeyMapping("train.optm_warmup_steps", "optimizer.warmup_steps", diffusion.warmup_steps, default=20),
        KeyMapping("train.optm_decay_type", "optimizer.schedule", diffusion.lr_schedule),
        KeyMapping("train.optm_min_lr_factor", "optimizer.final_lr_fraction"),
        KeyMapping("train.max_num_steps", "run.steps", diffusion.run_steps),
        KeyMapping("train.epoch", "run.steps", diffusion.run_steps, default=1),
        KeyMapping("train.output_dir", "run.output_dir", default="./outputs"),
        KeyMapping("train.seed", "run.seed"),
        KeyMapping("train.resume", "run.resume", diffusion.resume_mode, default=False),
        KeyMapping("train.ckpt.enable_checkpoint", "checkpoint.every", diffusion.save_every, default=False),
        KeyMapping("train.ckpt.save_freq", "checkpoint.every", diffusion.save_every, default=20),
        KeyMapping("train.ckpt.export_safetensors", "checkpoint.export_every", diffusion.export_every, default=True),
        KeyMapping("train.ckpt.max_keep", "checkpoint.keep", diffusion.checkpoints_to_keep, default=5),
        KeyMapping("validation.enable", "validation.every", diffusion.validate_every, default=False),
        KeyMapping("validation.freq", "validation.every", diffusion.validate_every, default=20),
        KeyMapping("validation.val_before_train", "validation.at_start", diffusion.validate_at_start, default=False),
        KeyMapping("logging.logger", ("logging.console", "logging.trackers"), diffusion.logging_outputs),
        KeyMapping("logging.project_name", "logging.project"),
        KeyMapping(f"{POLICY}.dataloader_shuffle", "data.shuffle", default=True),
    ),
    DIFFUSERS_MODES: (
        KeyMapping("policy.diffusers.max_prompt_length", "model.max_sequence_length", default=300),
        KeyMapping("policy.diffusers.training_dtype", "model.dtype", DTYPE),
        KeyMapping(f"{PARALLELISM}.cp_size", "engine.sequence_parallel", default=1),
        KeyMapping("train.ema_enable", "ema.decay", diffusion.ema_decay, default=False),
        KeyMapping("train.ema_decay", "ema.decay", diffusion.require_ema, default=0.9999),
        KeyMapping("train.ema_update_step_interval", "ema.every", diffusion.ema_interval, default=0),
        KeyMapping("validation.n_generation", "validation.seeds", diffusion.validation_seeds),
        KeyMapping("validation.dataset.local_dir", "validation.prompts", diffusion.prompt_file),
        KeyMapping("logging.multi_modal_log_interval", "logging.sample_every"),
        KeyMapping("policy.diffusers.inference_size", SIZE_KEYS, lambda v, _: v, default=[1024, 1024]),
        KeyMapping("policy.diffusers.train_frames", "sampling.num_frames", diffusion.num_frames, default=41),
        KeyMapping("policy.diffusers.inference_frames", "sampling.num_frames", diffusion.inference_frames),
        KeyMapping(f"{SAMPLE}.guidance_scale", "sampling.guidance_scale", diffusion.guidance_scale, default=4.5),
    ),
    (SFT, VLM_SFT): (
        KeyMapping(
            "train.train_batch_per_replica", "engine.gradient_accumulation", diffusion.gradient_accumulation, default=8
        ),
    ),
    (SFT,): (
        KeyMapping(f"{POLICY}.dataset.local_dir", "data.path"),
        KeyMapping(f"{POLICY}.dataset.test_size", "validation.holdout"),
        KeyMapping(f"{SAMPLE}.num_steps", "sampling.eval_steps", default=40),
        KeyMapping("policy.diffusers.weighting_scheme", "algorithm.timestep_density", diffusion.timestep_density),
        KeyMapping("policy.diffusers.logit_mean", "algorithm.logit_mean"),
        KeyMapping("policy.diffusers.logit_std", "algorithm.logit_std"),
        KeyMapping("policy.diffusers.train_flow_shift", "algorithm.flow_shift", default=3.0),
    ),
    (NFT,): (
        KeyMapping("train.train_batch_per_replica", "rollout.prompts_per_step", diffusion.prompts_per_step, default=8),
        KeyMapping(f"{PARALLELISM}.n_init_replicas", "rollout.prompts_per_step", diffusion.prompts_per_step, default=1),
        KeyMapping("rollout.n_generation", "rollout.group_size", default=16),
        KeyMapping("rollout.n_generation_mini_batch", "engine.max_forward_batch"),
        KeyMapping(f"{POLICY}.dataset.name", ("data.name", "data.path"), lambda name, _: (name, name)),
        KeyMapping(f"{POLICY}.dataset.local_dir", "data.path"),
        KeyMapping(f"{POLICY}.dataset.split", "data.split", diffusion.data_split),
        KeyMapping(f"{SAMPLE}.num_steps", "sampling.steps", default=40),
        KeyMapping(f"{SAMPLE}.eval_num_steps", "sampling.eval_steps", default=40),
        KeyMapping(f"{SAMPLE}.solver", "sampling.solver", diffusion.sampling_solver, default="dpm2"),
        KeyMapping(f"{SAMPLE}.deterministic_sampling", "sampling.solver", diffusion.sampling_solver, default=False),
        KeyMapping(f"{SAMPLE}.noise_level", "sampling.noise_level", diffusion.noise_level, default=1.0),
        KeyMapping("policy.diffusers.timesteps_fraction", "algorithm.timestep_fraction", default=1.0),
        KeyMapping("policy.diffusers.nft_beta", "algorithm.beta", default=1.0),
        KeyMapping("policy.diffusers.weight_copy_decay_type", "algorithm.old_decay", OLD_DECAY, default=0),
        KeyMapping(f"{POLICY}.kl_beta", "algorithm.kl_beta", default=0.0),
        KeyMapping(f"{POLICY}.advantage_high", "algorithm.adv_clip_max", diffusion.advantage_clip, default=5.0),
        KeyMapping(f"{POLICY}.advantage_low", "algorithm.adv_clip_max", diffusion.advantage_clip, default=-5.0),
        KeyMapping(f"{POLICY}.unbiased_advantage", "algorithm.advantage_std", diffusion.advantage_std, default=False),
        KeyMapping(f"{POLICY}.batch_size_per_optimize", "algorithm.updates_per_rollout", diffusion.updates_per_rollout),
        KeyMapping(f"{POLICY}.mu_iterations", "algorithm.updates_per_rollout", diffusion.single_iteration),
        KeyMapping(f"{POLICY}.use_remote_reward", "algorithm.std_unbiased", default=False),
        KeyMapping(f"{REMOTE_REWARD}.reward_fns", "reward.functions", rewards.convert_named_rewards, default=None),
        KeyMapping(f"{REMOTE_REWARD}.reward_fn", "reward.functions", rewards.convert_weighted_rewards),
        KeyMapping(f"{REMOTE_REWARD}.reward_clip_min", "reward.clip", rewards.reward_clip, default=-5.0),
        KeyMapping(f"{REMOTE_REWARD}.reward_clip_max", "reward.clip", rewards.reward_clip, default=5.0),
        KeyMapping(f"{REMOTE_REWARD}.scale", "reward.scale"),
    ),
    (VLM_SFT,): (
        KeyMapping(vlm.ANNOTATIONS, "data.path", vlm.annotation_path),
        KeyMapping("custom.dataset.media_path", "data.media_path", vlm.media_folder),
        KeyMapping("custom.dataset.system_prompt", "data.system_prompt", vlm.system_turn),
        KeyMapping("policy.model_max_length", "data.max_tokens", default=4096),
        KeyMapping("custom.vision.min_pixels", "data.pixels", vlm.pixel_limits),
        KeyMapping("custom.vision.max_pixels", "data.pixels", vlm.pixel_limits),
        KeyMapping("custom.vision.fps", "data.video", vlm.video_settings, default=1),
        KeyMapping("custom.vision.max_frames", "data.video", vlm.video_settings),
        KeyMapping(f"{POLICY}.dataloader_num_workers", "data.workers", vlm.num_readers),
        KeyMapping(f"{POLICY}.dataset.test_size", "validation.holdout", vlm.holdout_fraction),
    ),
    WFM_MODES: (
        KeyMapping("checkpoint.load_path", "model.path", diffusion.model_folder),
        KeyMapping("checkpoint.load_path", "model.denoiser_init", wfm.random_weights, default=""),
        KeyMapping(
            "model.net.sac_config.mode",
            "model.gradient_checkpointing",
            wfm.gradient_checkpointing,
            default="block_wise",
        ),
        KeyMapping("model.fsdp_shard_size", "engine.deepspeed", wfm.shard_zero_config, default=8),
        KeyMapping("model.dp_replicate_size", "engine.deepspeed", wfm.shard_zero_config, default=1),
        KeyMapping("model_parallel.context_parallel_size", "engine.sequence_parallel", wfm.context_parallel, default=1),
        KeyMapping("model.ema.enabled", ("ema.decay", "ema.every"), wfm.power_ema, default=True),
        KeyMapping("model.ema.rate", ("ema.decay", "ema.every"), wfm.power_ema, default=0.1),
        KeyMapping("model.ema.iteration_shift", ("ema.decay", "ema.every"), wfm.power_ema, default=0),
        KeyMapping("model.precision", "model.dtype", DTYPE),
        KeyMapping("job.project", "run.output_dir", wfm.job_output_folder, default="cosmos_wfm_v2"),
        KeyMapping("job.group", "run.output_dir", wfm.job_output_folder, default="official_runs_vid2vid_debug"),
        KeyMapping("job.name", "run.output_dir", wfm.job_output_folder),
        KeyMapping("trainer.max_iter", "run.steps", wfm.run_steps, default=25),
        KeyMapping("trainer.seed", "run.seed"),
        KeyMapping("trainer.run_validation", "validation.every", wfm.validate_every, default=False),
        KeyMapping("trainer.validation_iter", "validation.every", wfm.validate_every, default=100),
        KeyMapping("trainer.callbacks", ("engine.max_grad_norm", "logging.sample_every"), wfm.callback_settings),
        KeyMapping("checkpoint.save_iter", "checkpoint.every", default=1000),
        KeyMapping("optimizer.lr", "optimizer.lr", default=1e-5),
        KeyMapping("optimizer.betas", "optimizer.betas", default=[0.9, 0.99]),
        KeyMapping("optimizer.eps", "optimizer.eps", default=1e-8),
        KeyMapping("optimizer.weight_decay", "optimizer.weight_decay", default=1e-4),
        KeyMapping("scheduler.warm_up_steps", "optimizer.warmup_steps", wfm.first_value, default=[1000]),
        KeyMapping(f"{VIDEO_DATA}.dataset_dir", "data.path"),
        KeyMapping(f"{VIDEO_DATA}.num_frames", "sampling.num_frames"),
        KeyMapping(f"{VIDEO_DATA}.video_size", SIZE_KEYS, wfm.landscape_size),
        KeyMapping(f"{VIDEO_DATA}.num_workers", "data.workers"),
        KeyMapping(f"{VIDEO_DATA}.offline_text_embedding", "data.allow_pickle", default=False),
        KeyMapping(f"{VIDEO_DATA}.batch_size", BATCH_KEYS, lambda v, _: (v, v), default=1),
        KeyMapping(f"{WEB_DATA}.batch_size", BATCH_KEYS, lambda v, _: (v, v)),
        KeyMapping(f"{WEB_DATA}.num_workers", "data.workers"),
        KeyMapping(f"{WEB_DATA}.dataset.num_video_frames", "sampling.num_frames"),
        KeyMapping(f"{WEB_DATA}.dataset.resolution", SIZE_KEYS, wfm.resolution_size),
    ),
    (WFM_SFT,): (
        KeyMapping("trainer.grad_accum_iter", "engine.gradient_accumulation"),
        KeyMapping("dataloader_val.video_dataloader.dataset_dir", "validation.path"),
        KeyMapping("model.conditioner", "data.caption_dropout", wfm.caption_dropout),
        KeyMapping("model.sde.p_mean", "algorithm.logit_mean", default=math.log(4)),
        KeyMapping("model.sde.p_std", "algorithm.logit_std", default=1.2),
        KeyMapping("model.min_num_conditional_frames", "algorithm.min_num_conditional_frames", default=1),
        KeyMapping("model.max_num_conditional_frames", "algorithm.max_num_conditional_frames", default=2),
    ),
    (DDRL,): (
        KeyMapping("trainer.grad_accum_iter", "rollout.prompts_per_step", wfm.groups_per_step, default=1),
        KeyMapping(f"{VIDEO_DATA}.batch_size", "rollout.prompts_per_step", wfm.groups_per_step),
        KeyMapping(f"{WEB_DATA}.batch_size", "rollout.prompts_per_step", wfm.groups_per_step),
        KeyMapping("model.loss_scale", "algorithm.loss_scale", default=10.0),
        KeyMapping("model_parallel.data_parallel_size", "rollout.prompts_per_step", wfm.groups_per_step, default=-1),
        KeyMapping("model.dp_replicate_size", "rollout.prompts_per_step", wfm.groups_per_step, default=1),
        KeyMapping("model.fsdp_shard_size", "rollout.prompts_per_step", wfm.groups_per_step, default=8),
        KeyMapping("model.rl.num_rollout", "rollout.group_size", default=8),
        KeyMapping("model.rl.on_policy", "rollout.policy", lambda v, _: "current" if v else "reference"),
        KeyMapping("model.rl.sample_steps", "sampling.steps", default=10),
        KeyMapping("model.rl.use_same_seed", "sampling.same_noise", default=True),
        KeyMapping("model.rl.solver_option", "sampling.solver", EDM_SOLVER, default="2ab"),
        KeyMapping("model.rl.s_churn", "sampling.s_churn", default=1.0),
        KeyMapping("model.rl.s_t_min", "sampling.s_t_min", lambda v, _: float(v)),
        KeyMapping("model.rl.s_t_max", "sampling.s_t_max", wfm.finite_bound),
        KeyMapping("model.rl.s_noise", "sampling.s_noise"),
        KeyMapping("model.rl.guidance", "sampling.guidance_scale", wfm.edm_guidance, default=0.0),
        KeyMapping("model.rl.train_on", "algorithm.train_on", default=[0, 1, 2, 3, 4, 5, 6, 7]),
        KeyMapping("model.rl.update_ref_every_iter", "algorithm.update_ref_every", default=16),
        KeyMapping("model.rl.clip_ratio", "algorithm.clip_ratio", default=1e-4),
        KeyMapping("model.rl.kl_beta", "algorithm.kl_beta", default=0.01),
        KeyMapping("model.rl.data_beta", "algorithm.data_beta", default=0.0),
        KeyMapping("model.rl.use_rl_sigma_and_noise", "algorithm.use_rl_sigma_and_noise", wfm.require_data_loss),
        KeyMapping("model.rl.data_on_first_only", "algorithm.data_on_first_only", wfm.require_data_loss),
        KeyMapping("model.rl.exp_reward", "algorithm.exp_reward"),
        KeyMapping("model.rl.min_num_conditional_frames", "algorithm.min_num_conditional_frames", default=1),
        KeyMapping("model.rl.max_num_conditional_frames", "algorithm.max_num_conditional_frames", default=1),
        KeyMapping(f"{WFM_REWARD}.adv_clip_max", "algorithm.adv_clip_max", default=5.0),
        KeyMapping(f"{WFM_REMOTE}.reward_fn", "reward.functions", rewards.convert_wfm_rewards, default="dance_grpo"),
        KeyMapping(
            f"{WFM_REMOTE}.score_key", "reward.functions", rewards.convert_wfm_rewards, default="overall_reward"
        ),
        KeyMapping(f"{WFM_REMOTE}.enabled", "reward.functions", rewards.convert_wfm_rewards, default=True),
        KeyMapping(f"{WFM_REMOTE}.reward_clip_min", "reward.functions", rewards.convert_wfm_rewards, default=-5.0),
        KeyMapping(f"{WFM_REMOTE}.reward_clip_max", "reward.functions", rewards.convert_wfm_rewards, default=5.0),
        KeyMapping(f"{WFM_REWARD}.aesthetic.enabled", "reward.functions", rewards.convert_wfm_rewards, default=False),
        KeyMapping(
            f"{WFM_REWARD}.image_reward.enabled", "reward.functions", rewards.convert_wfm_rewards, default=False
        ),
        KeyMapping(f"{WFM_REWARD}.fake_reward.enabled", "reward.functions", rewards.convert_wfm_rewards, default=False),
    ),
}
KEY_MAPPINGS = tuple(replace(row, modes=modes) for modes, rows in MAPPINGS_BY_MODES.items() for row in rows)

# Recipe settings implied by the mode.
MODE_SETTINGS: dict[str, dict[str, Any]] = {
    SFT: {"algorithm.name": "sft", "data.kind": "paired"},
    NFT: {"algorithm.name": "diffusion_nft", "algorithm.zero_std": "keep", "data.kind": "prompts"},
    DDRL: {
        "algorithm.name": "ddrl",
        "algorithm.ratio_norm": "literal",
        "algorithm.std_unbiased": True,
        "data.kind": "cosmos",
    },
    VLM_SFT: {"algorithm.name": "vlm_sft", "data.kind": "llava", "data.pack": False},
    WFM_SFT: {"algorithm.name": "sft", "algorithm.flow_shift": 1.0, "data.kind": "cosmos"},
}

# Tables that are read as a single value, because their keys are names that the user has chosen.
WHOLE_TABLES = (f"{REMOTE_REWARD}.reward_fn", "train.optm_lr", "policy.lora.alpha_pattern", "policy.lora.r_pattern")

# Old and misspelt names. RENAMED_KEYS: {name: (current key, what Cosmos-RL does with this name)}.
MOVED_TABLES = {"policy.diffusers_config": "policy.diffusers", "policy.diffusers.lora": "policy.lora"}
_OLDER_NAME = "moved in current versions"
RENAMED_KEYS = {
    "train.enable_validation": ("validation.enable", _OLDER_NAME),
    "train.validation_step": ("validation.freq", _OLDER_NAME),
    "train.validation_batch_per_replica": ("validation.batch_size", _OLDER_NAME),
    "policy.diffusers.timestep_fraction": (
        "policy.diffusers.timesteps_fraction",
        "Cosmos-RL ignores this spelling and trains on all timesteps (1.0)",
    ),
    "policy.model_gradient_checkpointig": (
        "policy.model_gradient_checkpointing",
        "Cosmos-RL ignores this spelling and uses its default, true",
    ),
}
