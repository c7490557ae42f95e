"""TensorBoard: event files in the run's folder, which need no service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wfm_ds.monitoring.samples import ShownSample, sample_animation, sample_grid, sample_table
from wfm_ds.monitoring.tracking import RunFacts
from wfm_ds.monitoring.videos import gif_bytes

FLUSH_S = 15
RL, JUDGES = "reward.functions", "validation.judges"
LAYOUT: Mapping[str, Mapping[str, tuple[str, list[str]]]] = {
    "1 outcome": {
        "evaluation": (RL, ["val/reward/.+/mean"]),
        "reward while training": (RL, ["reward/.+/mean"]),
        "loss": ("", ["((val|sft|dpo|vlm)/)?loss(/total)?$"]),
    },
    "2 judges": {
        "held-out judges": (JUDGES, ["val/judge/.+/mean"]),
        "change since the start": (JUDGES, ["val/judge/.+/change"]),
    },
    "3 policy": {
        "ratio": (RL, ["policy/ratio_.+"]),
        "clipped": (RL, ["policy/clip_fraction_.+"]),
        "KL": (RL, ["kl/.+"]),
    },
    "4 optimizer": {"gradient norm": ("", ["optim/grad_norm"]), "learning rate": ("", ["optim/lr"])},
    "5 time": {"seconds": ("", ["time/.+"]), "throughput": ("", ["perf/samples_per_second", "perf/tflops_per_gpu"])},
}
"""Charts of the tab CUSTOM SCALARS: by page and title, the key of a recipe that has one ("" for all), and the tags in
it as regular expressions, which TensorBoard matches from a tag's first character."""


def charts(recipe: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """The charts of a recipe by dotted key, as add_custom_scalars takes them."""
    pages = {
        page: {title: ["Multiline", tags] for title, (needs, tags) in of.items() if not needs or recipe.get(needs)}
        for page, of in LAYOUT.items()
    }
    return {page: of for page, of in pages.items() if of}


class TensorBoard:
    """Numbers, a grid and a table of samples, videos as GIFs. A tag has no chart as long as it is 0."""

    name = "tensorboard"

    def start(self, run: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, and only rank 0 needs it

        purge_step = None if run.resumed_at is None else run.resumed_at + 1
        self._writer: Any = SummaryWriter(
            str(run.output_dir / "tensorboard"), flush_secs=FLUSH_S, purge_step=purge_step
        )
        self._writer.add_custom_scalars(charts(run.recipe))
        self._zeros: dict[str, int] = {}  # tags that were 0 throughout, and the last step of it
        self._shown: set[str] = set()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            if value == 0 and tag not in self._shown:
                self._zeros[tag] = step
            elif tag not in self._shown:
                self._shown.add(tag)
                if tag in self._zeros:  # the chart begins where the 0 ends
                    self._writer.file_writer.add_summary(scalars_summary({tag: 0.0}), self._zeros.pop(tag))
        shown = {tag: value for tag, value in values.items() if tag in self._shown}
        self._writer.file_writer.add_summary(scalars_summary(shown), step)

    def samples(self, step: int, tag: str, samples: Sequence[ShownSample]) -> None:
        """A grid, a row per prompt, and a table of prompts, seeds and rewards. Of videos the grid has the first frames,
        and `<tag>/video` plays them."""
        self._writer.add_image(tag, sample_grid(samples), step, dataformats="HWC")
        self._writer.add_text(tag, sample_table(samples), step)
        if any(sample.moves for sample in samples):
            self._writer.file_writer.add_summary(animation_summary(f"{tag}/video", samples), step)
        self._writer.flush()

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        self._writer.close()


def scalars_summary(values: Mapping[str, float]) -> Any:
    """All numbers of a step as one summary: one record to write instead of one for each tag."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def animation_summary(tag: str, samples: Sequence[ShownSample]) -> Any:
    """The samples in motion as an image summary: a browser plays a GIF there, TensorBoard has no page for videos."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    video, fps = sample_animation(samples)
    height, width = video.shape[1:3]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif_bytes(video, fps))
    return Summary(value=[Summary.Value(tag=tag, image=image)])
