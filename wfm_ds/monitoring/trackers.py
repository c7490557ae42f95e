"""Experiment trackers by name.

tensorboard: event files in the run's folder, without a service.
wandb: Weights & Biases. If neither an API key nor WANDB_MODE is set, it stores the run locally for a later upload.
mlflow: logs to MLFLOW_TRACKING_URI if that is set, otherwise to a SQLite file in the run's folder.
trackio: a SQLite file, by default in the run's folder. View it with `TRACKIO_DIR=... trackio show`.
swanlab: SwanLab. If neither an API key nor SWANLAB_MODE is set, it stores the run locally for a later upload.
"""

from __future__ import annotations

import contextlib
import io
import logging
import netrc
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from wfm_ds.chunks import split_into_chunks
from wfm_ds.monitoring.media_files import encode_gif, reduce_image
from wfm_ds.monitoring.samples import GeneratedSample, format_reward, sample_animation, sample_grid, sample_table
from wfm_ds.monitoring.tracking import (
    MLFLOW_ID,
    SWANLAB_ID,
    TRACKIO_ID,
    WANDB_ID,
    RunInfo,
    Tracker,
    TrackerError,
    TrackerThread,
)
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import flatten_keys

log = logging.getLogger(__name__)

MLFLOW_MAX_PARAMS, MLFLOW_MAX_CHARACTERS = 100, 6000  # parameters per call; characters per parameter value
MLFLOW_STATUSES = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}
SWANLAB_STATES = {"finished": "success", "preempted": "aborted", "failed": "crashed"}
TRACKIO_VARIABLE = "TRACKIO_DIR"  # folder of its files; read by trackio at import
WANDB_SERVICE = "https://api.wandb.ai"
WANDB_STEP = "step"  # our x axis: a resumed run repeats steps, and wandb's own step cannot decrease
TENSORBOARD_FLUSH_S = 15
RL_KEY, HELD_OUT_KEY = "reward.functions", "validation.held_out_rewards"
CHART_LAYOUT: Mapping[str, Mapping[str, tuple[str, list[str]]]] = {
    "1 outcome": {
        "evaluation": (RL_KEY, ["val/reward/.+/mean"]),
        "reward while training": (RL_KEY, ["reward/.+/mean"]),
        "loss": ("", ["((val|sft|dpo|vlm)/)?loss(/total)?$"]),
    },
    "2 held-out rewards": {
        "held-out rewards": (HELD_OUT_KEY, ["val/held_out/.+/mean"]),
        "change since the start": (HELD_OUT_KEY, ["val/held_out/.+/change"]),
    },
    "3 policy": {
        "ratio": (RL_KEY, ["policy/ratio_.+"]),
        "clipped": (RL_KEY, ["policy/clip_fraction_.+"]),
        "KL": (RL_KEY, ["kl/.+"]),
    },
    "4 optimizer": {"gradient norm": ("", ["optim/grad_norm"]), "learning rate": ("", ["optim/lr"])},
    "5 time": {"seconds": ("", ["time/.+"]), "throughput": ("", ["perf/samples_per_second", "perf/tflops_per_gpu"])},
}
"""Charts of TensorBoard's CUSTOM SCALARS tab as {page: {title: (recipe key, tag patterns)}}.

A chart is shown only if the recipe sets the key; "" means always. TensorBoard matches the patterns from the start of a
tag.
"""


