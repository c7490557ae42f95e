"""Keys of a Cosmos-RL configuration that a recipe has no use for, and the reasons: the table beside keys.py.

A key that is in neither table is unknown, and is reported as that.
"""

from __future__ import annotations

from collections.abc import Iterable

from wfm_ds.migrate.config import SFT, VLM_SFT

LANGUAGE = "it is about language models"
LAUNCHER = "the launcher says how many ranks there are: deepspeed --num_gpus N, or --hostfile FILE"
ZERO_SHARDS = "not available: ZeRO cuts weights (engine.deepspeed), engine.sequence_parallel cuts tokens"
ONE_PROGRAM = "there is one program and no controller"
DEEPSPEED = "the DeepSpeed JSON that engine.deepspeed names decides"
FLOAT32 = "always float32: masters, optimizer, sums"
FOLDER = "model.path is a folder: download that revision"
PIPELINE = "it comes with the pipeline folder"
SEEDS = "all randomness follows from run.seed"
ON_POLICY = "rollouts are on-policy"
LOADER = "threads of each rank read ahead: data.workers"
WANDB = "see TensorBoard and metrics.jsonl in run.output_dir"
VALIDATION = "validation.prompts names a file, and the rewards are those of training"
OPTIONS = "a reward's options are in its entry of reward.functions"
ALWAYS = "there is no other way here"
MISSING = "not available"
INTERNAL = "it is about shards in storage of their own"
WEB_DATA = "dataloader_train.video_dataloader.dataloader"
STORAGE = "checkpoint.storage: s3://BUCKET/FOLDER keeps a copy of all that a run leaves"

