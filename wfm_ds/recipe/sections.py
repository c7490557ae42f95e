"""Recipe sections: run, model, lora, engine, optimizer, ema, reward, checkpoint, export and logging.

docs/recipes.md is generated from the docstrings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from wfm_ds.recipe.section import (
    Decay,
    DeviceName,
    Fraction,
    HubName,
    PossiblePath,
    RewardName,
    Section,
    Seed,
    StorageAddress,
    UserClass,
    UserPath,
)
from wfm_ds.recipe.shared_defaults import DEFAULT_MAX_FAILED_FRACTION, AttentionName, Checkpointing

BasePrecision = Literal["fp8", "fp8_twice", "int8", "nf4"]
Fp8Training = Literal["torchao", "transformer_engine"]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"]


class RunRecipe(Section):
    """Output folder, length and random seed of the run."""

    output_dir: UserPath
    """Local folder for all files of the run, created if missing. It must not contain a run of a different recipe. Set
    `checkpoint.storage` to also copy the run to S3."""
    steps: PositiveInt
    """Number of steps: optimizer steps for SFT and DPO, RL steps for reinforcement learning."""
    seed: Seed = 0
    """Random seed. All randomness is derived from (seed, step, sample id), independent of the rank and the world
    size."""
    resume: Annotated[str, Field(min_length=1)] = "auto"
    """`auto`: continue the run in `output_dir` or `checkpoint.storage` from its newest checkpoint, if there is one.
    `never`: fail if there is a run. A local path or `s3://` address of checkpoints/step_N of another run: start a new
    run from that checkpoint."""


class ModelRecipe(Section):
    """The model to train: a diffusers pipeline, or a vision-language model for `vlm_sft`."""

    path: PossiblePath
    """Folder of a diffusers pipeline (`vlm_sft`: of a transformers model); or `owner/name` on the Hugging Face Hub,
    downloaded to the Hub's cache (docs/models.md); or `tiny:FAMILY`, a tiny random pipeline for tests, cached in the
    user's cache folder."""
    revision: Annotated[str, Field(min_length=1)] | None = None
    """Branch, tag or commit of a Hub model. Unset: `main`. The resolved recipe stores the commit, so a resumed run uses
    the same files."""
    family: UserClass | None = None
    """Your own model family as `package.module:Class` (docs/own_model.md). Unset: chosen by the pipeline's class."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of the denoiser. Latents, losses, optimizer states and weight averages are always float32."""
    base_precision: BasePrecision | None = None
    """LoRA only: storage format of the frozen linear layers in the transformer blocks. `fp8`: float8 e4m3 with one
    scale per row and float8 matrix products; half the memory of bfloat16, faster on GPUs of compute capability 8.9 or
    newer. `fp8_twice`: like `fp8`, with a second copy for a float8 backward pass; saves no memory. `int8`: half the
    memory of bfloat16 and a third of the rounding error of `fp8`, on any GPU, without a speed-up. `nf4`: a quarter of
    the memory of bfloat16 (needs bitsandbytes). The trained, old and reference policies share this base. Unset:
    `dtype`."""
    fp8_training: Fp8Training | None = None
    """Full training only: run the matrix products of the transformer blocks in float8, forward and backward. Needs
    compute capability 8.9 or newer, and zero1 or zero2. Weights keep their dtype and are cast in each forward pass.
    `torchao`: one scale per row; only faster with `engine.compile`. `transformer_engine`: one scale per tensor, so
    predictions depend on the batch; only for `sft`, without `engine.compile`. Unset: `dtype`."""
    vae_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the VAE. `bfloat16` is faster than `float32` and takes half the memory, but changes latents and decoded
    images slightly. `data.cache_latents` caches each dtype separately."""
    denoiser_init: Literal["pretrained", "random"] = "pretrained"
    """`random`: train from scratch; the denoiser is re-initialized from its config and `run.seed`."""
    gradient_checkpointing: Checkpointing = False
    """Recompute the activations of transformer blocks in the backward pass. Saves memory and takes about a third more
    time. `attention`: like `true`, but keep the outputs of attention between tokens of the sample, which takes more
    memory and less time than `true` (docs/performance.md). Cannot be used with `engine.compile` or `vlm_sft`."""
    max_sequence_length: PositiveInt | None = None
    """Maximum number of text tokens of the longest text encoder. Unset: the value saved with the pipeline (call.json).
    If there is none, the default of the diffusers pipeline."""
    prompt_template: Literal["stock", "none"] | None = None
    """SANA only: the instruction that its pipelines prepend to prompts (not to negative prompts). `stock`: prepend it.
    `none`: do not. Unset: the value saved with the pipeline (call.json). If there is none, `stock`."""
    embedded_guidance: PositiveFloat | None = None
    """FLUX.2-dev and FLUX.1-Kontext only: the guidance scale passed to the network as an input in training, rollouts
    and validation. This is not classifier-free guidance, so keep `sampling.guidance_scale` at 1. Unset: the value saved
    with the pipeline (call.json). If there is none, the default of the diffusers pipeline."""
    attention: AttentionName = "auto"
    """Attention kernel of the denoiser. `auto` and `native`: torch's choice, which is cuDNN on an H100 if cuDNN is
    newer than 9.15.0. `cudnn`: cuDNN, after copies of queries, keys and values. `flash`, `flash3` and `sage` need the
    packages flash-attn, FlashAttention-3 and sageattention. `sage` has no backward pass: use it in rollout workers and
    `wfm generate` (docs/performance.md)."""
    guardrail: Literal["stock", "off"] = "stock"
    """Safety checker of Cosmos pipelines. `stock`: check prompts and videos as the pipeline does (needs
    cosmos_guardrail). `off`: no checks, which the model's licence may not allow."""