def chart_layout(recipe: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    pages = {
        page: {title: ["Multiline", tags] for title, (needs, tags) in titles.items() if not needs or recipe.get(needs)}
        for page, titles in CHART_LAYOUT.items()
    }
    return {page: titles for page, titles in pages.items() if titles}


class TensorBoard:
    """Logs numbers, a grid and a table of samples, and videos as GIFs."""

    name = "tensorboard"

    def start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import, and only rank 0 needs it

        purge_step = None if run.resumed_at is None else run.resumed_at + 1
        self._writer: Any = SummaryWriter(
            str(run.output_dir / "tensorboard"), flush_secs=TENSORBOARD_FLUSH_S, purge_step=purge_step
        )
        self._writer.add_custom_scalars(chart_layout(run.recipe))
        self._zeros: dict[str, int] = {}  # tags with only zeros so far, and their last step
        self._shown: set[str] = set()

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            if value == 0 and tag not in self._shown:
                self._zeros[tag] = step
            elif tag not in self._shown:
                self._shown.add(tag)
                if tag in self._zeros:  # start the chart at the last 0
                    self._writer.file_writer.add_summary(scalars_summary({tag: 0.0}), self._zeros.pop(tag))
        shown_values = {tag: value for tag, value in values.items() if tag in self._shown}
        self._writer.file_writer.add_summary(scalars_summary(shown_values), step)

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        """Log a grid with one row per prompt, a table of samples, and for videos the animation `<tag>/video`."""
        self._writer.add_image(tag, sample_grid(samples), step, dataformats="HWC")
        self._writer.add_text(tag, sample_table(samples), step)
        if any(sample.is_video for sample in samples):
            self._writer.file_writer.add_summary(animation_summary(f"{tag}/video", samples), step)
        self._writer.flush()

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        self._writer.close()


def scalars_summary(values: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def animation_summary(tag: str, samples: Sequence[GeneratedSample]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    video, fps = sample_animation(samples)
    height, width = video.shape[1:3]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encode_gif(video, fps))
    return Summary(value=[Summary.Value(tag=tag, image=image)])


class WeightsAndBiases:
    """Logs numbers under the step of the run, samples with captions, and the recipe as config."""

    name = "wandb"

    def start(self, run: RunInfo) -> None:
        import wandb

        mode = None if os.environ.get("WANDB_MODE") or has_wandb_key() else "offline"
        settings = {"project": run.project, "name": run.name, "mode": mode, **run.options}
        self._wandb, self._folder = wandb, run.folder
        self._run: Any = wandb.init(
            **settings,
            id=run.load_or_create(WANDB_ID, lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.recipe),
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric(WANDB_STEP, hidden=True)
        self._run.define_metric("*", step_metric=WANDB_STEP)
        if self._run.settings.mode == "offline":
            log.info("wandb is offline; upload the run with: wandb sync %s", self._run.settings.sync_dir)

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, WANDB_STEP: step})

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        logged: dict[str, Any] = {tag: caption_images(self._wandb.Image, samples)}
        if any(sample.is_video for sample in samples):
            path = self._folder / f"wandb_{step}.gif"
            path.write_bytes(encode_gif(*sample_animation(samples)))
            logged[f"{tag}/video"] = self._wandb.Video(str(path), format="gif")
        self._run.log({**logged, WANDB_STEP: step})

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        self._run.summary.update({**summary, "status": status})
        self._run.finish(exit_code=1 if status == "failed" else 0)


def has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB_SERVICE)).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def caption_images(image_class: Callable[..., Any], samples: Sequence[GeneratedSample]) -> list[Any]:
    """Return the first frame of each sample with a caption. image_class: image class of a tracker's library."""
    return [image_class(reduce_image(sample.frames[0]), caption=sample_caption(sample)) for sample in samples]


def sample_caption(sample: GeneratedSample) -> str:
    scores = "".join(f", {name} {format_reward(value)}" for name, value in sample.rewards.items())
    return f"{sample.prompt} (seed {sample.seed}{scores})"


class MLflow:
    """Logs numbers as metrics, sample grids and tables as artifacts, and the recipe as parameters and a file."""

    name = "mlflow"

    def start(self, run: RunInfo) -> None:
        from mlflow import MlflowClient

        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)  # they log the creation of tables
        database = run.folder.absolute() / "mlflow.db"
        local_uri = f"sqlite:///{database}"
        uri = run.options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or local_uri
        if uri == local_uri and not database.is_file():
            run.forget(MLFLOW_ID)  # the run was resumed on another machine, to which the database is not copied
        self._client: Any = MlflowClient(uri)
        self._id = run.load_or_create(MLFLOW_ID, lambda: self._create_run(run, is_here=uri.startswith("sqlite")))
        self._client.update_run(self._id, status="RUNNING")

    def _create_run(self, run: RunInfo, *, is_here: bool) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(run.project)
        artifacts = (run.folder / "mlflow").absolute().as_uri() if is_here else None
        experiment = found.experiment_id if found else self._client.create_experiment(run.project, artifacts)
        run_id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        values = [Param(key, str(value)[:MLFLOW_MAX_CHARACTERS]) for key, value in run.recipe.items()]
        for part in split_into_chunks(values, MLFLOW_MAX_PARAMS):
            self._client.log_batch(run_id, params=list(part))
        recipe = run.output_dir / "recipe.yaml"
        if recipe.is_file():
            self._client.log_artifact(run_id, str(recipe))
        return run_id

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(tag, value, now_ms, step) for tag, value in values.items()])

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        name = f"{tag}/step_{step:06d}"
        self._client.log_image(self._id, reduce_image(sample_grid(samples), 2048), artifact_file=f"{name}.png")
        self._client.log_text(self._id, sample_table(samples), f"{name}.md")

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        self._client.set_terminated(self._id, MLFLOW_STATUSES[status])


