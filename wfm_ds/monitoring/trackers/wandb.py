"""Weights & Biases. Without an API key and without WANDB_MODE it runs offline; the run's folder can be synced later."""

from __future__ import annotations

import logging
import netrc
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from wfm_ds.monitoring.pictures import reduced
from wfm_ds.monitoring.samples import ShownSample, sample_animation
from wfm_ds.monitoring.tracking import RunFacts
from wfm_ds.monitoring.videos import gif_bytes

log = logging.getLogger(__name__)

SERVICE = "https://api.wandb.ai"
STEP = "step"  # separate from wandb's own step, which cannot decrease: a resumed run repeats steps


class WeightsAndBiases:
    """Logs numbers over our step, samples with captions, and the recipe as config."""

    name = "wandb"

    def start(self, run: RunFacts) -> None:
        import wandb

        mode = None if os.environ.get("WANDB_MODE") or has_key() else "offline"
        settings = {"project": run.project, "name": run.name, "mode": mode, **run.options}
        self._wandb, self._folder = wandb, run.folder
        self._run: Any = wandb.init(
            **settings,
            id=run.remembered("wandb_id", lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.recipe),
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if self._run.settings.mode == "offline":
            log.info("wandb is offline; upload the run with: wandb sync %s", self._run.settings.sync_dir)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def samples(self, step: int, tag: str, samples: Sequence[ShownSample]) -> None:
        images = [self._wandb.Image(reduced(sample.frames[0]), caption=caption(sample)) for sample in samples]
        logged: dict[str, Any] = {tag: images}
        if any(sample.moves for sample in samples):
            path = self._folder / f"wandb_{step}.gif"
            path.write_bytes(gif_bytes(*sample_animation(samples)))
            logged[f"{tag}/video"] = self._wandb.Video(str(path), format="gif")
        self._run.log({**logged, STEP: step})

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        self._run.summary.update({**summary, "status": status})
        self._run.finish(exit_code=1 if status == "failed" else 0)


def has_key() -> bool:
    """Return whether there is an API key in one of wandb's places: WANDB_API_KEY, ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", SERVICE)).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def caption(sample: ShownSample) -> str:
    scores = "".join(f", {name} {'failed' if v is None else f'{v:.3g}'}" for name, v in sample.rewards.items())
    return f"{sample.prompt} (seed {sample.seed}{scores})"
