"""Fake results of torch.cuda, as on a machine with GPUs of compute capability 9.0."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.rehearsal.record import Record

NAME, CAPABILITY = "Rehearsed GPU", (9, 0)
MEMORY = 80 << 30


class Stream:
    """A CUDA stream without pending work."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.cuda_stream, self.stream_id = torch.device("cuda", 0), 0, 0

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _record_sync("cuda.Stream.synchronize")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0

    def synchronize(self) -> None:
        _record_sync("cuda.Event.synchronize")


class StreamContext:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *_: object) -> None:
        pass


class DeviceContext(StreamContext):
    pass


_record_sync: Callable[[str], None] = lambda what: None  # noqa: E731


def patch_cuda(patch: Callable[[Any, str, Any], None], record: Record, device: int, num_devices: int) -> None:
    """Replace functions of torch.cuda that need a driver."""
    patch(sys.modules[__name__], "_record_sync", lambda what: record.add_event("sync", what))
    properties = SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY,
        multi_processor_count=132,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_multiprocessor=233472,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
        gcnArchName="",
        is_integrated=False,
        is_multi_gpu_board=False,
        uuid="rehearsed",
    )
    stream = Stream()
    values: dict[str, Any] = {
        "is_available": True,
        "_is_compiled": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": num_devices,
        "current_device": device,
        "_lazy_init": None,
        "init": None,
        "set_device": None,
        "get_device_capability": CAPABILITY,
        "get_device_name": NAME,
        "get_device_properties": properties,
        "mem_get_info": (MEMORY, MEMORY),
        "memory_stats": {},
        "memory_snapshot": [],
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "reset_max_memory_allocated": None,
        "reset_max_memory_cached": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "seed": None,
        "initial_seed": 0,
        "current_stream": stream,
        "default_stream": stream,
        "set_stream": None,
        "get_arch_list": ["sm_90"],
        "is_current_stream_capturing": False,
        "ipc_collect": None,
        "can_device_access_peer": True,
    }
    for name in ("allocated", "reserved", "cached"):
        values |= {f"memory_{name}": 0, f"max_memory_{name}": 0}
    for name, value in values.items():
        patch(torch.cuda, name, lambda *_, _value=value, **__: _value)
    for name in ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA"):
        patch(torch.cuda.nvtx._nvtx, name, lambda *_: 0)  # type: ignore[attr-defined]
    patch(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    patch(torch.cuda, "synchronize", lambda device=None: record.add_event("sync", "cuda.synchronize"))
    patch(torch.cuda, "get_rng_state", lambda device=None: torch.zeros(16, dtype=torch.uint8))
    patch(torch.cuda, "set_rng_state", lambda state, device=None: None)
    patch(torch.cuda, "get_rng_state_all", lambda: [torch.zeros(16, dtype=torch.uint8)] * num_devices)
    patch(torch.cuda, "set_rng_state_all", lambda states: None)
    patch(torch.cuda, "Stream", Stream)
    patch(torch.cuda, "Event", Event)
    patch(torch.cuda, "stream", StreamContext)
    patch(torch.cuda, "StreamContext", StreamContext)
    patch(torch.cuda, "device", DeviceContext)
    patch(torch.cuda, "device_of", DeviceContext)
