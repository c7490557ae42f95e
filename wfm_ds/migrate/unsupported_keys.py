"""Cosmos-RL keys that have no counterpart in recipes, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable

from wfm_ds.migrate.config import SFT, VLM_SFT

LANGUAGE_ONLY = "only for language models"
LAUNCHER = "the launcher sets the number of ranks: deepspeed --num_gpus N, or --hostfile FILE"
ZERO_SHARDS = "not available: ZeRO shards weights (engine.deepspeed), engine.sequence_parallel shards tokens"
ONE_PROGRAM = "there is a single program without a controller"
DEEPSPEED = "set by the DeepSpeed JSON (engine.deepspeed)"
FLOAT32 = "master weights, optimizer states and reductions are always float32"
FOLDER = "model.path is a folder: download this revision"
PIPELINE = "defined by the pipeline folder"
SEEDS = "all randomness is derived from run.seed"
ON_POLICY = "rollouts are on-policy unless rollout.mode is async: then see rollout.max_staleness"
LOADER = "each rank prefetches with data.workers threads"
TRACKERS = "see logging.trackers, and metrics.jsonl in run.output_dir"
VALIDATION = "validation.prompts is a file, and validation uses the training rewards"
OPTIONS = "set in the reward's entry of reward.functions"
ALWAYS = "always the case"
NOT_AVAILABLE = "not available"
INTERNAL = "only for an internal sharded storage"
WEB_DATA = "dataloader_train.video_dataloader.dataloader"
STORAGE = "checkpoint.storage: s3://BUCKET/FOLDER stores a copy of the run"

# Table, its keys (`*`: all keys of the table), reason.
_DIFFUSION_ROWS = (
    ("", "redis mode eth_ips", ONE_PROGRAM),
    ("", "custom custom.*", "read by user scripts"),
    ("", "profiler.*", NOT_AVAILABLE),
    ("", "distillation.* vla.*", LANGUAGE_ONLY),
    ("policy", "is_diffusers", ALWAYS),
    ("policy", "model_revision", FOLDER),
    ("policy", "model_safetensor_path trainable_map freeze_pattern trainable_pattern", NOT_AVAILABLE),
    ("policy", "enable_liger_kernel enable_liger_cross_entropy enable_liger_fused_cross_entropy", LANGUAGE_ONLY),
    ("policy", "model_max_length aux_loss_coeff", LANGUAGE_ONLY),
    ("policy.lora", "lora_names primary_adapter", "the engine creates the policies it needs"),
    ("policy.lora", "alpha_pattern r_pattern", NOT_AVAILABLE),
    ("policy.lora", "lora_path", "use lora.init_from with a file or folder"),
    ("policy.lora", "modules_to_save", "use lora.modules_to_save with suffixes of layer names"),
    ("policy.diffusers", "dtype main_dtype", "master weights are float32; train.param_dtype becomes model.dtype"),
    ("policy.diffusers", "is_video", "set by the pipeline; sampling.num_frames sets the length"),
    ("policy.diffusers", "offload", NOT_AVAILABLE),
    ("policy.diffusers", "tokenizer.*", PIPELINE),
    ("policy.diffusers.sample", "global_std", "not used by Cosmos-RL: advantages are divided by the group's std"),
    ("policy.parallelism", "n_init_replicas", LAUNCHER),
    ("policy.parallelism", "tp_size ep_size pp_size", ZERO_SHARDS),
    ("policy.parallelism", "pp_dynamic_shape pp_micro_batch_size pp_schedule pp_layers_per_stage", ZERO_SHARDS),
    ("rollout.parallelism", "*", LAUNCHER),
    (
        "rollout",
        "backend n_generation_to_batch batch_size mode async_config.*",
        "by default, each rank alternates between rollout and training; see rollout.mode",
    ),
    ("rollout", "seed", SEEDS),
    ("rollout", "async_r2r_sync prefetch_rollout broadcast_all_params", ON_POLICY),
    ("rollout", "enforce_eager include_stop_str_in_output gpu_memory_utilization", LANGUAGE_ONLY),
    ("rollout", "enable_chunked_prefill", LANGUAGE_ONLY),
    ("rollout", "max_response_length quantization sampling_config.* vllm_use_flashinfer", LANGUAGE_ONLY),
    ("rollout", "multi_turn_config.*", LANGUAGE_ONLY),
    ("logging", "log_interval group_name experiment_name report_mfu", TRACKERS),
    ("train", "non_text", ALWAYS),
    ("train", "timestamp", "run.output_dir has no timestamp, so the same command resumes a run"),
    ("train", "master_dtype fsdp_reduce_dtype logprob_dtype", FLOAT32),
    ("train", "optm_impl fsdp_reshard_after_forward transfer_dtype", DEEPSPEED),
    ("train", "optm_decay_ratio", "schedules decay until the last step"),
    ("train", "optm_warmup_start_factor", "warm-up starts at 0"),
    ("train", "sync_weight_interval", ON_POLICY),
    ("train", "async_tp_enabled fp4.* activation_offload", NOT_AVAILABLE),
    ("train", "fp8.*", "see model.fp8_training"),
    ("train", "deterministic", "see engine.deterministic"),
    ("train", "compile", "see engine.compile"),
    ("train", "fa_version", "see model.attention"),
    (
        "train",
        "save_ckpt_at_exit signal_to_handle",
        "SIGTERM and SIGINT always save and stop, SIGUSR1 saves and continues",
    ),
    ("train", "local_dataset force_use_hf", "data.path is a folder"),
    ("train", "sequence_packing", LANGUAGE_ONLY),
    ("train.ckpt", "save_mode", "checkpoints are always written atomically"),
    ("train.ckpt", "save_freq_in_epoch", "use steps: checkpoint.every"),
    ("train.ckpt", "upload_hf hf_repo_name", "see export.push_to_hub"),
    ("train.ckpt", "upload_s3 s3_bucket s3_prefix", STORAGE),
    ("train.train_policy", "type trainer_type", "became algorithm.name"),
    ("train.train_policy", "uncentralized_training", ONE_PROGRAM),
    ("train.train_policy", "dataset.subset dataset.revision", "data.path is a folder"),
    ("train.train_policy", "dataset.name dataset.split", "data.path is the folder of captioned images or videos"),
    ("train.train_policy", "dataset.test_size", "validation.prompts is a file"),
    ("train.train_policy", "dataloader_seed", SEEDS),
    ("train.train_policy", "dataloader_batch_size dataloader_num_workers dataloader_prefetch_factor", LOADER),
    ("train.train_policy", "dataloader_drop_last dataloader_broadcast data_dispatch_as_rank_in_mesh", LOADER),
    ("train.train_policy", "enable_dataset_cache", "data.cache_dir caches text embeddings and latents"),
    ("train.train_policy", "on_policy allowed_outdated_steps outdated_rollout_fetch_batch_size", ON_POLICY),
    ("train.train_policy", "max_inflight_steps max_retry_for_on_policy", ON_POLICY),
    ("train.train_policy", "reference_reset_interval reset_optimizer_with_reference", NOT_AVAILABLE),
    ("train.train_policy", "variant temperature epsilon_low epsilon_high positive_nll_coef", LANGUAGE_ONLY),
    ("train.train_policy", "loss_type unbiased_loss_max_tokens", LANGUAGE_ONLY),
    ("train.train_policy", "overlong_reward.* unbiased_kl_estimate lower_bound_ratio", LANGUAGE_ONLY),
    ("train.train_policy", "off_policy_masking_delta aipo_rho max_token_len_per_mini_batch", LANGUAGE_ONLY),
    ("train.train_policy", "entropy_coeff", LANGUAGE_ONLY),
    ("train.train_policy", "min_filter_prefix_tokens balance_dp_token use_decoupled_loss", LANGUAGE_ONLY),
    ("train.train_policy", "behav_imp_weight_cap rollout_as_token_ids collect_rollout_logprobs", LANGUAGE_ONLY),
    ("train.train_policy", "use_rollout_logprobs_for_loss prompt_column_name", LANGUAGE_ONLY),
    ("train.train_policy", "response_column_name reward_function", LANGUAGE_ONLY),
    ("train.train_policy", "filter_reward_metric bypass_reward", LANGUAGE_ONLY),
    ("train.train_policy", "group_reward_calculation conversation_column_name", LANGUAGE_ONLY),
    ("train.train_policy", "system_prompt load_balanced_batches_per_optimizer_step", LANGUAGE_ONLY),
    ("train.train_policy", "enable_dp_load_balancing load_balanced_pool_size", LANGUAGE_ONLY),
    ("train.train_policy", "load_balanced_max_tokens_for_batch load_balanced_batching_strategy", LANGUAGE_ONLY),
    ("train.train_policy.remote_reward", "batch_size", "max_batch in an entry of reward.functions"),
    ("validation", "batch_size", "engine.max_forward_batch applies to all generated samples"),
    ("validation", "dataset.name dataset.split dataset.subset dataset.revision dataset.test_size", VALIDATION),
    ("validation", "use_remote_reward remote_reward.* reward_function", VALIDATION),
    ("validation", "temperature top_p top_k repetition_penalty max_response_length", LANGUAGE_ONLY),
    # ---- wfm mode
    ("job", "wandb_mode", TRACKERS),
    ("job", "timestamp", "run.output_dir has no timestamp, so the same command resumes a run"),
    ("model_parallel", "data_parallel_size", LAUNCHER),
    ("model_parallel", "*", ZERO_SHARDS),
    ("model.net.sac_config", "every_n_blocks", "every block is recomputed"),
    ("model", "tokenizer.* net.* text_encoder_class text_encoder_config.* resolution state_ch state_t", PIPELINE),
    ("model", "sde.* sigma_data scaling sigma_conditional conditioning_strategy use_rf_ckpts", PIPELINE),
    ("model", "denoise_replace_gt_frames adjust_video_noise rectified_flow_t_scaling_factor", PIPELINE),
    ("model", "rectified_flow_loss_weight_uniform loss_reduce loss_scale", "the velocity loss is a mean over elements"),
    ("model", "conditioner", "algorithm ddrl has no caption dropout"),
    ("model", "min_num_conditional_frames max_num_conditional_frames", "model.rl has the same keys, which are used"),
    (
        "model",
        "input_data_key input_caption_key input_image_key resize_online",
        "images and videos are cropped to size when read",
    ),
    ("model", "high_sigma_strategy high_sigma_ratio low_sigma_ratio use_torch_compile", NOT_AVAILABLE),
    ("model.rl", "enabled", "became algorithm.name"),
    ("model.rl.reward_config", "adv_clip_min", "algorithm.adv_clip_max limits both sides"),
    ("model.rl.reward_config", "ALL_REWARD_MODELS", "see reward.functions"),
    ("model.rl.reward_config.remote_reward", "scale", "advantages are divided by the reward std"),
    (
        "model.rl.reward_config.remote_reward",
        "token enqueue_url fetch_url",
        "environment variables of the reward `remote`",
    ),
    ("model.rl.reward_config", "aesthetic.* image_reward.* fake_reward.*", OPTIONS),
    ("optimizer", "optim_type capturable", DEEPSPEED),
    ("optimizer", "master_weights", FLOAT32),
    ("scheduler", "scheduler_type verbosity_interval cycle_lengths f_start f_max f_min", "see optimizer.schedule"),
    ("trainer", "distributed_parallelism ddp.* cudnn.* grad_scaler_args.* memory_format", DEEPSPEED),
    ("trainer", "logging_iter", TRACKERS),
    ("trainer", "max_val_iter", "validation.num_prompts and validation.num_images"),
    ("trainer", "timeout_period straggler_detection.* profiling.*", NOT_AVAILABLE),
    ("trainer", "use_s3", STORAGE),
    ("dataloader_train", "type image_dataloader.*", "data.path is one folder"),
    ("dataloader_train.video_dataloader", "type ratio webdataset text_encoder_type", "data.path is one folder"),
    ("dataloader_train.video_dataloader", "shuffle drop_last pin_memory use_cache cache_size concat_size", LOADER),
    ("dataloader_train.video_dataloader", "cache_augment_fn cache_replay_name", LOADER),
    (WEB_DATA, "pin_memory use_cache cache_size concat_size cache_replay_name cache_augment_fn.*", LOADER),
    (WEB_DATA, "shuffle drop_last prefetch_factor", LOADER),
    (WEB_DATA, "webdataset", "false: random data, like recipes/cp_mock.yaml; true: see data.kind"),
    (f"{WEB_DATA}.dataset", "augmentor_name video_decoder_name", "images and videos are cropped to size when read"),
    (f"{WEB_DATA}.dataset", "len_t5 t5_dim embedding_type", PIPELINE),
    (f"{WEB_DATA}.dataset", "caption_type", "data.path has one caption per video"),
    (f"{WEB_DATA}.dataset", "dataset_name is_train object_store detshuffle dataset_resolution_type", INTERNAL),
    (f"{WEB_DATA}.dataset", "chunk_size use_native_fps", INTERNAL),
    (f"{WEB_DATA}.dataset", "min_fps_thres max_fps_thres", "data.fps"),
    (
        f"{WEB_DATA}.dataset",
        "long_caption_ratio medium_caption_ratio short_caption_ratio user_caption_ratio",
        "data.path has one caption per video",
    ),
    ("dataloader_val", "*", "validation.path (SFT) or validation.prompts"),
    ("checkpoint", "model_id", FOLDER),
    (
        "checkpoint",
        "type dcp_async_mode_enabled verbose broadcast_via_filesystem",
        "checkpoints are always written atomically",
    ),
    ("checkpoint", "load_training_state only_load_scheduler_state strict_resume keys_not_to_resume", "see run.resume"),
    ("checkpoint", "load_ema_to_reg dcp_allow_mismatched_size jit.*", NOT_AVAILABLE),
    ("checkpoint", "save_to_object_store.* load_from_object_store.*", STORAGE),
)

# Keys that only vision-language models have, or that have a different reason for these models.
LANGUAGE_RL = "RL of language models is not available"
NO_PADDING = "the conversations of a micro-batch are packed into one sequence without padding"
_LANGUAGE_ROWS = (
    ("", "distillation.* vla.*", NOT_AVAILABLE),
    ("policy", "is_diffusers", "the model is a language model"),
    ("policy", "trainable_map freeze_pattern trainable_pattern", "see algorithm.freeze"),
    ("policy", "enable_liger_kernel enable_liger_cross_entropy", "logits are computed only for labelled tokens"),
    ("policy", "enable_liger_fused_cross_entropy", "logits are computed only for labelled tokens"),
    ("policy", "aux_loss_coeff", NOT_AVAILABLE),
    ("policy.parallelism", "cp_size cp_rotate_method", "see engine.sequence_parallel"),
    ("train", "sequence_packing max_token_len_per_mini_batch", NO_PADDING),
    ("train", "compile", "sequence lengths vary"),
    ("train", "fa_version", "FlashAttention 2 is used if it is installed"),
    (
        "train",
        "ema_enable ema_decay ema_update_step_interval",
        "Cosmos-RL has it for diffusion models only; see the section `ema`",
    ),
    ("train", "local_dataset force_use_hf", "data.path names local files"),
    ("custom.dataset", "path", "convert the data set to .jsonl annotations and set data.path"),
    ("custom.vision", "nframes", "videos are sampled at data.video.fps, up to data.video.max_frames"),
    ("custom.vision", "min_frames video_start video_end", "whole videos are used"),
    ("custom.vision", "resized_height resized_width", "the aspect ratio is kept; data.pixels limits the size"),
    ("custom.vision", "total_pixels", "data.video.total_pixels auto computes the same value as Cosmos-RL"),
    ("train.train_policy", "dataset.name dataset.split dataset.subset dataset.revision", "data.path names annotations"),
    ("train.train_policy", "dataset.local_dir", "data.path names annotations"),
    ("train.train_policy", "enable_dataset_cache", "data.cache_dir caches the token counts"),
    ("train.train_policy", "conversation_column_name", "rows have `conversations` or `messages`"),
    ("train.train_policy", "system_prompt", "see data.system_prompt"),
    ("train.train_policy", "balance_dp_token max_token_len_per_mini_batch", NO_PADDING),
    ("validation", "batch_size", "see engine.micro_batch_size"),
    ("validation", "dataset.local_dir", "validation.path names annotations"),
    ("validation", "n_generation", LANGUAGE_RL),
    ("logging", "multi_modal_log_interval", LANGUAGE_RL),
)


def _reasons_by_key(rows: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    return {f"{table}.{key}".strip("."): reason for table, keys, reason in rows for key in keys.split()}


UNSUPPORTED, UNSUPPORTED_LANGUAGE = _reasons_by_key(_DIFFUSION_ROWS), _reasons_by_key(_LANGUAGE_ROWS)


def find_reason(key: str, mode: str = SFT) -> str | None:
    parts = key.split(".")
    tables = [".".join(parts[:n]) for n in (len(parts) - 1, *range(1, len(parts)))]
    names = (key, *(f"{t}.*" for t in tables))
    if mode != VLM_SFT:
        return next((UNSUPPORTED[name] for name in names if name in UNSUPPORTED), None)
    if key.startswith(("custom.dataset.", "custom.vision.")):  # in this mode, wfm_ds reads these tables
        return UNSUPPORTED_LANGUAGE.get(key)
    reason = next(
        (table[name] for table in (UNSUPPORTED_LANGUAGE, UNSUPPORTED) for name in names if name in table), None
    )
    return LANGUAGE_RL if reason == LANGUAGE_ONLY else reason