class LoraRecipe(Section):
    """Low-rank adapters. Omit the section for full fine-tuning."""

    rank: Annotated[PositiveInt, Field(le=65536)] = 32
    """Rank of each adapter."""
    alpha: PositiveFloat = 64.0
    """Scaling: adapter outputs are multiplied by alpha / rank, or by alpha / sqrt(rank) with `rslora`."""
    target_modules: list[str] | None = None
    """Name suffixes of the linear layers that get an adapter; `{}` matches a block number. Unset: the attention
    projections of the model family."""
    init: Literal["gaussian", "default"] = "gaussian"
    """Initialization of the first matrix of each adapter (the second one starts at zero): `gaussian`, or PEFT's
    `default` (Kaiming uniform)."""
    init_from: UserPath | None = None
    """LoRA to start from: a .safetensors file with diffusers, PEFT, kohya or ComfyUI keys, or an export folder. Layers
    that are missing in the file are initialized according to `init`. The reference policy of RL remains the base model
    without adapters."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of adapter inputs in training. Cannot be used with algorithms that compare
    log-probabilities."""
    rslora: bool = False
    """Rank-stabilized LoRA: scale by alpha / sqrt(rank)."""
    dora: bool = False
    """DoRA: also train a magnitude for each output of the adapted layers. Needs zero1 or zero2."""
    modules_to_save: list[str] = Field(default=[])
    """Name suffixes of layers that are trained in full in addition to the adapters. Needs zero1 or zero2. These layers
    are exported to a separate file."""

    def trainable_layers(self, default_targets: Sequence[str]) -> list[str]:
        """Return the name suffixes of all layers that get an adapter or are fully trained.

        default_targets: the suffixes of the model family, used if `target_modules` is unset.
        """
        return [*(self.target_modules or default_targets), *self.modules_to_save]

    @field_validator("target_modules")
    @classmethod
    def _require_targets(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not value:
            raise ValueError("an empty list would train nothing: name at least one layer, or remove the key")
        return value


class EngineRecipe(Section):
    """Distributed training and batch sizes."""

    deepspeed: str = "zero2"
    """DeepSpeed config: a name in ds_configs/ (zero1, zero2, zero3, ...) or the path of a JSON file that contains only
    ZeRO settings."""
    micro_batch_size: PositiveInt = 1
    """Batch size of a training forward pass on each rank (with `sequence_parallel`: on each replica). The unit is
    samples in SFT, preference pairs in DPO, and training examples (one sample at one noise level) in RL."""
    gradient_accumulation: PositiveInt = 1
    """SFT and DPO: micro-batches per optimizer step. RL derives it from `micro_batch_size`."""
    max_forward_batch: PositiveInt = 16
    """Maximum number of samples per rank in a forward pass without gradients: in rollouts, in validation, and for
    predictions of reference policies. For reference policies, the unit is training examples, and a forward pass has at
    least `micro_batch_size` of them. Lower this number if one of these phases runs out of memory."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Maximum global gradient norm. 0: no gradient clipping."""
    sequence_parallel: PositiveInt = 1
    """Number of consecutive ranks that form a replica and split the tokens of each sample, for videos that do not fit
    on one GPU. Must divide the number of ranks per node."""
    compile: bool = False
    """Compile the denoiser's repeated blocks with torch.compile, also in rollout workers. The first step takes minutes;
    later ones are faster. Needs zero1 or zero2 (docs/performance.md)."""
    fused_norms: bool = False
    """Run norms, modulations and gated residuals of the denoiser as fused Triton kernels, also in rollout workers.
    Results differ by rounding. Works with every ZeRO stage, for most model families (docs/performance.md). Cannot be
    used with `compile`, which fuses these operators itself."""
    timeout_minutes: PositiveFloat = 30.0
    """End the run if no rank makes progress for this many minutes. The number must exceed the time to load the model or
    write a checkpoint, `reward.timeout_s`, and `reward.start_timeout_s`."""
    deterministic: bool = False
    """Use only deterministic kernels, also in rollout workers. Slower, but repeated runs on the same GPU model are
    bit-identical (docs/checkpoints.md). CPU runs are always bit-identical. Operations without a deterministic kernel
    fail."""
    guard: bool = False
    """For debugging: before every forward pass, check with a small all-reduce that all ranks run the same forward
    pass."""

    @model_validator(mode="after")
    def _fuse_norms_once(self) -> EngineRecipe:
        if self.fused_norms and self.compile:
            raise ValueError("engine.fused_norms: engine.compile fuses norms itself: remove one of the two keys")
        return self


class OptimizerRecipe(Section):
    """AdamW and its learning-rate schedule. All numbers of steps are optimizer steps."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit`: bitsandbytes' AdamW with 8-bit moments. Saves 6 bytes per trained weight; updates are slightly less
    precise (docs/low_precision.md)."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW epsilon."""
    weight_decay: NonNegativeFloat = 1e-4
    """Decoupled weight decay."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up. The first step has learning rate 0, as in diffusers' get_scheduler."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after warm-up. `linear` and `cosine` decay from `lr` towards `final_lr_fraction` * `lr`. They would
    reach this value one step after the last step."""
    final_lr_fraction: Fraction = 0.0
    """Learning rate at the end of the `linear` and `cosine` schedules, as a fraction of `lr`."""


class EmaRecipe(Section):
    """Exponential moving average of the weights, used for validation, samples and export. Omit this section
    to disable EMA."""

    decay: Decay = 0.999
    """Maximum decay. The decay of update number j is min((1 + j) / (10 + j), decay)."""
    every: PositiveInt = 1
    """Optimizer steps between updates of the average."""


def _require_ordered_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] >= bounds[1]:
        raise ValueError(f"the lower bound {bounds[0]} must be below the upper bound {bounds[1]}")
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_require_ordered_bounds)]