class Trackio:
    """Logs numbers as metrics, the sample grid as an image, and the recipe as config."""

    name = "trackio"

    def start(self, run: RunInfo) -> None:
        os.environ.setdefault(TRACKIO_VARIABLE, str((run.folder / "trackio").absolute()))
        with contextlib.redirect_stdout(io.StringIO()):  # it prints instructions for its dashboard
            import trackio

            name = run.load_or_create(TRACKIO_ID, lambda: f"{run.name}-{uuid.uuid4().hex[:6]}")
            settings = {"project": run.project, "name": name, "config": dict(run.recipe), "resume": "allow"}
            self._trackio, self._run = trackio, trackio.init(**settings | dict(run.options))
        log.info("trackio: open the run with %s=%s trackio show", TRACKIO_VARIABLE, os.environ[TRACKIO_VARIABLE])

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        grid: Any = self._trackio.Image(reduce_image(sample_grid(samples), 2048), caption=samples[0].prompt)
        self._run.log({tag: grid}, step=step)

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


class SwanLab:
    """Logs numbers as metrics, samples with captions, and the recipe as config."""

    name = "swanlab"

    def start(self, run: RunInfo) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a greeting
            import swanlab

            # Do not ask for a key, and do not copy the output of the process.
            settings = swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"))
            mode = None if os.environ.get("SWANLAB_MODE") or settings.api_key else "offline"
            self._swanlab = swanlab
            self._run: Any = swanlab.init(
                **{"project": run.project, "name": run.name, "mode": mode, **run.options},
                id=run.load_or_create(SWANLAB_ID, lambda: uuid.uuid4().hex[:12]),
                resume="allow",
                log_dir=str(run.folder / "swanlab"),
                config=dict(run.recipe),
                settings=settings,
            )
        if self._run.mode == "offline":
            command = f"swanlab sync --id {self._run.id} {self._run.dir}"
            log.info("swanlab is offline; upload the run with: %s", command)

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        logged: dict[str, Any] = {tag: caption_images(self._swanlab.Image, samples)}
        if any(sample.is_video for sample in samples):
            logged[f"{tag}/video"] = self._swanlab.Video(encode_gif(*sample_animation(samples)))
        self._run.log(logged, step=step)

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish(SWANLAB_STATES[status], "the run failed" if status == "failed" else None)


TRACKERS: dict[str, type[Tracker]] = {
    tracker.name: tracker for tracker in (TensorBoard, WeightsAndBiases, MLflow, Trackio, SwanLab)
}


def require_trackers(recipe: Recipe) -> None:
    for name in recipe.logging.active_trackers:
        if find_spec(name) is None:
            raise TrackerError(f"logging.trackers: {name} is not installed: pip install 'wfm_ds[{name}]', or remove it")


def open_trackers(recipe: Recipe, resumed_at: int | None) -> list[TrackerThread]:
    """Start the recipe's trackers. If one of them cannot be started, close the others and raise TrackerError."""
    started: list[TrackerThread] = []
    settings = recipe.logging
    require_trackers(recipe)
    try:
        for name in settings.active_trackers:
            facts = RunInfo(
                output_dir=recipe.run.output_dir,
                name=settings.run_name or recipe.run.output_dir.resolve().name,
                project=settings.project,
                recipe=flatten_keys(recipe.model_dump(mode="json", exclude_none=True)),
                resumed_at=resumed_at,
                options={} if name == "tensorboard" else getattr(settings, name),
            )
            started.append(TrackerThread(TRACKERS[name](), facts))
    except TrackerError:
        for subscriber in started:
            subscriber.close("failed", {})
        raise
    return started
