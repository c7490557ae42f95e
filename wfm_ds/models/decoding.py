"""Asynchronous decoding: a GPU decodes latents on a separate CUDA stream, in parallel with later work.

On a CPU decoding is synchronous. The streams have not run on a GPU yet; tests check the order of the CUDA calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PendingPixels:
    """Decoded pixels and finiteness flags on the host. Valid once `done_event` has completed."""

    pixels: Sequence[Tensor]  # uint8 [n,3,H,W] or [n,3,F,H,W], on the host
    finite: Tensor  # bool [B], on the host
    done_event: torch.cuda.Event | None  # None: already done

    @property
    def is_pending(self) -> bool:
        """Whether decoding may still run on the GPU. If so, do other work before calling `wait`."""
        return self.done_event is not None

    def wait(self) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        """Wait for decoding. Return n decoded samples, and for each of the B latents whether it is finite.

        Samples are uint8 [n,H,W,3], or [n,F,H,W,3] for videos, or an empty array [0] if n is 0.
        """
        if self.done_event is not None:
            self.done_event.synchronize()
        pixels = [np.ascontiguousarray(part.movedim(1, -1).numpy()) for part in self.pixels]
        return np.concatenate(pixels) if pixels else np.empty(0, np.uint8), self.finite.tolist()


@functools.cache
def get_decode_stream(device: torch.device) -> Any:
    """Return the CUDA stream for decoding on this GPU, created by the first call. Returns None for a CPU."""
    cuda: Any = torch.cuda  # torch.cuda streams and events are untyped
    return cuda.Stream(device) if device.type == "cuda" else None


@contextlib.contextmanager
def run_on_decode_stream(device: torch.device, latents: Tensor) -> Iterator[Any]:
    """Run the `with` block on the decoding stream, after all work queued so far and in parallel with later work.

    latents: input of the block, from the caller's stream. Yields the event recorded after the block, or None on a CPU.
    """
    stream = get_decode_stream(device)
    if stream is None:
        yield None
        return
    cuda: Any = torch.cuda
    done = cuda.Event()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield done
        done.record(stream)
    latents.record_stream(stream)  # keep its memory until the stream has read it