# Table, its keys (`*`: whatever it holds), reason.
_ROWS = (
    ("", "redis mode eth_ips", ONE_PROGRAM),
    ("", "custom custom.*", "your own scripts read it"),
    ("", "profiler.*", MISSING),
    ("", "distillation.* vla.*", LANGUAGE),
    ("policy", "is_diffusers", ALWAYS),
    ("policy", "model_revision", FOLDER),
    ("policy", "model_safetensor_path trainable_map freeze_pattern trainable_pattern", MISSING),
    ("policy", "enable_liger_kernel enable_liger_cross_entropy enable_liger_fused_cross_entropy", LANGUAGE),
    ("policy", "model_max_length aux_loss_coeff", LANGUAGE),
    ("policy.lora", "lora_names primary_adapter", "the engine keeps the policies it needs"),
    ("policy.lora", "alpha_pattern r_pattern", MISSING),
    ("policy.lora", "lora_path", "lora.init_from takes a file or folder"),
    ("policy.lora", "modules_to_save", "lora.modules_to_save takes suffixes of layers"),
    ("policy.diffusers", "dtype main_dtype", "weights are kept in float32; train.param_dtype is model.dtype"),
    ("policy.diffusers", "is_video", "the pipeline is of a video family or not; sampling.num_frames says how long"),
    ("policy.diffusers", "offload", MISSING),
    ("policy.diffusers", "tokenizer.*", PIPELINE),
    (
        "policy.diffusers.sample",
        "global_std",
        "not read there: advantages are divided by a group's deviation",
    ),
    ("policy.parallelism", "n_init_replicas", LAUNCHER),
    ("policy.parallelism", "tp_size ep_size pp_size", ZERO_SHARDS),
    ("policy.parallelism", "pp_dynamic_shape pp_micro_batch_size pp_schedule pp_layers_per_stage", ZERO_SHARDS),
    ("rollout.parallelism", "*", LAUNCHER),
    ("rollout", "backend n_generation_to_batch batch_size mode async_config.*", "ranks take turns: rollout, training"),
    ("rollout", "seed", SEEDS),
    ("rollout", "async_r2r_sync prefetch_rollout broadcast_all_params", ON_POLICY),
    ("rollout", "enforce_eager include_stop_str_in_output gpu_memory_utilization enable_chunked_prefill", LANGUAGE),
    ("rollout", "max_response_length quantization sampling_config.* vllm_use_flashinfer multi_turn_config.*", LANGUAGE),
    ("logging", "log_interval project_name group_name experiment_name report_mfu", WANDB),
    ("train", "non_text", ALWAYS),
    ("train", "timestamp", "run.output_dir is as given, so that the same command continues a run"),
    ("train", "master_dtype fsdp_reduce_dtype logprob_dtype", FLOAT32),
    ("train", "optm_impl fsdp_reshard_after_forward transfer_dtype", DEEPSPEED),
    ("train", "optm_decay_ratio", "a schedule falls until the last step"),
    ("train", "optm_warmup_start_factor", "a warm-up begins at 0"),
    ("train", "sync_weight_interval", ON_POLICY),
    ("train", "async_tp_enabled fp8.* fp4.* activation_offload deterministic", MISSING),
    ("train", "compile", "blocks are compiled where engine.compile says so"),
    ("train", "fa_version", "model.attention names the kernel"),
    ("train", "save_ckpt_at_exit signal_to_handle", "SIGTERM and SIGINT always save, SIGUSR1 saves and goes on"),
    ("train", "local_dataset force_use_hf", "data.path is a folder"),
    ("train", "sequence_packing", LANGUAGE),
    ("train.ckpt", "save_mode", "a checkpoint is complete or absent"),
    ("train.ckpt", "save_freq_in_epoch", "checkpoints are counted in steps: checkpoint.every"),
    ("train.ckpt", "upload_hf hf_repo_name", MISSING),
    ("train.ckpt", "upload_s3 s3_bucket s3_prefix", STORAGE),
    ("train.train_policy", "type trainer_type", "it became algorithm.name"),
    ("train.train_policy", "uncentralized_training", ONE_PROGRAM),
    ("train.train_policy", "dataset.subset dataset.revision", "data.path is a folder"),
    ("train.train_policy", "dataset.name dataset.split", "data.path is the folder of the captioned media"),
    ("train.train_policy", "dataset.test_size", "validation.prompts names a file"),
    ("train.train_policy", "dataloader_seed", SEEDS),
    ("train.train_policy", "dataloader_batch_size dataloader_num_workers dataloader_prefetch_factor", LOADER),
    ("train.train_policy", "dataloader_drop_last dataloader_broadcast data_dispatch_as_rank_in_mesh", LOADER),
    ("train.train_policy", "enable_dataset_cache", "data.cache_dir keeps text embeddings and latents"),
    ("train.train_policy", "on_policy allowed_outdated_steps outdated_rollout_fetch_batch_size", ON_POLICY),
    ("train.train_policy", "max_inflight_steps max_retry_for_on_policy", ON_POLICY),
    ("train.train_policy", "reference_reset_interval reset_optimizer_with_reference", MISSING),
    (
        "train.train_policy",
        "variant temperature epsilon_low epsilon_high positive_nll_coef",
        LANGUAGE,
    ),
    ("train.train_policy", "loss_type unbiased_loss_max_tokens", LANGUAGE),
    ("train.train_policy", "overlong_reward.* unbiased_kl_estimate lower_bound_ratio", LANGUAGE),
    ("train.train_policy", "off_policy_masking_delta aipo_rho max_token_len_per_mini_batch entropy_coeff", LANGUAGE),
    (
        "train.train_policy",
        "min_filter_prefix_tokens balance_dp_token use_decoupled_loss",
        LANGUAGE,
    ),
    ("train.train_policy", "behav_imp_weight_cap rollout_as_token_ids collect_rollout_logprobs", LANGUAGE),
    ("train.train_policy", "use_rollout_logprobs_for_loss prompt_column_name", LANGUAGE),
    ("train.train_policy", "response_column_name reward_function", LANGUAGE),
    ("train.train_policy", "filter_reward_metric bypass_reward", LANGUAGE),
    ("train.train_policy", "group_reward_calculation conversation_column_name", LANGUAGE),
    ("train.train_policy", "system_prompt load_balanced_batches_per_optimizer_step", LANGUAGE),
    (
        "train.train_policy",
        "enable_dp_load_balancing load_balanced_pool_size",
        LANGUAGE,
    ),
    ("train.train_policy", "load_balanced_max_tokens_for_batch load_balanced_batching_strategy", LANGUAGE),
    ("train.train_policy.remote_reward", "batch_size", "max_batch of an entry of reward.functions"),
    ("validation", "batch_size", "engine.max_forward_batch holds for all that is generated"),
    ("validation", "dataset.name dataset.split dataset.subset dataset.revision dataset.test_size", VALIDATION),
    ("validation", "use_remote_reward remote_reward.* reward_function", VALIDATION),
    ("validation", "temperature top_p top_k repetition_penalty max_response_length", LANGUAGE),
    # ---- the wfm mode
    ("job", "wandb_mode", WANDB),
    ("job", "timestamp", "run.output_dir is as given, so that the same command continues a run"),
    ("model_parallel", "data_parallel_size", LAUNCHER),
    ("model_parallel", "*", ZERO_SHARDS),
    ("model.net.sac_config", "every_n_blocks", "every block is recomputed"),
    ("model", "tokenizer.* net.* text_encoder_class text_encoder_config.* resolution state_ch state_t", PIPELINE),
    ("model", "sde.* sigma_data scaling sigma_conditional conditioning_strategy use_rf_ckpts", PIPELINE),
    ("model", "denoise_replace_gt_frames adjust_video_noise rectified_flow_t_scaling_factor", PIPELINE),
    ("model", "rectified_flow_loss_weight_uniform loss_reduce loss_scale", "the velocity loss is a mean over elements"),
    ("model", "conditioner", "algorithm ddrl drops no captions"),
    ("model", "min_num_conditional_frames max_num_conditional_frames", "those of model.rl hold"),
    ("model", "input_data_key input_caption_key input_image_key resize_online", "media are cropped to size when read"),
    ("model", "high_sigma_strategy high_sigma_ratio low_sigma_ratio use_torch_compile", MISSING),
    ("model.rl", "enabled", "it became algorithm.name"),
    ("model.rl.reward_config", "adv_clip_min", "algorithm.adv_clip_max holds on both sides"),
    ("model.rl.reward_config", "ALL_REWARD_MODELS", "reward.functions names them"),
    ("model.rl.reward_config.remote_reward", "scale", "advantages are divided by the deviation of the reward"),
    (
        "model.rl.reward_config.remote_reward",
        "token enqueue_url fetch_url",
        "variables of the reward remote",
    ),
    ("model.rl.reward_config", "aesthetic.* image_reward.* fake_reward.*", OPTIONS),
    ("optimizer", "optim_type capturable", DEEPSPEED),
    ("optimizer", "master_weights", FLOAT32),
    ("scheduler", "scheduler_type verbosity_interval cycle_lengths f_start f_max f_min", "see optimizer.schedule"),
    ("trainer", "distributed_parallelism ddp.* cudnn.* grad_scaler_args.* memory_format", DEEPSPEED),
    ("trainer", "logging_iter", WANDB),
    ("trainer", "max_val_iter", "validation.num_prompts and validation.num_images"),
    ("trainer", "timeout_period straggler_detection.* profiling.*", MISSING),
    ("trainer", "use_s3", STORAGE),
    ("dataloader_train", "type image_dataloader.*", "data.path is one folder"),
    ("dataloader_train.video_dataloader", "type ratio webdataset text_encoder_type", "data.path is one folder"),
    ("dataloader_train.video_dataloader", "shuffle drop_last pin_memory use_cache cache_size concat_size", LOADER),
    ("dataloader_train.video_dataloader", "cache_augment_fn cache_replay_name", LOADER),
    (WEB_DATA, "pin_memory use_cache cache_size concat_size cache_replay_name cache_augment_fn.*", LOADER),
    (WEB_DATA, "shuffle drop_last prefetch_factor", LOADER),
    (WEB_DATA, "webdataset", "false is random data there, for a dry run as recipes/cp_mock.yaml; true: data.kind"),
    (f"{WEB_DATA}.dataset", "augmentor_name video_decoder_name", "media are cropped to size when read"),
    (f"{WEB_DATA}.dataset", "len_t5 t5_dim embedding_type", PIPELINE),
    (f"{WEB_DATA}.dataset", "caption_type", "data.path has one caption a video"),
    (f"{WEB_DATA}.dataset", "dataset_name is_train object_store detshuffle dataset_resolution_type", INTERNAL),
    (f"{WEB_DATA}.dataset", "chunk_size use_native_fps", INTERNAL),
    (f"{WEB_DATA}.dataset", "min_fps_thres max_fps_thres", "data.fps"),
    (
        f"{WEB_DATA}.dataset",
        "long_caption_ratio medium_caption_ratio short_caption_ratio user_caption_ratio",
        "data.path has one caption a video",
    ),
    ("dataloader_val", "*", "validation.path (SFT) or validation.prompts"),
    ("checkpoint", "model_id", FOLDER),
    (
        "checkpoint",
        "type dcp_async_mode_enabled verbose broadcast_via_filesystem",
        "a checkpoint is complete or absent",
    ),
    ("checkpoint", "load_training_state only_load_scheduler_state strict_resume keys_not_to_resume", "see run.resume"),
    ("checkpoint", "load_ema_to_reg dcp_allow_mismatched_size jit.*", MISSING),
    ("checkpoint", "save_to_object_store.* load_from_object_store.*", STORAGE),
)

