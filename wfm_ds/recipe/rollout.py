"""Schema of the recipe sections `rollout` and `validation`. docs/recipes.md is generated from the docstrings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from wfm_ds.recipe.data import EpisodeSlice
from wfm_ds.recipe.section import Section, Seed, UserAddress, UserPath
from wfm_ds.recipe.sections import BasePrecision, HeldOutReward

MAX_CHUNK = 32  # samples that a worker generates as one task: their scores fit into the header of one message


class HistoryRecipe(Section):
    """Clips that the rollout policy generates before the samples of a group."""

    clips: Annotated[int, Field(ge=0, le=64)] = 0
    """Maximum number of clips before the samples. For each group, the number of clips is drawn uniformly from 0 to this
    maximum. Each clip continues the last frames of the clip before it, with the next actions or camera poses of the
    trajectory, so videos in `data` must be long enough for one more clip. Only the samples are trained on. 0: samples
    continue recorded frames."""


class RolloutRecipe(Section):
    """RL: the samples generated per step, and the processes that generate them. If the description of a key starts with
    `async`, the key is only for `mode: async`."""

    mode: Literal["colocated", "async"] = "colocated"
    """`colocated`: the training ranks generate the samples. `async`: separate worker processes generate them while the
    ranks train (docs/async.md)."""
    prompts_per_step: PositiveInt = 48
    """Prompts (groups) per RL step, over all ranks."""
    group_size: PositiveInt = 24
    """Samples per prompt. Advantages compare the samples of the same prompt, so algorithms with rewards need at least
    2."""
    max_refills: Annotated[int, Field(ge=0, le=100)] = 0
    """Maximum number of rounds per RL step that replace groups with equal or missing rewards by groups of other prompts
    (dynamic sampling of DAPO, arXiv 2503.14476). Needs `data.kind: prompts` and colocated rollouts."""
    policy: Literal["current", "reference"] | None = None
    """ddrl only: the policy that generates the samples. Unset: `current`. The other algorithms define their own rollout
    policy."""
    trajectories: Literal["data", "shuffle", "library"] = "data"
    """Actions or camera paths that condition the samples, if `data.inputs` contains any. `data`: the trajectory of the
    sample's own clip. `shuffle`: the trajectory of another clip of the same step and `domain`. `library`: a random
    trajectory from `trajectory_library`. With `shuffle` and `library`, rewards must not compare samples with the
    recorded clip, because it shows a different trajectory."""
    trajectory_library: UserPath | None = None
    """With `trajectories: library`: .npy file [number of trajectories, num_frames - 1, numbers per action] with actions
    that are not normalized. With `history`, a trajectory must have the actions of all clips."""
    history: HistoryRecipe = HistoryRecipe()
    """Let samples continue the policy's own clips instead of recorded frames, as in a long video that is generated clip
    by clip (docs/long_videos.md)."""
    merge_lora: bool = False
    """Merge the LoRA into the weights while samples are generated: faster forward passes, but a copy of the adapted
    layers' weights takes extra memory. Cannot be used with algorithms that compare log-probabilities, or with zero3 and
    colocated rollouts."""
    base_precision: BasePrecision | None = None
    """async with LoRA: storage format of the base model in the workers, with the values of `model.base_precision`. If
    it differs from the trainer's format, the rollout policy differs slightly from the trained policy. Only for
    algorithms that do not use rollout log-probabilities. Unset: `model.base_precision`."""
    cuda_graph: bool = False
    """Record rollout forward passes as CUDA graphs, one per batch size and text length, and keep the last 32 of them.
    With colocated rollouts, it cannot be used with zero3 or `engine.sequence_parallel`. Qwen-Image and Qwen-Image-Edit
    do not support it. No effect on CPUs."""
    max_staleness: NonNegativeInt = 1
    """async: maximum age of a sample in RL steps when it is trained on. The policy is published to the workers after
    each RL step. 0: strictly on-policy; the samples of a step are generated after the previous step."""
    spawn: Annotated[int, Field(ge=0, le=256)] = 1
    """async: number of workers that rank 0 starts on its machine. 0: none; you start all workers yourself."""
    devices: Annotated[list[str], Field(min_length=1)] | None = None
    """async: devices of the spawned workers in order, such as `cuda:6`. Numbers count all GPUs available to the run on
    the trainer's machine (docs/async.md). Required if the trainer uses GPUs. Unset: cpu."""
    bind: str = "ipc"
    """async: address at which workers reach the trainer. `ipc`: only this machine and user. A `tcp://` address of one
    network interface: uses this port and the next one; needs `keys`."""
    keys: UserPath | None = None
    """async with a `tcp://` address: folder with the trainer's secret key (hub.key_secret) and the public keys of the
    workers (docs/async.md). Needed on every node."""
    policy_folder: UserPath | None = None
    """async: folder to publish the policy to after each step; each run uses its own subfolder. Use /dev/shm for workers
    on this machine, or a shared file system. Unset: inside `run.output_dir`."""
    in_flight: Annotated[int, Field(ge=1, le=16)] = 2
    """async: number of chunks that a worker processes at the same time. A chunk is a batch of samples of one group.
    While the worker denoises one chunk, its other chunks wait for their scores."""
    worker_timeout_s: PositiveFloat = 30.0
    """async: a worker without a heartbeat for this many seconds is considered lost, and other workers generate its
    samples."""
    timeout_s: PositiveFloat = 600.0
    """async: a chunk (see `in_flight`) without progress for timeout_s + reward.timeout_s seconds goes to another worker
    (later with in_flight above 2, docs/async.md). The run ends if no chunk finishes for `timeout_s` seconds."""

    @model_validator(mode="after")
    def _check_unused_keys(self) -> RolloutRecipe:
        if (self.trajectories == "library") != (self.trajectory_library is not None):
            raise ValueError("trajectories: library and trajectory_library belong together: set both, or neither")
        if self.keys is not None and self.bind == "ipc":
            raise ValueError("keys needs a tcp:// address: set bind to one, or remove keys")
        return self


