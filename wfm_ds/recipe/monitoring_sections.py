"""Schema of the recipe sections `validation` and `logging`. docs/recipes.md is generated from the docstrings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from wfm_ds.recipe.data import EpisodeSlice
from wfm_ds.recipe.section import Section, Seed, UserAddress, UserPath
from wfm_ds.recipe.sections import HeldOutReward

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"]


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
