"""Weights & Biases tracker.

Without an API key and without WANDB_MODE it runs offline, and the run's folder can be synced later.
"""

from __future__ import annotations

import logging
import netrc
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from wfm_ds.monitoring.images import reduce_image
from wfm_ds.monitoring.samples import GeneratedSample, sample_animation
from wfm_ds.monitoring.tracking import RunInfo
from wfm_ds.monitoring.videos import encode_gif

log = logging.getLogger(__name__)

SERVICE = "https://api.wandb.ai"
STEP_METRIC = "step"  # separate from wandb's own step, which cannot decrease: a resumed run repeats steps


class WeightsAndBiases:
    """Logs numbers under the step of the run, samples with captions, and the recipe as config."""

    name = "wandb"

    def start(self, run: RunInfo) -> None:
        import wandb

        mode = None if os.environ.get("WANDB_MODE") or has_key() else "offline"
        settings = {"project": run.project, "name": run.name, "mode": mode, **run.options}
        self._wandb, self._folder = wandb, run.folder
        self._run: Any = wandb.init(
            **settings,
            id=run.load_or_create("wandb_id", lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.recipe),
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric(STEP_METRIC, hidden=True)
        self._run.define_metric("*", step_metric=STEP_METRIC)
        if self._run.settings.mode == "offline":
            log.info("wandb is offline; upload the run with: wandb sync %s", self._run.settings.sync_dir)

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP_METRIC: step})

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        images = [
            self._wandb.Image(reduce_image(sample.frames[0]), caption=sample_caption(sample)) for sample in samples
        ]
        logged: dict[str, Any] = {tag: images}
        if any(sample.is_video for sample in samples):
            path = self._folder / f"wandb_{step}.gif"
            path.write_bytes(encode_gif(*sample_animation(samples)))
            logged[f"{tag}/video"] = self._wandb.Video(str(path), format="gif")
        self._run.log({**logged, STEP_METRIC: step})

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        self._run.summary.update({**summary, "status": status})
        self._run.finish(exit_code=1 if status == "failed" else 0)


def has_key() -> bool:
    """Return whether wandb finds an API key, in WANDB_API_KEY or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", SERVICE)).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def sample_caption(sample: GeneratedSample) -> str:
    scores = "".join(f", {name} {'failed' if v is None else f'{v:.3g}'}" for name, v in sample.rewards.items())
    return f"{sample.prompt} (seed {sample.seed}{scores})"