def _expand_reward_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class ValidationRecipe(Section):
    """Periodic evaluation with the same prompts and seeds in every step and run, and with any number of ranks.
    Evaluations use the EMA weights if the recipe has a section `ema`."""

    every: NonNegativeInt = 0
    """Steps between evaluations (optimizer steps for SFT and DPO, RL steps for RL). 0: only at the end and, with
    `at_start`, at the start."""
    at_start: bool = True
    """Also evaluate before the first step."""
    prompts: UserPath | None = None
    """.txt or .jsonl file with prompts for samples and rewards. Unset: the training prompts. For samples conditioned on
    frames: captions and first frames from `path`; if it is unset, from the held-out data; if there is none, from the
    training data."""
    num_prompts: PositiveInt = 16
    """Number of prompts, from the start of the list. SFT and DPO without `held_out_rewards` generate at most
    `logging.num_samples` samples."""
    seeds: list[Seed] = Field(default=[1000001], min_length=1)
    """Noise seeds. Each prompt is sampled once per seed."""
    clips: Annotated[int, Field(ge=1, le=99)] = 1
    """Number of clips per sample, for samples conditioned on frames. Each clip has `sampling.num_frames` frames and
    continues the last frames of the clip before it, with the next actions or camera poses. Scores are reported for each
    clip, together with the similarity to the recorded video (docs/long_videos.md). Videos in the data that are too
    short for all clips are skipped."""
    rollout_correlation: bool = False
    """RL: also sample the same prompts and seeds with the rollout's steps and solver, and report the rank correlation
    of the two rewards (docs/choosing.md)."""
    held_out_rewards: list[
        Annotated[HeldOutReward, BeforeValidator(_expand_reward_name, json_schema_input_type=str | HeldOutReward)]
    ] = Field(default=[])
    """Rewards (or their names) that score all evaluation samples and are never trained on. RL raises an alarm if the
    trained reward rises while these fall (docs/rewards.md); SFT and DPO only log them. Held-out rewards are computed by
    the service at `reward.endpoint` if that is set, else by the trainer's service."""
    path: UserAddress | None = None
    """Validation data in the format of `data.kind` (for `kind: sets`: a folder or LeRobot datasets), for the validation
    loss (SFT, DPO) and for samples conditioned on frames. Unset: the `holdout` fraction of the training data; in RL,
    the training data."""
    episodes: EpisodeSlice | None = None
    """Episodes of `data.kind: lerobot` to validate on instead of the `holdout` fraction, by their order: `-500:` for
    the last 500. They are not trained on."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """SFT and DPO: fraction of the training data held out for validation, selected by a hash of the sample id (lerobot:
    of the episode)."""
    num_images: PositiveInt = 64
    """SFT and DPO: number of samples for the validation loss, each at eight noise levels. The samples are ordered by
    id, and the first ones are used."""
