"""Record two windows of a run in which nothing may wait for the device: the denoise loop (from its first to its last
forward pass) and the micro-steps (from the first forward to the last backward pass)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from benchmarks.rehearsal.record import Record

DENOISE, MICRO_STEPS = "denoise loop", "between micro-steps"


class Windows:
    """Assigns events to a window when it ends."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.first: int | None = None  # index of the first event in the window
        self.last = 0  # index after the last event of its work

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
def watch_windows(record: Record) -> Iterator[None]:
    """Record the windows of all loops in the `with` block."""
    from wfm_ds.engine.engine import DenoiserEngine
    from wfm_ds.models.sampler import CountingForward, Sampler

    denoising, training = Windows(record), Windows(record)

    def watch_forward(original: Callable[..., Any], self: Any, purpose: str, *args: Any, **kwargs: Any) -> Any:
        window = training if purpose == "policy" or training.first is not None else denoising
        window.begin()
        try:
            return original(self, purpose, *args, **kwargs)
        finally:
            if window is denoising:
                window.touch()

    def watch_generate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        denoising.first = None
        try:
            return original(*args, **kwargs)
        finally:
            denoising.end(DENOISE)

    def watch_backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            training.touch()

    def watch_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training.end(MICRO_STEPS)
        return original(*args, **kwargs)

    with (
        wrap_method(CountingForward, "__call__", watch_forward),
        wrap_method(Sampler, "generate", watch_generate),
        wrap_method(DenoiserEngine, "backward", watch_backward),
        wrap_method(DenoiserEngine, "step", watch_step),
    ):
        yield


@contextmanager
def wrap_method(owner: type, name: str, around: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call_wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    with mock.patch.object(owner, name, call_wrapped):
        yield
