"""Output for people: metrics.jsonl, TensorBoard, a progress line, samples. Which metrics exist is not its business."""

from __future__ import annotations

import datetime
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wfm_ds.errors import UserError
from wfm_ds.monitoring.progress import ConsoleProgress, LineProgress, Pace, open_console
from wfm_ds.monitoring.samples import ShownSample, by_prompt, sample_animation, sample_grid, sample_table
from wfm_ds.monitoring.videos import gif_bytes
from wfm_ds.storage import atomic
from wfm_ds.storage.atomic import finite_or_none

log = logging.getLogger(__name__)

TENSORBOARD_FLUSH_S = 15


class Monitor:
    """Rank 0 writes; on the other ranks every method does nothing. Close it, or use it as a context manager."""

    def __init__(
        self,
        output_dir: Path,
        *,
        is_main: bool,
        tensorboard: bool,
        console: bool,
        total_steps: int,
        unit: str = "images",
        resumed_at: int | None = None,
    ) -> None:
        """Continue `output_dir/metrics.jsonl` and, if asked, write `output_dir/tensorboard/`.

        `resumed_at`: the last step that counts of those written there before, in `scalars`' steps: TensorBoard drops
        what an earlier run showed of later ones (metrics.jsonl is the caller's to cut).
        With `console` and a terminal there is a live progress line; otherwise progress is logged now and then.
        `unit` is what `progress` counts. Raises OSError if the folder cannot be written.
        """
        self._open = is_main
        if not is_main:
            return
        self._folder = output_dir
        output_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = (output_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._writer = _open_tensorboard(output_dir / "tensorboard", resumed_at) if tensorboard else None
        self._pace = Pace(total_steps, unit)
        screen = open_console() if console else None
        self._progress = LineProgress(total_steps) if screen is None else ConsoleProgress(screen, total_steps)
        self._warned: set[str] = set()
        self._last: list[str] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One line `{"step", "time", tags...}` in metrics.jsonl, at once on disk, and a point per tag in TensorBoard.

        A value that is not finite becomes null in the file and no point, with one warning per tag. Raises ValueError
        if a tag is named like one of the line's own keys, UserError if the disk does not take it.
        """
        if not self._open:
            return
        clash = values.keys() & {"step", "time"}
        if clash:
            raise ValueError(f"{sorted(clash)} cannot be metrics: each line has keys of these names")
        finite = {tag: finite_or_none(value) for tag, value in values.items()}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        with self._writing():
            self._metrics.write(json.dumps({"step": step, "time": now, **finite}, allow_nan=False) + "\n")
            self._metrics.flush()
            if self._writer is not None:
                self._writer.file_writer.add_summary(scalars_summary(finite), step)
        for tag in (tag for tag, value in finite.items() if value is None):
            self._warn_not_finite(step, tag, values[tag])

    def samples(self, step: int, tag: str, samples: Sequence[ShownSample]) -> None:
        """Show samples in TensorBoard: a grid, a row per prompt, and a table of prompts, seeds and rewards. Of videos
        the grid has the first frames, and `<tag>/video` plays them. Raises UserError if the disk does not take them."""
        if not self._open or self._writer is None or not samples:
            return
        siblings = by_prompt(samples)
        with self._writing():
            self._writer.add_image(tag, sample_grid(siblings), step, dataformats="HWC")
            self._writer.add_text(tag, sample_table(siblings), step)
            if any(sample.moves for sample in siblings):
                self._writer.file_writer.add_summary(animation_summary(f"{tag}/video", siblings), step)
            self._writer.flush()

    def progress(self, step: int, *, samples: int, note: str = "") -> None:
        """`step` is done, with `samples` more than at the last call; the first call, at the start, sets the clock."""
        if not self._open:
            return
        now_s = time.monotonic()
        self._pace.update(now_s, step, samples)
        self._progress.show(now_s, step, self._pace.text(step, note))

    def sync(self) -> int:
        """Put all metrics on disk; returns the bytes of metrics.jsonl (0 on the other ranks). Raises OSError."""
        if not self._open:
            return 0
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        return os.fstat(self._metrics.fileno()).st_size

    def message(self, text: str) -> None:
        """A line for people: in the log, and above the progress line if there is one."""
        if self._open:
            log.info("%s", text)

    def last_message(self, text: str) -> None:
        """Lines for people to copy: logged when the monitor is closed. A live progress line would wrap them."""
        if self._open:
            self._last.append(text)

    def close(self) -> None:
        """Show the last progress and the last messages, and close all files; the second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._progress.close()
        for text in self._last:
            log.info("%s", text)
        for file in (self._metrics, self._writer):
            with suppress(OSError):  # what a full disk did not take was said when it was written
                if file is not None:
                    file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"run.output_dir {self._folder} takes no more metrics ({error.strerror}): make room, then start the "
                "same command again; it continues from the newest checkpoint"
            ) from error

    def _warn_not_finite(self, step: int, tag: str, value: float) -> None:
        if tag not in self._warned:
            self._warned.add(tag)
            log.warning("step %d: %s is %s; it is written as null, and this is said once", step, tag, value)


def _open_tensorboard(folder: Path, resumed_at: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # seconds to import, and only rank 0 needs it

    purge_step = None if resumed_at is None else resumed_at + 1
    return SummaryWriter(str(folder), flush_secs=TENSORBOARD_FLUSH_S, purge_step=purge_step)


def scalars_summary(values: Mapping[str, float | None]) -> Any:
    """All numbers of a step as one summary: one record to write instead of one for each tag."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    points = ((tag, value) for tag, value in values.items() if value is not None)
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in points])


def animation_summary(tag: str, samples: Sequence[ShownSample]) -> Any:
    """The samples in motion as an image summary: a browser plays a GIF there, TensorBoard has no page for videos."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    video, fps = sample_animation(samples)
    height, width = video.shape[1:3]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif_bytes(video, fps))
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def cut_metrics(path: Path, num_bytes: int) -> None:
    """Drop the lines of metrics.jsonl beyond its first `num_bytes`, and half a line at its end. OSError if it cannot.

    A file that is shorter (the machine went down before it was on disk) keeps its whole lines.
    """
    kept = path.read_bytes()[:num_bytes] if path.exists() else b""
    atomic.write_text(path, kept[: kept.rfind(b"\n") + 1].decode())
