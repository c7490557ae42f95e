"""The sections that show how a run goes: evaluation and logging. See recipe/sections.py on their docstrings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from wfm_ds.recipe.section import RewardName, Section, UserAddress, UserPath

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Judge(Section):
    """A reward that is asked at evaluations and never trained on."""

    name: RewardName
    """A reward of wfm_reward, or `package.module:Class`; one that is no `reward.functions`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to its constructor."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that compute it, when the trainer starts the service."""
    max_batch: Annotated[int, Field(ge=1, le=64)] = 16
    """Items that a worker scores at once, when the trainer starts the service."""


def _named(value: Any) -> Any:
    """A judge's name stands for the judge."""
    return {"name": value} if isinstance(value, str) else value


class ValidationRecipe(Section):
    """Evaluation at intervals, deterministic and equal for every step, run and world size. Uses EMA weights if any."""

    every: NonNegativeInt = 0
    """Steps between evaluations (SFT and DPO: optimizer steps, RL: RL steps); 0 only at the end."""
    at_start: bool = True
    """Evaluate before the first step too."""
    prompts: UserPath | None = None
    """A .txt or .jsonl prompt file for samples and rewards. Unset: the training prompts; where samples are given frames
    of the data, captioned media of `path`, else held out, else of the training data, whose first frames begin them."""
    num_prompts: PositiveInt = 16
    """Prompts used, from the top of the list. SFT and DPO without `judges` score no samples and draw
    logging.num_samples at most."""
    seeds: list[NonNegativeInt] = Field(default=[1000001], min_length=1)
    """Noise seeds; each prompt is sampled once with each."""
    rollout_correlation: bool = False
    """RL: sample the same prompts and seeds with the rollout's steps and solver too, and report the rank correlation of
    the rewards of both: whether rollouts of so few steps tell good samples from bad ones."""
    judges: list[Annotated[Judge, BeforeValidator(_named)]] = Field(default=[])
    """Held-out rewards (or their names) that score all samples of an evaluation and are never trained on. In RL they
    raise an alarm when the trained reward rises and they fall (docs/rewards.md); SFT and DPO log them. Asked at
    `reward.endpoint` if that is set, else computed by the service that the trainer starts."""
    path: UserAddress | None = None
    """Data of the kind of data.kind: SFT and DPO, for the validation loss; wherever samples are given frames, media
    that validation draws begin with. Unset: `holdout` of the training data, in RL the training data itself."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """SFT and DPO: share of the training data kept out of training, chosen by a hash of the sample id."""
    num_images: PositiveInt = 64
    """SFT and DPO: samples of the validation loss, the first of them by id; each is seen at eight noise levels."""


class LoggingRecipe(Section):
    """Output that shows how the run goes."""

    trackers: list[TrackerName] = Field(default=["tensorboard"])
    """Libraries that show scalars and samples while the run goes on (docs/metrics.md): `tensorboard`, `wandb`,
    `mlflow`, `trackio`. All but the first are extras. One that fails is dropped with a warning."""
    tensorboard: bool = True
    """False: without TensorBoard, whatever `trackers` says."""
    project: Annotated[str, Field(min_length=1, max_length=100)] = "wfm_ds"
    """The project or experiment of the run in wandb, mlflow and trackio."""
    run_name: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """The run's name there. Unset: the last part of run.output_dir."""
    wandb: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of wandb.init, such as entity, group, tags or mode."""
    mlflow: dict[str, Any] = Field(default_factory=dict)
    """`tracking_uri`. Unset: MLFLOW_TRACKING_URI, else a SQLite file in run.output_dir."""
    trackio: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of trackio.init, such as space_id."""
    page: bool = True
    """Write index.html, the page of the run."""
    sample_every: NonNegativeInt = 0
    """Steps between sample images; 0 only with each evaluation."""
    num_samples: PositiveInt = 16
    """Images written each time."""
    console: bool = True
    """A progress line in the console."""
    peak_tflops: PositiveFloat | None = None
    """TFLOP/s that a device can reach in model.dtype, for perf/mfu. Unset: known by the device's name; without either
    there is no perf/mfu."""

    @property
    def shown_by(self) -> list[TrackerName]:
        """The trackers in use."""
        return [name for name in self.trackers if name != "tensorboard" or self.tensorboard]

    @model_validator(mode="after")
    def _trackers_are_used(self) -> LoggingRecipe:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers: each may be named once, got {self.trackers}")
        for name in ("wandb", "mlflow", "trackio"):
            if getattr(self, name) and name not in self.trackers:
                raise ValueError(f"{name} is for the tracker of that name: add it to trackers, or remove the key")
        if unknown := sorted(self.mlflow.keys() - {"tracking_uri"}):
            raise ValueError(f"mlflow takes tracking_uri, not {', '.join(unknown)}")
        return self
