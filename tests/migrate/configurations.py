"""One Cosmos-RL configuration for each training mode."""

import tomllib

from wfm_ds.migrate.translation import migrate_config

SD3_SFT_LORA = """
redis = "12800"
[policy]
model_name_or_path = "/models/sd3"
is_diffusers = true
[policy.lora]
r = 16
lora_alpha = 16
init_lora_weights = "gaussian"
target_modules = ["attn.to_q", "attn.to_k"]
[policy.diffusers]
inference_size = [768, 512]
[policy.diffusers.sample]
num_steps = 28
[train]
max_num_steps = 400
output_dir = "./outputs/sft"
optm_lr = 2e-4
optm_decay_ratio = 1.0
train_batch_per_replica = 8
[train.train_policy]
type = "sft"
dataset.local_dir = "/data/images"
mini_batch = 2
[train.ckpt]
enable_checkpoint = true
save_freq = 30
[validation]
enable = true
freq = 25
[logging]
logger = ["console", "wandb"]
"""

SANA_VIDEO_SFT = """
[policy]
model_name_or_path = "Efficient-Large-Model/SANA-Video_2B_480p_diffusers"
model_gradient_checkpointig = false
[policy.diffusers_config]
is_video = true
train_frames = 49
inference_size = [480, 832]
[policy.parallelism]
dp_shard_size = 8
[train]
epoch = 10
ema_enable = true
[train.train_policy]
type = "sft"
dataset.local_dir = "/data/videos"
"""

SD3_NFT = """
mode = "colocated"
[policy]
model_name_or_path = "/models/sd3"
is_diffusers = true
[policy.lora]
r = 32
[policy.diffusers]
inference_size = [512, 512]
timestep_fraction = 0.5
weight_copy_decay_type = 2
is_video = true
train_frames = 33
[policy.diffusers.sample]
num_steps = 10
guidance_scale = 1.0
solver = "flow"
deterministic_sampling = false
noise_level = 0.7
[policy.parallelism]
dp_shard_size = 8
n_init_replicas = 2
[rollout]
n_generation = 24
[train]
max_num_steps = 100
train_batch_per_replica = 576
ema_enable = true
ema_decay = 0.9
[train.train_policy]
type = "grpo"
trainer_type = "diffusion_nft"
kl_beta = 1e-4
mini_batch = 9
dataset.name = "ocr"
[[train.train_policy.remote_reward.reward_fns]]
name = "ocr"
[[train.train_policy.remote_reward.reward_fns]]
name = "jpeg_compressibility"
weight = 0.5
clip_max = 1.0
[validation]
enable = true
"""

COSMOS_DDRL = """
[model]
fsdp_shard_size = 4
dp_replicate_size = 4
[model_parallel]
context_parallel_size = 2
[model.rl]
sample_steps = 20
train_on = [0, 2, 4]
update_ref_every_iter = 0
data_beta = 0.01
min_num_conditional_frames = 0
[trainer]
max_iter = 60
run_validation = true
[[trainer.callbacks]]
name = "grad_clip"
args = {clip_norm = 0.5}
[optimizer]
lr = 2e-5
[scheduler]
warm_up_steps = [50]
[dataloader_train.video_dataloader]
dataset_dir = "/data/cosmos"
num_frames = 29
video_size = [1280, 704]
[job]
name = "mine"
[checkpoint]
load_path = "/models/Cosmos-Predict2.5-2B"
"""

REASONER_SFT = """
redis = "12800"
[custom.dataset]
annotation_path = "/data/driving/train.json"
media_path = "/data/driving/clips"
system_prompt = "Answer briefly."
[custom.vision]
fps = 2
max_pixels = 81920
[train]
output_dir = "outputs/driving"
max_num_steps = 250
epoch = 3
epsilon = 1e-8
optm_lr = 2e-5
optm_decay_type = "linear"
compile = false
train_batch_per_replica = 32
[policy]
model_name_or_path = "nvidia/Cosmos-Reason2-2B"
model_max_length = 8192
model_gradient_checkpointing = true
[logging]
logger = ["console", "wandb"]
project_name = "driving"
experiment_name = "first"
[train.train_policy]
type = "sft"
mini_batch = 2
conversation_column_name = "conversations"
dataset.test_size = 0.1
dataloader_num_workers = 8
dataloader_prefetch_factor = 8
enable_dataset_cache = false
[train.ckpt]
enable_checkpoint = true
save_freq = 50
save_mode = "async"
[validation]
enable = true
freq = 100
[policy.parallelism]
tp_size = 1
cp_size = 1
dp_shard_size = 8
pp_size = 1
"""


def put(config, key, value):
    """Set a dotted key, or remove it if the value is None."""
    *tables, name = key.split(".")
    for table in tables:
        config = config.setdefault(table, {})
    if value is None:
        config.pop(name, None)
    else:
        config[name] = value


def migrate(text, *, steps=None, **changes):
    """Convert a configuration with these changes of dotted keys; None removes a key."""
    config = tomllib.loads(text)
    for key, value in changes.items():
        put(config, key, value)
    return migrate_config(config, steps=steps)