class HeldOutReward(Section):
    """A held-out reward: it is computed in evaluations and never trained on."""

    name: RewardName
    """A reward of wfm_reward, or `package.module:Class`. Must not be a reward that `reward.functions` trains on, and
    must not have the same name as one of them."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward's constructor."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of worker processes for this reward, if the trainer starts the service."""
    max_batch: Annotated[int, Field(ge=1, le=64)] | None = None
    """Maximum number of items that a worker scores at once, if the trainer starts the service. Unset: 16, or the
    maximum that the reward's class sets if that is smaller."""
    device: DeviceName = "cpu"
    """Device of the reward's model, such as `cuda:7`, if the trainer starts the service. Numbers count all GPUs
    available to the run on its first machine (docs/rewards.md)."""


class RewardFunction(HeldOutReward):
    """A reward with its weight, options and worker processes."""

    name: RewardName
    """A reward of wfm_reward, or `package.module:Class`."""
    weight: float = 1.0
    """Weight in the sum of the rewards. 0: the reward is only logged, and a failed score does not invalidate the
    sample."""
    clip: Bounds | None = None
    """Range to which raw scores are clipped before weighting. Unset: no clipping."""

    @property
    def uses_gpu(self) -> bool:
        return self.device.startswith("cuda")


class RewardRecipe(Section):
    """RL: the rewards, and the service that computes them."""

    functions: list[RewardFunction] = Field(min_length=1)
    """The rewards. Their weighted sum is the total reward."""
    clip: Bounds | None = None
    """Range to which the weighted sum is clipped. Unset: no clipping."""
    scale: PositiveFloat = 1.0
    """Factor by which the weighted sum is multiplied after it is clipped to `clip`."""
    spawn: bool = True
    """Start a reward service on the machine of rank 0. Must be false if `endpoint` is set."""
    endpoint: str | None = None
    """A running service: the path of its pipes.json, or an `ipc://` or `tcp://` address."""
    keys: UserPath | None = None
    """With `endpoint`: folder with this run's key and the service's public key (docs/reward_service.md). Required for
    a `tcp://` address."""
    timeout_s: PositiveFloat = 120.0
    """Seconds to wait for a score. Samples without a score count as failed."""
    max_failed_fraction: Fraction = DEFAULT_MAX_FAILED_FRACTION
    """Stop the run if more than this fraction of the samples fails in 3 consecutive RL steps."""
    shuffle: bool = False
    """Control experiment: shuffle the rewards of each RL step between its samples. The model should then not
    improve."""
    start_timeout_s: PositiveFloat = 120.0
    """Seconds to wait for the service to start, or for a running service to reply."""

    @model_validator(mode="after")
    def _check_service_keys(self) -> RewardRecipe:
        if self.spawn == (self.endpoint is not None):
            raise ValueError("set either spawn: true, or endpoint together with spawn: false")
        if self.keys is not None and self.endpoint is None:
            raise ValueError("keys is for a running service: set endpoint and spawn: false, or remove keys")
        if not self.spawn:  # a running service has its own settings
            for function in self.functions:
                function.require_defaults("workers", "max_batch", "device", unless="reward.spawn: true")
        names = [f.name for f in self.functions]
        if len(set(names)) != len(names):
            raise ValueError(f"each reward may be listed only once, got {names}")
        if all(f.weight == 0 for f in self.functions):
            raise ValueError("all weights are 0: give at least one reward a weight")
        return self