# What is another reason, or a reason at all, for vision-language models.
RL_OF_LANGUAGE = "RL of language models is not available"
NO_PADDING = "conversations of a micro-batch stand side by side in one row, without padding"
_OF_LANGUAGE = (
    ("", "distillation.* vla.*", MISSING),
    ("policy", "is_diffusers", "the model is a language model"),
    ("policy", "trainable_map freeze_pattern trainable_pattern", "algorithm.freeze names the parts that stay"),
    ("policy", "enable_liger_kernel enable_liger_cross_entropy", "logits are made of labelled tokens alone"),
    ("policy", "enable_liger_fused_cross_entropy", "logits are made of labelled tokens alone"),
    ("policy", "aux_loss_coeff", MISSING),
    ("policy.parallelism", "cp_size cp_rotate_method", "a conversation stays on one rank"),
    ("train", "sequence_packing max_token_len_per_mini_batch", NO_PADDING),
    ("train", "compile", "rows have another length each time"),
    ("train", "fa_version", "FlashAttention 2 is used where it is installed"),
    ("train", "ema_enable ema_decay ema_update_step_interval", "of diffusion models there; here the section `ema`"),
    ("train", "local_dataset force_use_hf", "data.path names files of this machine"),
    ("custom.dataset", "path", "write its rows as .jsonl annotations, and name them in data.path"),
    ("custom.vision", "nframes", "videos give data.video.fps frames a second, at most data.video.max_frames"),
    ("custom.vision", "min_frames video_start video_end", "videos are taken whole"),
    ("custom.vision", "resized_height resized_width", "media keep their shape: data.pixels bounds their size"),
    ("custom.vision", "total_pixels", "data.video.total_pixels auto is what their script puts in its place"),
    ("train.train_policy", "dataset.name dataset.split dataset.subset dataset.revision", "data.path names annotations"),
    ("train.train_policy", "dataset.local_dir", "data.path names annotations"),
    ("train.train_policy", "enable_dataset_cache", "lengths are measured anew from headers, and nothing else is kept"),
    ("train.train_policy", "conversation_column_name", "a row has `conversations` or `messages`"),
    ("train.train_policy", "system_prompt", "data.system_prompt"),
    ("train.train_policy", "balance_dp_token max_token_len_per_mini_batch", NO_PADDING),
    ("validation", "batch_size", "a micro-batch has engine.micro_batch_size rows"),
    ("validation", "dataset.local_dir", "validation.path names annotations"),
    ("validation", "n_generation", RL_OF_LANGUAGE),
    ("logging", "multi_modal_log_interval", RL_OF_LANGUAGE),
)


def _by_key(rows: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    return {f"{table}.{key}".strip("."): reason for table, keys, reason in rows for key in keys.split()}


GONE, GONE_OF_LANGUAGE = _by_key(_ROWS), _by_key(_OF_LANGUAGE)


def reason_for(key: str, mode: str = SFT) -> str | None:
    """Why a recipe of this mode lacks the key; None where nobody has heard of it."""
    tables = [key.rpartition(".")[0] if n == 0 else ".".join(key.split(".")[:n]) for n in range(len(key.split(".")))]
    names = (key, *(f"{t}.*" for t in tables))
    if mode != VLM_SFT:
        return next((GONE[name] for name in names if name in GONE), None)
    if key.startswith(("custom.dataset.", "custom.vision.")):  # here the table is no script's own
        return GONE_OF_LANGUAGE.get(key)
    reason = next((table[name] for table in (GONE_OF_LANGUAGE, GONE) for name in names if name in table), None)
    return RL_OF_LANGUAGE if reason == LANGUAGE else reason
