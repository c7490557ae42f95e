"""Record the GPU kernels of a network's forward pass as a CUDA graph, and launch them together in later calls.

Only calls without gradients are supported, and weights must be changed in place. This module has not been run on a GPU
yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from wfm_ds.errors import UserError

log = logging.getLogger(__name__)

NUM_WARM_UPS = 2  # calls before the recording; they compile and select kernels and allocate workspaces
MAX_RECORDINGS = 32
"""Maximum number of recordings of a network. A run with texts of one length needs at most one for each combination of
batch size, expert, policy and guidance pass. Each recording keeps its inputs and its result on the device."""
CaptureFunction: TypeAlias = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Function that records a computation and returns (replay function, result). Each replay overwrites the result."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    inputs: list[Tensor]
    replay: Callable[[], None]
    output: Any


class GraphReplayer:
    """Runs a network by replaying recorded calls. Calls with the same signature share a recording.

    The signature consists of the shape, dtype and device of each tensor argument, the values of all other arguments,
    and `variant`, the name of the active weights. If there are more than MAX_RECORDINGS signatures, for example because
    texts have many lengths, the least recently used recording is dropped.
    """

    def __init__(self, network: Callable[..., Any], parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._network, self._parameters = network, parameters
        self.recordings: dict[Hashable, RecordedCall] = {}  # least recently used first
        self._has_warned = False
        self._weight_addresses: list[tuple[Tensor, int]] = []
        self._captures: dict[torch.device, CaptureFunction] = {}

    def drop_stale_recordings(self) -> None:
        """Discard all recordings if the address of a weight has changed. Call it before each rollout."""
        if any(parameter.data_ptr() != address for parameter, address in self._weight_addresses):
            log.info("addresses of weights have changed: CUDA graphs of all forward passes are recorded again")
            self.recordings.clear()
            self._weight_addresses = []

    @torch.no_grad()
    def __call__(self, variant: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the network and return a copy of its result. variant: name of the weights that the network now uses."""
        values, layout = tree_flatten((args, kwargs))
        tensors = [value for value in values if isinstance(value, Tensor)]
        signature = (variant, layout, tuple(map(argument_signature, values)))
        recording = self.recordings.pop(signature, None)
        if recording is None:
            self._drop_oldest_recordings()
            recording = self._record(values, layout, tensors[0].device)
        self.recordings[signature] = recording
        for input_tensor, tensor in zip(recording.inputs, tensors, strict=True):
            input_tensor.copy_(tensor)
        recording.replay()
        return tree_map_only(Tensor, Tensor.clone, recording.output)  # the next replay overwrites the output

    def _drop_oldest_recordings(self) -> None:
        """Make room for one more recording."""
        while len(self.recordings) >= MAX_RECORDINGS:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "rollout.cuda_graph: forward passes have more than %d combinations of batch size and text length: "
                    "CUDA graphs are dropped and recorded again, which takes the time of %d forward passes each",
                    MAX_RECORDINGS,
                    NUM_WARM_UPS,
                )
            del self.recordings[next(iter(self.recordings))]

    def _record(self, values: list[Any], layout: Any, device: torch.device) -> RecordedCall:
        if not self.recordings:
            self._weight_addresses = [(parameter, parameter.data_ptr()) for parameter in self._parameters()]
        inputs = [value.clone() if isinstance(value, Tensor) else value for value in values]
        args, kwargs = tree_unflatten(inputs, layout)
        if device not in self._captures:
            self._captures[device] = choose_capture(device)
        replay, output = self._captures[device](lambda: self._network(*args, **kwargs))
        return RecordedCall([value for value in inputs if isinstance(value, Tensor)], replay, output)


class ReplayingNetwork:
    """Wrapper of a network that replays CUDA graphs when it is called. It has the attributes of the network."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._replayer = GraphReplayer(network, network.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replayer("", args, kwargs)

    def drop_stale_recordings(self) -> None:
        self._replayer.drop_stale_recordings()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def argument_signature(value: Any) -> Hashable:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value


def choose_capture(device: torch.device) -> CaptureFunction:
    if device.type == "cuda":
        return CudaCapture(device)
    log.warning("rollout.cuda_graph: %s has no CUDA graphs; forward passes run without them", device.type)
    return capture_plain_call


def capture_plain_call(compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Imitate the capture of a CUDA graph on a CPU: each replay calls `compute` again."""
    output = compute()
    outputs = tree_flatten(output)[0]

    def replay() -> None:
        for target, value in zip(outputs, tree_flatten(compute())[0], strict=True):
            if isinstance(target, Tensor):
                target.copy_(value)

    return replay, output


class CudaCapture:
    """Captures computations as CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        with torch.cuda.device(self._device):
            self._warm_up(compute)
            graph = torch.cuda.CUDAGraph()
            try:
                # During the capture, other threads (data readers, waiting threads) may use the device.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    output = compute()
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise UserError(
                    f"rollout.cuda_graph: the denoiser's forward pass cannot be recorded ({reason}): set it to false"
                ) from error
        log.info("recorded a forward pass of the denoiser as a CUDA graph")
        return graph.replay, output

    def _warm_up(self, compute: Callable[[], Any]) -> None:
        cuda: Any = torch.cuda  # its streams are not typed
        stream, current = cuda.Stream(self._device), cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                compute()
        current.wait_stream(stream)
