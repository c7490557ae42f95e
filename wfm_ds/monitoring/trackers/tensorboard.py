"""TensorBoard tracker: writes event files in the run's folder and needs no service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wfm_ds.monitoring.samples import GeneratedSample, sample_animation, sample_grid, sample_table
from wfm_ds.monitoring.tracking import RunInfo
from wfm_ds.monitoring.videos import encode_gif

FLUSH_S = 15
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

A chart is shown only if the recipe sets the key; "" means always. TensorBoard matches the regular expressions from the
start of a tag.
"""


def chart_layout(recipe: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Return the charts for a recipe, in the format of add_custom_scalars.

    recipe: {dotted key: value}.
    """
    pages = {
        page: {title: ["Multiline", tags] for title, (needs, tags) in titles.items() if not needs or recipe.get(needs)}
        for page, titles in CHART_LAYOUT.items()
    }
    return {page: titles for page, titles in pages.items() if titles}


class TensorBoard:
    """Logs numbers, a grid and a table of samples, and videos as GIFs.

    A tag gets a chart only when one of its values is not 0.
    """

    name = "tensorboard"

    def start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import, and only rank 0 needs it

        purge_step = None if run.resumed_at is None else run.resumed_at + 1
        self._writer: Any = SummaryWriter(
            str(run.output_dir / "tensorboard"), flush_secs=FLUSH_S, purge_step=purge_step
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
        """Log a grid with one row per prompt, and a table of prompts, seeds and rewards.

        For videos, the grid shows the first frames, and `<tag>/video` is an animation.
        """
        self._writer.add_image(tag, sample_grid(samples), step, dataformats="HWC")
        self._writer.add_text(tag, sample_table(samples), step)
        if any(sample.is_video for sample in samples):
            self._writer.file_writer.add_summary(animation_summary(f"{tag}/video", samples), step)
        self._writer.flush()

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        self._writer.close()


def scalars_summary(values: Mapping[str, float]) -> Any:
    """Return all numbers of a step as one summary. The file then has one record per step instead of one per tag."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def animation_summary(tag: str, samples: Sequence[GeneratedSample]) -> Any:
    """Return the samples as an image summary that contains an animated GIF.

    TensorBoard has no page for videos, but browsers play GIFs on its page for images.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    video, fps = sample_animation(samples)
    height, width = video.shape[1:3]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encode_gif(video, fps))
    return Summary(value=[Summary.Value(tag=tag, image=image)])
