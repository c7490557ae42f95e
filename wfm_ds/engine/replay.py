"""Calls of a network from CUDA graphs: its kernels are recorded once and launched together afterwards.

A graph computes with the memory that it was recorded with. So arguments are copied to where they lay, results from
where they come to lie, and weights must be changed in place; where one has moved, all is recorded anew. What Python
does in a call happens when it is recorded and not again. Forwards without gradient only. No GPU has run this yet: on a
CPU the same is done around an ordinary call in place of a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from wfm_ds.errors import UserError

log = logging.getLogger(__name__)

NUM_WARM_UPS = 2  # calls before the recording: kernels are compiled and chosen, and workspaces taken, in the first ones
Capture: TypeAlias = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Record what a function computes. Returns what computes it again, and its result, which that writes anew."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One call, with the memory of its arguments and of its result."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    output: Any


class Replays:
    """A network's calls, recorded by the kind of their arguments: the shapes of tensors, all else by its value."""

    def __init__(self, network: Callable[..., Any], parameters: Callable[[], Iterable[Tensor]]) -> None:
        """parameters: of the network, all that it will ever compute with once it is called."""
        self._network, self._parameters = network, parameters
        self._recordings: dict[Hashable, Recording] = {}
        self._places: list[tuple[Tensor, int]] = []
        self._captures: dict[torch.device, Capture] = {}

    def begin(self) -> None:
        """Look where the weights lie, before the calls of a rollout, during which they stay. Forget what was recorded
        if one has moved. Not in every call: of a network of 700 weights it would take more time than all else there."""
        if any(parameter.data_ptr() != place for parameter, place in self._places):
            log.info("the weights have moved: their forwards are recorded anew")
            self._recordings.clear()
            self._places = []

    @torch.no_grad()
    def __call__(self, variant: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the network returns for these arguments, in memory of its own. variant: which of its weights it
        computes with."""
        values, layout = tree_flatten((args, kwargs))
        tensors = [value for value in values if isinstance(value, Tensor)]
        kind = (variant, layout, tuple(map(kind_of, values)))
        if kind not in self._recordings:
            self._recordings[kind] = self._recorded(values, layout, tensors[0].device)
        recording = self._recordings[kind]
        for place, tensor in zip(recording.inputs, tensors, strict=True):
            place.copy_(tensor)
        recording.replay()
        return tree_map(own, recording.output)

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def _recorded(self, values: list[Any], layout: Any, device: torch.device) -> Recording:
        if not self._recordings:
            self._places = [(parameter, parameter.data_ptr()) for parameter in self._parameters()]
        held = [value.clone() if isinstance(value, Tensor) else value for value in values]
        args, kwargs = tree_unflatten(held, layout)
        if device not in self._captures:
            self._captures[device] = capture_on(device)
        replay, output = self._captures[device](lambda: self._network(*args, **kwargs))
        return Recording([value for value in held if isinstance(value, Tensor)], replay, output)


class ReplayedNetwork:
    """A network whose calls are replayed; its attributes are its own."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._replays = Replays(network, network.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replays("", args, kwargs)

    def begin(self) -> None:
        """Do what Replays.begin does."""
        self._replays.begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def kind_of(value: Any) -> Hashable:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value


def own(value: Any) -> Any:
    """A copy that the next replay does not overwrite."""
    return value.clone() if isinstance(value, Tensor) else value


def capture_on(device: torch.device) -> Capture:
    """The way to record on this device: CUDA graphs, or an ordinary call where there are none."""
    if device.type == "cuda":
        return CudaCapture(device)
    log.warning("rollout.cuda_graph: there are no CUDA graphs on %s; forwards are run as without the key", device.type)
    return called_again


def called_again(compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A `Capture` that calls the function each time."""
    output = compute()
    places = tree_flatten(output)[0]

    def replay() -> None:
        for place, value in zip(places, tree_flatten(compute())[0], strict=True):
            if isinstance(place, Tensor):
                place.copy_(value)

    return replay, output


class CudaCapture:
    """A `Capture` by CUDA graphs. All share one pool of memory, as large as the largest needs: they are replayed one
    after the other, and results are copied out."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        with torch.cuda.device(self._device):
            self._warm_up(compute)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads (readers of data, lanes that wait) may talk to the device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    output = compute()
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise UserError(
                    f"rollout.cuda_graph: the denoiser's forward cannot be recorded ({reason}): set it to false"
                ) from error
        log.info("recorded a forward of the denoiser as a CUDA graph")
        return graph.replay, output

    def _warm_up(self, compute: Callable[[], Any]) -> None:
        """On another stream than the caller's, as recording does."""
        cuda: Any = torch.cuda  # whose streams are not typed
        stream, current = cuda.Stream(self._device), cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                compute()
        current.wait_stream(stream)
