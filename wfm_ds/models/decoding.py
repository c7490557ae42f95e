"""Media on their way from latents to the host: on a GPU on a stream of their own, beside what is queued afterwards.

On a CPU the same is computed at once. No GPU has run the streams yet; tests hold the order in which they are asked for.
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
class Decoding:
    """Pixels of some samples, and which of the samples were finite: on the host, once `done` has happened."""

    levels: Sequence[Tensor]  # uint8 [n,3,H,W] or [n,3,F,H,W], on the host
    finite: Tensor  # bool [B], on the host
    done: torch.cuda.Event | None  # None: it has

    @property
    def is_behind(self) -> bool:
        """Tell whether the caller should go on before it asks for the media: something else computes them."""
        return self.done is not None

    def wait(self) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        """Return uint8 [n,H,W,3], of videos [n,F,H,W,3] ([0] for no samples), and whether each of all B was finite."""
        if self.done is not None:
            self.done.synchronize()
        media = [np.ascontiguousarray(part.movedim(1, -1).numpy()) for part in self.levels]
        return np.concatenate(media) if media else np.empty(0, np.uint8), self.finite.tolist()


@functools.cache
def side_stream(device: torch.device) -> Any:
    """The stream of a GPU that decodes, one for all; None for a CPU."""
    cuda: Any = torch.cuda  # whose streams and events are not typed
    return cuda.Stream(device) if device.type == "cuda" else None


@contextlib.contextmanager
def beside(device: torch.device, latents: Tensor) -> Iterator[Any]:
    """Queue what is computed inside behind what the device has in hand, and beside what it is given afterwards.

    latents: which come from the caller's stream and are read on the other one. Yields the event that it is done, to be
    waited for outside; None on a CPU, where it is done.
    """
    stream = side_stream(device)
    if stream is None:
        yield None
        return
    cuda: Any = torch.cuda
    done = cuda.Event()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield done
        done.record(stream)
    latents.record_stream(stream)  # its memory is not given to others before the stream has read it
