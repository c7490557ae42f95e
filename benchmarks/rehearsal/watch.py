"""The place of a run: its phases, as its own timer names them, and the two windows in which nothing may wait for the
device: the denoise loop, from its first forward to its last, and the micro-steps, from the first forward to the last
backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.rehearsal.record import Record

if TYPE_CHECKING:
    from wfm_ds.run.job import Job

DENOISE, MICRO_STEPS = "denoise loop", "between micro-steps"


class Windows:
    """Marks the events of each window when it ends."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.first: int | None = None  # event after which a window began
        self.last = 0  # event before which it last did its work

    def begin(self) -> None:
        if self.first is None:
            self.first = len(self.record.events)

    def touch(self) -> None:
        self.last = len(self.record.events)

    def end(self, name: str) -> None:
        if self.first is not None:
            self.record.end_window(name, self.first, self.last)
        self.first = None


@contextmanager
def watched(record: Record, job: Job) -> Iterator[None]:
    """Tell the record the phases and windows of everything that this job does."""
    from wfm_ds.engine.denoiser_forward import CountingForward
    from wfm_ds.engine.engine import DenoiserEngine
    from wfm_ds.models.sampler import Sampler

    denoising, training = Windows(record), Windows(record)
    timer = type(job.timer).__call__

    def phase(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        @contextmanager
        def both() -> Iterator[None]:
            with timer(self, name, *args, **kwargs), record.phase(name):
                yield

        return both()

    def forward(original: Callable[..., Any], self: Any, purpose: str, *args: Any, **kwargs: Any) -> Any:
        window = training if purpose == "policy" or training.first is not None else denoising
        window.begin()
        try:
            return original(self, purpose, *args, **kwargs)
        finally:
            if window is denoising:
                window.touch()

    def generate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        denoising.first = None
        try:
            return original(*args, **kwargs)
        finally:
            denoising.end(DENOISE)

    def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            training.touch()

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training.end(MICRO_STEPS)
        return original(*args, **kwargs)

    with (
        mock.patch.object(type(job.timer), "__call__", phase),
        wrapped(CountingForward, "__call__", forward),
        wrapped(Sampler, "generate", generate),
        wrapped(DenoiserEngine, "backward", backward),
        wrapped(DenoiserEngine, "step", step),
    ):
        yield


@contextmanager
def wrapped(owner: type, name: str, around: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    with mock.patch.object(owner, name, method):
        yield
