"""The sections of a recipe but for data, sampling, algorithm, validation and logging, which have files of their own:
every key that a user may write, its type, default and meaning. The attribute docstrings are the documentation:
docs/recipes.md is generated from them.
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
    Fraction,
    HubName,
    PossiblePath,
    RewardName,
    Section,
    StorageAddress,
    UserClass,
    UserPath,
)
from wfm_ds.recipe.stated import AttentionName

BasePrecision = Literal["fp8", "fp8_twice", "int8", "nf4"]
Fp8Training = Literal["torchao", "transformer_engine"]


class RunRecipe(Section):
    """The folder that the run writes to, its length, and the seed that all randomness is derived from."""

    output_dir: UserPath
    """Folder on this machine for everything that the run writes. Created; must not hold a run of another recipe.
    checkpoint.storage copies it to S3."""
    steps: PositiveInt
    """Optimizer steps for SFT and DPO, RL steps for reinforcement learning."""
    seed: NonNegativeInt = 0
    """All randomness follows from (seed, step, sample id), never from the rank or the world size."""
    resume: Annotated[str, Field(min_length=1)] = "auto"
    """`auto` continues the run that output_dir or checkpoint.storage holds, from the newest checkpoint; `never` refuses
    a folder with a run; a path or s3:// address (checkpoints/step_N of another run) is where a run in a new folder
    begins."""


class ModelRecipe(Section):
    """The diffusers pipeline to train."""

    path: PossiblePath
    """A diffusers pipeline folder (vlm_sft: a model's, as transformers saves it); `owner/name` of one on the Hugging
    Face hub, which is fetched to the hub's cache (docs/models.md); or `tiny:FAMILY` for a random tiny one (made once,
    in the user's cache)."""
    revision: Annotated[str, Field(min_length=1)] | None = None
    """Branch, tag or commit of a pipeline of the hub. Unset: main. The run's own recipe.yaml has the commit, which a
    resumed run takes."""
    family: UserClass | None = None
    """Your own model family, `package.module:Class` (docs/models.md). Unset: the one that serves the pipeline's
    class."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of the denoiser. Latents, losses, optimizer and averages are float32 in any case."""
    base_precision: BasePrecision | None = None
    """What the linear layers of the blocks, which are frozen beside adapters, are kept in. `fp8`: float8 e4m3 with a
    scale for each row, and products in float8: half the memory, and less time on a GPU of compute capability 8.9 or
    newer. `fp8_twice`: the same predictions, with a second copy for a backward pass in float8, so no memory is saved.
    `int8`: half the memory too, a quarter of the error, any GPU, and products in dtype: no time is gained.
    `nf4`: a quarter of the memory, by the package bitsandbytes. Reference, old and trained policy compute with the same
    base, so equal policies stay equal to the bit. For LoRA runs. Unset: dtype."""
    fp8_training: Fp8Training | None = None
    """Train all weights with the products of the blocks' linear layers in float8, forward and backward, by this
    package, on a GPU of compute capability 8.9 or newer. Weights stay as they are and are cast in each forward.
    `torchao`: with a scale for each row; pays with `engine.compile` only. `transformer_engine`: with a scale for each
    tensor, so a sample's prediction depends on its batch: for `sft`, without `engine.compile`. For zero1 and zero2.
    Unset: in dtype."""
    vae_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the VAE's weights and of what it computes. `bfloat16` takes half the memory and less time, and latents
    and pictures are those of another rounding; `data.cache_latents` keeps the two apart."""
    denoiser_init: Literal["pretrained", "random"] = "pretrained"
    """`random` re-initialises the denoiser from `run.seed` and its config: training from scratch."""
    gradient_checkpointing: bool = False
    """Recompute block activations in the backward pass: less memory, about a third more time."""
    max_sequence_length: PositiveInt | None = None
    """Text tokens of the longest text encoder. Unset: the value stored with the pipeline (call.json), else the stock
    pipeline's default."""
    prompt_template: Literal["stock", "none"] | None = None
    """SANA: the instruction that its pipelines put before each prompt, but not before negative ones. `stock` keeps it,
    `none` drops it. Unset: as stored with the pipeline (call.json), else stock. Other families have none to choose."""
    embedded_guidance: PositiveFloat | None = None
    """FLUX.2-dev: the guidance scale that the network takes as an input, in training, rollouts and samples. It is no w:
    `sampling.guidance_scale` stays 1. Unset: as stored with the pipeline (call.json), else the stock pipeline's own.
    Other families have no such input."""
    attention: AttentionName = "auto"
    """The kernel of the denoiser's attention. `auto`: `cudnn` on a GPU of compute capability 9.0 (H100) or newer where
    dtype and model allow it, else `native`, torch's own choice. `flash` needs the package flash-attn, `flash3`
    FlashAttention-3, `sage` sageattention; these two have no backward pass, so they are for rollout workers and
    `generate` (docs/engine.md)."""
    guardrail: Literal["stock", "off"] = "stock"
    """The safety checker of a pipeline that comes with one (Cosmos): `stock` needs its package cosmos_guardrail and
    checks prompts and videos as the pipeline does; `off` runs without, which the model's licence may not allow."""


class LoraRecipe(Section):
    """Train low-rank adapters instead of all weights. Leave the section out for full fine-tuning."""

    rank: Annotated[PositiveInt, Field(le=65536)] = 32
    """Inner dimension of each adapter."""
    alpha: PositiveFloat = 64.0
    """The adapter's output is scaled by alpha / rank, with `rslora` by alpha / sqrt(rank)."""
    target_modules: list[str] | None = None
    """Suffixes of linear layers that get an adapter, with {} for the number of a block. Unset: the family's attention
    projections."""
    init: Literal["gaussian", "default"] = "gaussian"
    """Initialisation of A (B starts at zero): `gaussian`, or PEFT's `default` (Kaiming uniform)."""
    init_from: UserPath | None = None
    """A LoRA to go on from: a .safetensors file in the key layout of diffusers, PEFT, kohya or ComfyUI, or the folder
    of an export. Layers that it does not have start afresh; the reference of RL stays the base without any adapter."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that training forwards drop. Not for algorithms that compare log-probabilities."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), so that a higher rank does not shrink the update (rsLoRA)."""
    dora: bool = False
    """Train a magnitude for each output of an adapted layer besides (DoRA). For zero1 and zero2."""
    modules_to_save: list[str] = Field(default=[])
    """Suffixes of layers that train whole beside the adapters. For zero1 and zero2; the export has a file of their own
    for them."""

    def trained_layers(self, default_targets: Sequence[str]) -> list[str]:
        """List the suffixes of all layers that training changes."""
        return [*(self.target_modules or default_targets), *self.modules_to_save]

    @field_validator("target_modules")
    @classmethod
    def _some_targets(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not value:
            raise ValueError("an empty list would train nothing: name at least one layer, or leave the key out")
        return value


class EngineRecipe(Section):
    """Distribution of the denoiser over the ranks, and its batches."""

    deepspeed: str = "zero2"
    """A name in ds_configs/ (zero1, zero2, zero3, ...) or the path of a DeepSpeed JSON. It owns ZeRO settings only."""
    micro_batch_size: PositiveInt = 1
    """Training terms (SFT: samples; DPO: pairs of media; RL: pairs of sample and timestep) per forward and rank, or per
    forward and replica of `sequence_parallel` ranks."""
    gradient_accumulation: PositiveInt = 1
    """SFT, DPO: micro-batches per optimizer step. RL derives it: all terms of an update divided by micro_batch_size."""
    max_forward_batch: PositiveInt = 16
    """Samples per forward without gradient (rollout, validation, old and reference predictions)."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this global norm; 0 switches clipping off."""
    sequence_parallel: PositiveInt = 1
    """Neighbouring ranks that work on the same samples together, each on its share of the tokens: for videos whose
    activations one GPU cannot hold. Divides the ranks of a node."""
    compile: bool = False
    """Compile the denoiser's repeated blocks (torch.compile), in rollout workers too: faster forwards and backwards
    after a first step that takes minutes. For zero1 and zero2 (docs/engine.md)."""
    timeout_minutes: PositiveFloat = 30.0
    """A run of several ranks ends, and names the rank that the others wait for, when none has begun a forward, step or
    exchange, or got on with a scan, cache, export or rewards, for so long. Longer than it takes to load the model or to
    write a checkpoint, and than `reward.timeout_s` and `reward.start_timeout_s`."""
    deterministic: bool = False
    """Use deterministic kernels alone, in rollout workers too: slower, and two runs on GPUs of one kind have equal bits
    as on a CPU in any case (docs/checkpoints.md). An operation without such a kernel ends the run."""
    guard: bool = False
    """Before every forward, check that all ranks are about to do the same one. For debugging; costs one small
    all-reduce a forward."""


class OptimizerRecipe(Section):
    """AdamW and its learning-rate schedule, counted in optimizer steps."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit`: AdamW whose two moments have eight bits an element and a scale for each 256, by the package
    bitsandbytes: 6 bytes less for each trained weight, and updates that are a little off (docs/engine.md)."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 1e-4
    """Decoupled weight decay."""
    warmup_steps: NonNegativeInt = 0
    """Linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine fall to `final_lr_fraction` of lr at the last step."""
    final_lr_fraction: Fraction = 0.0
    """Where linear and cosine schedules end, as a share of lr."""


class EmaRecipe(Section):
    """An exponential moving average of the weights, used for validation, samples and export. Leave out for none."""

    decay: Decay = 0.999
    """Largest decay; early steps use min((1 + j) / (10 + j), decay)."""
    every: PositiveInt = 1
    """Optimizer steps between updates of the average."""


class RolloutRecipe(Section):
    """The number of samples that an RL step generates, and the processes that generate them."""

    mode: Literal["colocated", "async"] = "colocated"
    """`colocated`: the training ranks generate the samples themselves. `async`: other processes do, while the ranks
    train (docs/async.md)."""
    prompts_per_step: PositiveInt = 48
    """Prompts (groups) per RL step, over all ranks."""
    group_size: int = Field(24, ge=2)
    """Samples per prompt. An advantage compares siblings, so at least 2."""
    max_refills: Annotated[int, Field(ge=0, le=100)] = 0
    """Rounds of an RL step in which groups that teach nothing, because their rewards are all equal or missing, are
    replaced by groups about further prompts (DAPO's dynamic sampling, arXiv 2503.14476). A round generates as many
    groups as are missing; after the last one the step trains on what there is. For data.kind: prompts and colocated
    rollouts."""
    policy: Literal["current", "reference"] | None = None
    """ddrl: what generates the samples, the weights as they are or the reference policy. Unset: current. Other
    algorithms have a policy of their own for it."""
    trajectories: Literal["data", "shuffle", "library"] = "data"
    """What samples are told to do, where data.inputs has actions or a camera path: what their clip does, what another
    clip of the same step and `domain` does (`shuffle`), or a draw of trajectory_library (`library`). But for `data` the
    reward judges what no recording shows, so it must not compare with the clip."""
    trajectory_library: UserPath | None = None
    """trajectories: library: an .npy file of actions [N, num_frames - 1, width], as the data's before they are scaled.
    """
    merge_lora: bool = False
    """Add the LoRA into the weights while samples are generated: forwards without adapters, and a copy of the adapted
    layers' weights meanwhile. Only for algorithms that compare no log-probabilities; not for zero3, unless async."""
    base_precision: BasePrecision | None = None
    """async, LoRA: what the workers keep the base in, where training keeps it otherwise (model.base_precision). Samples
    then come from a policy a little away from the trained one: for algorithms that read no log-probability of a
    rollout. Unset: model.base_precision."""
    cuda_graph: bool = False
    """Launch the kernels of a rollout's forwards together, as a CUDA graph recorded once for each size of batch, which
    keeps the memory of a forward. Not for zero3 or sequence_parallel, unless async. A CPU runs forwards as ever."""
    max_staleness: NonNegativeInt = 1
    """async: how many publications of the policy, one per RL step, a sample may be behind the weights that train on it.
    0 is strictly on-policy: samples of a step are generated after the step before it."""
    spawn: Annotated[int, Field(ge=0, le=256)] = 1
    """async: workers that the trainer starts on its machine. 0: only those that join by themselves."""
    devices: Annotated[list[str], Field(min_length=1)] | None = None
    """async: devices of these workers in turn, such as cuda:6, counted among all GPUs that the run may use on the
    trainer's machine (docs/async.md). Unset: cpu; must be set where the trainer has GPUs."""
    bind: str = "ipc"
    """async: where workers that join find the trainer: `ipc` (this machine, this user) or a `tcp://` address of one
    interface, whose port and the next one are taken. One that other machines reach needs `keys`."""
    keys: UserPath | None = None
    """async, with a `tcp://` address: the folder of the trainer's key, hub.key_secret, and of the public ones of those
    who may join (docs/async.md). Every node needs it."""
    policy_folder: UserPath | None = None
    """async: where the policy is written for the workers after each step, in a folder of this run's own: below /dev/shm
    for workers of this machine, or on a file system that all share. Unset: in run.output_dir."""
    in_flight: Annotated[int, Field(ge=1, le=16)] = 2
    """async: chunks that a worker has in hand: one is denoised while the others wait for their scores."""
    lost_after_s: PositiveFloat = 30.0
    """async: a worker that is not heard of for this long is given up, and its chunks are given to others."""
    timeout_s: PositiveFloat = 600.0
    """async: a chunk without progress for this long is given to another worker; a run without any finished chunk for
    this long ends."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> RolloutRecipe:
        if (self.trajectories == "library") != (self.trajectory_library is not None):
            raise ValueError("trajectories: library and trajectory_library belong together: name both, or neither")
        if self.keys is not None and self.bind == "ipc":
            raise ValueError("keys are for a tcp:// address: set bind to one, or leave keys out")
        return self


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] >= bounds[1]:
        raise ValueError(f"the lower bound {bounds[0]} must be below the upper bound {bounds[1]}")
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_ordered)]


class RewardFunction(Section):
    """One weighted reward."""

    name: RewardName
    """A reward of wfm_reward, or `package.module:Class`."""
    weight: float = 1.0
    """Factor in the sum. 0: logged only, never blocks a sample."""
    clip: Bounds | None = None
    """Raw scores are clipped to this range before the weight."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the reward's constructor."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that compute it, when the trainer starts the service."""
    max_batch: Annotated[int, Field(ge=1, le=64)] = 16
    """Items that a worker scores at once, when the trainer starts the service."""


class RewardRecipe(Section):
    """The rewards, and the service that computes them: one started by the trainer, or one that runs already."""

    functions: list[RewardFunction] = Field(min_length=1)
    """The rewards, summed with their weights."""
    clip: Bounds | None = None
    """The weighted sum is clipped to this range. Unset: not at all."""
    scale: PositiveFloat = 1.0
    """Factor of the clipped sum."""
    spawn: bool = True
    """Start the reward service for this run. Must be false when `endpoint` is set."""
    endpoint: str | None = None
    """A running service: the path of its pipes.json, or an `ipc://` or `tcp://` address."""
    keys: UserPath | None = None
    """With `endpoint`: the folder of this run's key and of the service's public one (docs/rewards.md). A service on
    another machine needs them."""
    timeout_s: PositiveFloat = 120.0
    """A sample without a score after this long counts as failed."""
    max_failed_fraction: Fraction = 0.2
    """More failed samples than this in 3 consecutive RL steps stop the run."""
    shuffle: bool = False
    """Control experiment: every sample gets the reward of another one, drawn anew each step. Nothing may be learnt."""
    start_timeout_s: PositiveFloat = 120.0
    """How long the service may take to be ready, or a running one to answer."""

    @model_validator(mode="after")
    def _one_source(self) -> RewardRecipe:
        if self.spawn == (self.endpoint is not None):
            raise ValueError("set either spawn: true, or endpoint together with spawn: false")
        if self.keys is not None and self.endpoint is None:
            raise ValueError("keys are for a service of its own: set endpoint and spawn: false, or leave keys out")
        if not self.spawn:  # a service that runs already has settings of its own
            for function in self.functions:
                function.require_default("workers", "max_batch", unless="reward.spawn: true")
        names = [f.name for f in self.functions]
        if len(set(names)) != len(names):
            raise ValueError(f"each reward may be named once, got {names}")
        if all(f.weight == 0 for f in self.functions):
            raise ValueError("all weights are 0: at least one reward must count")
        return self


class CheckpointRecipe(Section):
    """Checkpoints to continue the run from, and exports of the weights (docs/checkpoints.md)."""

    every: NonNegativeInt = 0
    """Steps between resumable checkpoints; the last step gets one too. 0: only when the run is stopped by SIGTERM or
    SIGINT, which always saves."""
    keep: PositiveInt = 2
    """Checkpoints that stay; older ones are removed when a new one is complete (in storage, where that is set)."""
    export_every: NonNegativeInt = 0
    """Steps between exports to safetensors/ in diffusers' format; 0 only at the end."""
    storage: StorageAddress | None = None
    """An `s3://bucket/folder` address of this run alone. All that the run leaves in run.output_dir is copied there
    while it goes on; in an empty folder, on another machine, it continues from the newest checkpoint there."""
    storage_timeout_s: PositiveFloat = 300.0
    """At its end the run waits for its copies; if the storage takes nothing for so long, it ends with exit code 1 and
    says what is missing there."""


class ExportRecipe(Section):
    """Exports sent to the Hugging Face hub, with a card of the model (docs/exports.md)."""

    push_to_hub: HubName | None = None
    """The repository `owner/name` that gets the export, with the token of HF_TOKEN or `hf auth login`. What cannot be
    sent is a warning with the command that sends it later, never the end of the run."""
    private: bool = True
    """Make the repository private, where it is new."""
    every: Literal["last", "each"] = "last"
    """Send the export of the run's end alone, or each one (checkpoint.export_every), as a commit of its own."""
