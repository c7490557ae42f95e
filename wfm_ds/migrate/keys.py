"""The table of Cosmos-RL keys and their recipe keys, used by `python -m wfm_ds.migrate`.

Cosmos-RL has two configuration formats for diffusion models: one for its diffusers trainers (`[policy]`, `[train]`,
...; SFT and DiffusionNFT) and one for `--wfm-mode` (`[model]`, `[trainer]`, ...; DDRL and SFT). Vision-language models
use the first format, with `[custom.dataset]` and `[custom.vision]` for the script that reads the annotations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wfm_ds.migrate import language_values as vlm
from wfm_ds.migrate import length, rewards
from wfm_ds.migrate import values as diffusion
from wfm_ds.migrate import wfm_values as wfm
from wfm_ds.migrate.config import DDRL, NFT, SFT, VLM_SFT, WFM_SFT, Convert, one_of
from wfm_ds.migrate.rewards import WFM_REWARD
from wfm_ds.migrate.wfm_values import VIDEO_DATA

DIFFUSERS, WFM = (SFT, NFT), (DDRL, WFM_SFT)
TRAINERS = (*DIFFUSERS, VLM_SFT)
ABSENT = object()  # a marker, since any value may be a default


@dataclass(frozen=True, slots=True)
class Row:
    """A Cosmos-RL key and its recipe key, or several recipe keys if `convert` returns a tuple.

    `default` is Cosmos-RL's default. The recipe states it explicitly, because wfm_ds may have another default. A key
    may have several mappings.
    """

    theirs: str
    ours: str | tuple[str, ...]
    convert: Convert = lambda value, _: value
    default: Any = ABSENT
    modes: Sequence[str] = TRAINERS

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


REMOTE = "train.train_policy.remote_reward"
SERVICE = f"{WFM_REWARD}.remote_reward"
WEB_DATA = f"{VIDEO_DATA}.dataloader"
BATCH = ("engine.micro_batch_size", "engine.max_forward_batch")
SIZE = ("sampling.height", "sampling.width")

DTYPE = one_of({"bfloat16": "bfloat16", "float32": "float32"})
LORA_INIT = one_of({"gaussian": "gaussian", True: "default"})
OLD_DECAY = one_of({0: "copy", 1: "standard", 2: "slow"})
EDM_SOLVER = one_of({"2ab": "edm_2ab", "1euler": "edm_euler"})

ROWS = (
    Row("policy.model_name_or_path", "model.path", diffusion.folder_of_model),
    Row("policy.model_gradient_checkpointing", "model.gradient_checkpointing", default=True),
    Row("policy.diffusers.max_prompt_length", "model.max_sequence_length", default=300, modes=DIFFUSERS),
    Row("train.param_dtype", "model.dtype", DTYPE),
    Row("policy.diffusers.training_dtype", "model.dtype", DTYPE, modes=DIFFUSERS),
    Row("policy.lora.r", "lora.rank", default=8),
    Row("policy.lora.lora_alpha", "lora.alpha", default=8),
    Row("policy.lora.target_modules", "lora.target_modules", diffusion.lora_targets),
    Row("policy.lora.lora_dropout", "lora.dropout"),
    Row("policy.lora.use_rslora", "lora.rslora"),
    Row("policy.lora.init_lora_weights", "lora.init", LORA_INIT, default=True),
    Row("policy.parallelism.dp_shard_size", "engine.deepspeed", diffusion.zero_stage, default=1),
    Row("policy.parallelism.dp_replicate_size", "engine.deepspeed", diffusion.zero_stage, default=1),
    Row("policy.parallelism.cp_size", "engine.sequence_parallel", default=1, modes=DIFFUSERS),
    Row("train.fsdp_offload", "engine.deepspeed", diffusion.zero_stage, default=False),
    Row("train.train_policy.mini_batch", "engine.micro_batch_size", default=2),
    Row(
        "train.train_batch_per_replica",
        "engine.gradient_accumulation",
        diffusion.accumulation,
        default=8,
        modes=(SFT, VLM_SFT),
    ),
    Row(
        "train.train_batch_per_replica", "rollout.prompts_per_step", diffusion.prompts_per_step, default=8, modes=(NFT,)
    ),
    Row("policy.parallelism.n_init_replicas", "rollout.prompts_per_step", diffusion.prompts_per_step, 1, modes=(NFT,)),
    Row("rollout.n_generation", "rollout.group_size", default=16, modes=(NFT,)),
    Row("rollout.n_generation_mini_batch", "engine.max_forward_batch", modes=(NFT,)),
    Row("train.optm_grad_norm_clip", "engine.max_grad_norm", default=1.0),
    Row("train.optm_name", "optimizer.name", one_of({"AdamW": "adamw"})),
    Row("train.optm_lr", "optimizer.lr", diffusion.learning_rate, default=1e-6),
    Row("train.optm_betas", "optimizer.betas", default=[0.9, 0.999]),
    Row("train.epsilon", "optimizer.eps", default=1e-6),
    Row("train.optm_weight_decay", "optimizer.weight_decay", default=0.01),
    Row("train.optm_warmup_steps", "optimizer.warmup_steps", diffusion.warmup, default=20),
    Row("train.optm_decay_type", "optimizer.schedule", diffusion.schedule),
    Row("train.optm_min_lr_factor", "optimizer.final_lr_fraction"),
    Row("train.ema_enable", "ema.decay", diffusion.ema_switch, default=False, modes=DIFFUSERS),
    Row("train.ema_decay", "ema.decay", diffusion.of_ema, default=0.9999, modes=DIFFUSERS),
    Row("train.ema_update_step_interval", "ema.every", diffusion.ema_interval, default=0, modes=DIFFUSERS),
    Row("train.max_num_steps", "run.steps", length.run_steps),
    Row("train.epoch", "run.steps", length.run_steps, default=1),
    Row("train.output_dir", "run.output_dir", default="./outputs"),
    Row("train.seed", "run.seed"),
    Row("train.resume", "run.resume", diffusion.resume, default=False),
    Row("train.ckpt.enable_checkpoint", "checkpoint.every", diffusion.save_every, default=False),
    Row("train.ckpt.save_freq", "checkpoint.every", diffusion.save_every, default=20),
    Row("train.ckpt.export_safetensors", "checkpoint.export_every", diffusion.export_every, default=True),
    Row("train.ckpt.max_keep", "checkpoint.keep", diffusion.keep, default=5),
    Row("validation.enable", "validation.every", diffusion.validate_every, default=False),
    Row("validation.freq", "validation.every", diffusion.validate_every, default=20),
    Row("validation.val_before_train", "validation.at_start", diffusion.validate_at_start, default=False),
    Row("validation.n_generation", "validation.seeds", diffusion.seeds, modes=DIFFUSERS),
    Row("validation.dataset.local_dir", "validation.prompts", diffusion.prompt_file, modes=DIFFUSERS),
    Row("logging.logger", "logging.console", diffusion.has_console),
    Row("logging.multi_modal_log_interval", "logging.sample_every", modes=DIFFUSERS),
    Row("train.train_policy.dataset.name", ("data.name", "data.path"), lambda name, _: (name, name), modes=(NFT,)),
    Row("train.train_policy.dataset.local_dir", "data.path", modes=DIFFUSERS),
    Row("train.train_policy.dataset.split", "data.split", diffusion.split, modes=(NFT,)),
    Row("train.train_policy.dataset.test_size", "validation.holdout", modes=(SFT,)),
    Row("train.train_policy.dataloader_shuffle", "data.shuffle", default=True),
    Row("policy.diffusers.inference_size", SIZE, lambda v, _: v, [1024, 1024], modes=DIFFUSERS),
    Row("policy.diffusers.train_frames", "sampling.num_frames", diffusion.frames, default=41, modes=DIFFUSERS),
    Row("policy.diffusers.inference_frames", "sampling.num_frames", diffusion.shown_frames, modes=DIFFUSERS),
    Row("policy.diffusers.sample.num_steps", "sampling.steps", default=40, modes=(NFT,)),
    Row("policy.diffusers.sample.num_steps", "sampling.eval_steps", default=40, modes=(SFT,)),
    Row("policy.diffusers.sample.eval_num_steps", "sampling.eval_steps", default=40, modes=(NFT,)),
    Row(
        "policy.diffusers.sample.guidance_scale",
        "sampling.guidance_scale",
        diffusion.guidance,
        default=4.5,
        modes=DIFFUSERS,
    ),
    Row("policy.diffusers.sample.solver", "sampling.solver", diffusion.solver, default="dpm2", modes=(NFT,)),
    Row(
        "policy.diffusers.sample.deterministic_sampling",
        "sampling.solver",
        diffusion.solver,
        default=False,
        modes=(NFT,),
    ),
    Row(
        "policy.diffusers.sample.noise_level", "sampling.noise_level", diffusion.noise_level, default=1.0, modes=(NFT,)
    ),
    Row("policy.diffusers.weighting_scheme", "algorithm.timestep_density", diffusion.density, modes=(SFT,)),
    Row("policy.diffusers.logit_mean", "algorithm.logit_mean", modes=(SFT,)),
    Row("policy.diffusers.logit_std", "algorithm.logit_std", modes=(SFT,)),
    Row("policy.diffusers.train_flow_shift", "algorithm.flow_shift", default=3.0, modes=(SFT,)),
    Row("policy.diffusers.timesteps_fraction", "algorithm.timestep_fraction", default=1.0, modes=(NFT,)),
    Row("policy.diffusers.nft_beta", "algorithm.beta", default=1.0, modes=(NFT,)),
    Row("policy.diffusers.weight_copy_decay_type", "algorithm.old_decay", OLD_DECAY, default=0, modes=(NFT,)),
    Row("train.train_policy.kl_beta", "algorithm.kl_beta", default=0.0, modes=(NFT,)),
    Row(
        "train.train_policy.advantage_high",
        "algorithm.adv_clip_max",
        diffusion.advantage_clip,
        default=5.0,
        modes=(NFT,),
    ),
    Row(
        "train.train_policy.advantage_low",
        "algorithm.adv_clip_max",
        diffusion.advantage_clip,
        default=-5.0,
        modes=(NFT,),
    ),
    Row(
        "train.train_policy.unbiased_advantage", "algorithm.advantage_std", diffusion.advantage_std, False, modes=(NFT,)
    ),
    Row("train.train_policy.batch_size_per_optimize", "algorithm.updates_per_rollout", diffusion.updates, modes=(NFT,)),
    Row("train.train_policy.mu_iterations", "algorithm.updates_per_rollout", diffusion.once, modes=(NFT,)),
    Row("train.train_policy.use_remote_reward", "algorithm.std_unbiased", default=False, modes=(NFT,)),
    Row(f"{REMOTE}.reward_fns", "reward.functions", rewards.named_rewards, default=None, modes=(NFT,)),
    Row(f"{REMOTE}.reward_fn", "reward.functions", rewards.weighted_rewards, modes=(NFT,)),
    Row(f"{REMOTE}.reward_clip_min", "reward.clip", rewards.reward_clip, default=-5.0, modes=(NFT,)),
    Row(f"{REMOTE}.reward_clip_max", "reward.clip", rewards.reward_clip, default=5.0, modes=(NFT,)),
    Row(f"{REMOTE}.scale", "reward.scale", modes=(NFT,)),
    # ---- vision-language models
    Row(vlm.ANNOTATIONS, "data.path", vlm.annotation_file, modes=(VLM_SFT,)),
    Row("custom.dataset.media_path", "data.media_path", vlm.media_folder, modes=(VLM_SFT,)),
    Row("custom.dataset.system_prompt", "data.system_prompt", vlm.system_turn, modes=(VLM_SFT,)),
    Row("policy.model_max_length", "data.max_tokens", default=4096, modes=(VLM_SFT,)),
    Row("custom.vision.min_pixels", "data.pixels", vlm.pixels, modes=(VLM_SFT,)),
    Row("custom.vision.max_pixels", "data.pixels", vlm.pixels, modes=(VLM_SFT,)),
    Row("custom.vision.fps", "data.video", vlm.video, default=1, modes=(VLM_SFT,)),
    Row("custom.vision.max_frames", "data.video", vlm.video, modes=(VLM_SFT,)),
    Row("train.train_policy.dataloader_num_workers", "data.workers", vlm.readers, modes=(VLM_SFT,)),
    Row("train.train_policy.dataset.test_size", "validation.holdout", vlm.holdout, modes=(VLM_SFT,)),
    # ---- wfm mode
    Row("checkpoint.load_path", "model.path", diffusion.folder_of_model, modes=WFM),
    Row("checkpoint.load_path", "model.denoiser_init", wfm.random_weights, default="", modes=WFM),
    Row("model.net.sac_config.mode", "model.gradient_checkpointing", wfm.checkpointing, "block_wise", modes=WFM),
    Row("model.fsdp_shard_size", "engine.deepspeed", wfm.zero_of_shards, default=8, modes=WFM),
    Row("model.dp_replicate_size", "engine.deepspeed", wfm.zero_of_shards, default=1, modes=WFM),
    Row("model_parallel.context_parallel_size", "engine.sequence_parallel", wfm.context_parallel, 1, modes=WFM),
    Row("model.ema.enabled", ("ema.decay", "ema.every"), wfm.power_average, default=True, modes=WFM),
    Row("model.ema.rate", ("ema.decay", "ema.every"), wfm.power_average, default=0.1, modes=WFM),
    Row("model.ema.iteration_shift", ("ema.decay", "ema.every"), wfm.power_average, default=0, modes=WFM),
    Row("model.precision", "model.dtype", DTYPE, modes=WFM),
    Row("job.project", "run.output_dir", wfm.output_of_job, default="cosmos_wfm_v2", modes=WFM),
    Row("job.group", "run.output_dir", wfm.output_of_job, default="official_runs_vid2vid_debug", modes=WFM),
    Row("job.name", "run.output_dir", wfm.output_of_job, modes=WFM),
    Row("trainer.max_iter", "run.steps", wfm.steps, default=25, modes=WFM),
    Row("trainer.seed", "run.seed", modes=WFM),
    Row("trainer.grad_accum_iter", "engine.gradient_accumulation", modes=(WFM_SFT,)),
    Row("trainer.grad_accum_iter", "rollout.prompts_per_step", wfm.groups_of_instances, default=1, modes=(DDRL,)),
    Row("trainer.run_validation", "validation.every", wfm.validate_every, default=False, modes=WFM),
    Row("trainer.validation_iter", "validation.every", wfm.validate_every, default=100, modes=WFM),
    Row("trainer.callbacks", ("engine.max_grad_norm", "logging.sample_every"), wfm.callbacks, modes=WFM),
    Row("checkpoint.save_iter", "checkpoint.every", default=1000, modes=WFM),
    Row("optimizer.lr", "optimizer.lr", default=1e-5, modes=WFM),
    Row("optimizer.betas", "optimizer.betas", default=[0.9, 0.99], modes=WFM),
    Row("optimizer.eps", "optimizer.eps", default=1e-8, modes=WFM),
    Row("optimizer.weight_decay", "optimizer.weight_decay", default=1e-4, modes=WFM),
    Row("scheduler.warm_up_steps", "optimizer.warmup_steps", wfm.first, default=[1000], modes=WFM),
    Row(f"{VIDEO_DATA}.dataset_dir", "data.path", modes=WFM),
    Row(f"{VIDEO_DATA}.num_frames", "sampling.num_frames", modes=WFM),
    Row(f"{VIDEO_DATA}.video_size", SIZE, wfm.wide, modes=WFM),
    Row(f"{VIDEO_DATA}.num_workers", "data.workers", modes=WFM),
    Row(f"{VIDEO_DATA}.offline_text_embedding", "data.allow_pickle", default=False, modes=WFM),
    Row(f"{VIDEO_DATA}.batch_size", BATCH, lambda v, _: (v, v), default=1, modes=WFM),
    Row(f"{VIDEO_DATA}.batch_size", "rollout.prompts_per_step", wfm.groups_of_instances, modes=(DDRL,)),
    Row(f"{WEB_DATA}.batch_size", BATCH, lambda v, _: (v, v), modes=WFM),
    Row(f"{WEB_DATA}.batch_size", "rollout.prompts_per_step", wfm.groups_of_instances, modes=(DDRL,)),
    Row(f"{WEB_DATA}.num_workers", "data.workers", modes=WFM),
    Row(f"{WEB_DATA}.dataset.num_video_frames", "sampling.num_frames", modes=WFM),
    Row(f"{WEB_DATA}.dataset.resolution", SIZE, wfm.named_size, modes=WFM),
    Row("dataloader_val.video_dataloader.dataset_dir", "validation.path", modes=(WFM_SFT,)),
    Row("model.conditioner", "data.caption_dropout", wfm.caption_dropout, modes=(WFM_SFT,)),
    Row("model.sde.p_mean", "algorithm.logit_mean", default=math.log(4), modes=(WFM_SFT,)),
    Row("model.sde.p_std", "algorithm.logit_std", default=1.2, modes=(WFM_SFT,)),
    Row("model.min_num_conditional_frames", "algorithm.min_num_conditional_frames", default=1, modes=(WFM_SFT,)),
    Row("model.max_num_conditional_frames", "algorithm.max_num_conditional_frames", default=2, modes=(WFM_SFT,)),
    Row("model.loss_scale", "algorithm.loss_scale", default=10.0, modes=(DDRL,)),
    Row("model_parallel.data_parallel_size", "rollout.prompts_per_step", wfm.groups_of_instances, -1, modes=(DDRL,)),
    Row("model.dp_replicate_size", "rollout.prompts_per_step", wfm.groups_of_instances, default=1, modes=(DDRL,)),
    Row("model.fsdp_shard_size", "rollout.prompts_per_step", wfm.groups_of_instances, default=8, modes=(DDRL,)),
    Row("model.rl.num_rollout", "rollout.group_size", default=8, modes=(DDRL,)),
    Row("model.rl.on_policy", "rollout.policy", lambda v, _: "current" if v else "reference", modes=(DDRL,)),
    Row("model.rl.sample_steps", "sampling.steps", default=10, modes=(DDRL,)),
    Row("model.rl.use_same_seed", "sampling.same_noise", default=True, modes=(DDRL,)),
    Row("model.rl.solver_option", "sampling.solver", EDM_SOLVER, default="2ab", modes=(DDRL,)),
    Row("model.rl.s_churn", "sampling.s_churn", default=1.0, modes=(DDRL,)),
    Row("model.rl.s_t_min", "sampling.s_t_min", lambda v, _: float(v), modes=(DDRL,)),
    Row("model.rl.s_t_max", "sampling.s_t_max", wfm.bounded, modes=(DDRL,)),
    Row("model.rl.s_noise", "sampling.s_noise", modes=(DDRL,)),
    Row("model.rl.guidance", "sampling.guidance_scale", wfm.edm_guidance, default=0.0, modes=(DDRL,)),
    Row("model.rl.train_on", "algorithm.train_on", default=[0, 1, 2, 3, 4, 5, 6, 7], modes=(DDRL,)),
    Row("model.rl.update_ref_every_iter", "algorithm.update_ref_every", default=16, modes=(DDRL,)),
    Row("model.rl.clip_ratio", "algorithm.clip_ratio", default=1e-4, modes=(DDRL,)),
    Row("model.rl.kl_beta", "algorithm.kl_beta", default=0.01, modes=(DDRL,)),
    Row("model.rl.data_beta", "algorithm.data_beta", default=0.0, modes=(DDRL,)),
    Row("model.rl.use_rl_sigma_and_noise", "algorithm.use_rl_sigma_and_noise", wfm.of_data_term, modes=(DDRL,)),
    Row("model.rl.data_on_first_only", "algorithm.data_on_first_only", wfm.of_data_term, modes=(DDRL,)),
    Row("model.rl.exp_reward", "algorithm.exp_reward", modes=(DDRL,)),
    Row("model.rl.min_num_conditional_frames", "algorithm.min_num_conditional_frames", default=1, modes=(DDRL,)),
    Row("model.rl.max_num_conditional_frames", "algorithm.max_num_conditional_frames", default=1, modes=(DDRL,)),
    Row(f"{WFM_REWARD}.adv_clip_max", "algorithm.adv_clip_max", default=5.0, modes=(DDRL,)),
    Row(f"{SERVICE}.reward_fn", "reward.functions", rewards.wfm_rewards, "dance_grpo", modes=(DDRL,)),
    Row(f"{SERVICE}.score_key", "reward.functions", rewards.wfm_rewards, "overall_reward", modes=(DDRL,)),
    Row(f"{SERVICE}.enabled", "reward.functions", rewards.wfm_rewards, default=True, modes=(DDRL,)),
    Row(f"{SERVICE}.reward_clip_min", "reward.functions", rewards.wfm_rewards, -5.0, modes=(DDRL,)),
    Row(f"{SERVICE}.reward_clip_max", "reward.functions", rewards.wfm_rewards, 5.0, modes=(DDRL,)),
    Row(f"{WFM_REWARD}.aesthetic.enabled", "reward.functions", rewards.wfm_rewards, default=False, modes=(DDRL,)),
    Row(f"{WFM_REWARD}.image_reward.enabled", "reward.functions", rewards.wfm_rewards, default=False, modes=(DDRL,)),
    Row(f"{WFM_REWARD}.fake_reward.enabled", "reward.functions", rewards.wfm_rewards, default=False, modes=(DDRL,)),
)

# Recipe settings implied by the mode.
FIXED: dict[str, dict[str, Any]] = {
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

# Tables that are single values, because their keys are names chosen by the user.
WHOLE = (f"{REMOTE}.reward_fn", "train.optm_lr", "policy.lora.alpha_pattern", "policy.lora.r_pattern")

# Old and misspelt names: the current key, and what Cosmos-RL does with the name.
MOVED = {"policy.diffusers_config": "policy.diffusers", "policy.diffusers.lora": "policy.lora"}
_OLDER = "moved in current versions"
MISSPELT = {
    "train.enable_validation": ("validation.enable", _OLDER),
    "train.validation_step": ("validation.freq", _OLDER),
    "train.validation_batch_per_replica": ("validation.batch_size", _OLDER),
    "policy.diffusers.timestep_fraction": (
        "policy.diffusers.timesteps_fraction",
        "Cosmos-RL ignores this spelling and trains on all timesteps (1.0)",
    ),
    "policy.model_gradient_checkpointig": (
        "policy.model_gradient_checkpointing",
        "Cosmos-RL ignores this spelling and uses its default, true",
    ),
}