class CheckpointRecipe(Section):
    """Resumable checkpoints and exports of the weights (docs/checkpoints.md)."""

    every: NonNegativeInt = 0
    """Steps between checkpoints. A checkpoint is also written after the last step, and when SIGTERM or SIGINT stops the
    run. 0: write a checkpoint only when SIGTERM or SIGINT stops the run."""
    keep: PositiveInt = 2
    """Number of checkpoints to keep. Older ones are removed when a new one is complete and, with `storage`, copied."""
    export_every: NonNegativeInt = 0
    """Steps between exports to safetensors/ in diffusers format. 0: only at the end."""
    storage: StorageAddress | None = None
    """S3 folder `s3://bucket/folder`; each run needs its own. All files of `run.output_dir` are copied there during
    the run. A run that starts with an empty folder, for example on another machine, continues from the newest
    checkpoint there."""
    storage_timeout_s: PositiveFloat = 300.0
    """If the storage accepts no data for this many seconds at the end of the run, the run exits with code 1 and lists
    the missing files."""


class ExportRecipe(Section):
    """Upload of exports to the Hugging Face Hub, with a model card (docs/exports.md)."""

    push_to_hub: HubName | None = None
    """Repository `owner/name` to upload exports to. Uses the token in HF_TOKEN or of `hf auth login`. If an upload
    fails, a warning is logged with the command that repeats it."""
    private: bool = True
    """If the repository does not exist, create it as private."""
    every: Literal["last", "each"] = "last"
    """Which exports to upload. `last`: only the export that the run writes when it ends or is stopped. `each`: all
    exports, also those that the run writes every `checkpoint.export_every` steps. Each upload is one commit."""


class LoggingRecipe(Section):
    """Console output, trackers, sample images and the run page."""

    trackers: list[TrackerName] = Field(default=["tensorboard"])
    """Experiment trackers for metrics and samples (docs/metrics.md): `tensorboard`, `wandb`, `mlflow`, `trackio`,
    `swanlab`. All except `tensorboard` need optional packages. A tracker that fails is disabled with a warning."""
    tensorboard: bool = True
    """False: no TensorBoard files, even if `trackers` lists it."""
    project: Annotated[str, Field(min_length=1, max_length=100)] = "wfm_ds"
    """Project (wandb, trackio, swanlab) or experiment (mlflow) of the run."""
    run_name: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Name of the run in the trackers. Unset: the last component of `run.output_dir`."""
    wandb: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of wandb.init, such as entity, group, tags or mode."""
    mlflow: dict[str, Any] = Field(default_factory=dict)
    """Only `tracking_uri`, the address of MLflow. Unset: MLFLOW_TRACKING_URI; if it is unset too, an SQLite file in
    `run.output_dir`."""
    trackio: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of trackio.init, such as space_id."""
    swanlab: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of swanlab.init, such as workspace, group, tags or mode."""
    page: bool = True
    """Write the run page, index.html."""
    sample_every: NonNegativeInt = 0
    """Steps between sample images. 0: only with each evaluation."""
    num_samples: PositiveInt = 16
    """Number of sample images that are logged each time."""
    console: bool = True
    """Show a progress line in the console."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of a device in `model.dtype`, for perf/mfu. Unset: looked up by the device name; perf/mfu is omitted
    for unknown devices. On a CPU, perf/tflops_per_gpu of diffusion models needs this key."""

    @property
    def active_trackers(self) -> list[TrackerName]:
        return [name for name in self.trackers if name != "tensorboard" or self.tensorboard]

    @model_validator(mode="after")
    def _check_trackers(self) -> LoggingRecipe:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers: each may be listed only once, got {self.trackers}")
        for name in ("wandb", "mlflow", "trackio", "swanlab"):
            if getattr(self, name) and name not in self.trackers:
                raise ValueError(f"{name} needs the tracker {name}: add it to trackers, or remove the key")
        if unknown := sorted(self.mlflow.keys() - {"tracking_uri"}):
            raise ValueError(f"mlflow takes only tracking_uri, not {', '.join(unknown)}")
        return self
