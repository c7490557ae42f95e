"""The events of a rehearsal: waits for the device, copies between host and device, and collectives, with stacks."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
MACHINERY = (f"{ROOT / 'benchmarks' / 'rehearsal'}/", "/torch/utils/", "/torch/_subclasses/", "/torch/_ops.py")
NUM_FRAMES = 12  # innermost frames of a stack

Kind = Literal["sync", "copy", "collective"]


@dataclass(frozen=True, slots=True)
class Event:
    """An operation of the host on the device, or a collective."""

    kind: Kind
    what: str  # the operator
    window: str  # "denoise loop", "between micro-steps" or ""
    blocking: bool
    num_bytes: int
    stack: tuple[str, ...]  # frames of the project and of the caller, outermost first

    def describe(self) -> str:
        size = f" of {self.num_bytes} bytes" if self.kind == "copy" else ""
        lines = "".join(f"\n    {frame}" for frame in self.stack)
        return f"{self.what}{size}{lines}"


class NotQuiet(AssertionError):
    """The host waited in a window in which it must only queue work."""


@dataclass
class Record:
    """All events of a rehearsal, in order. watch.py sets their window."""

    events: list[Event] = field(default_factory=list)
    collectives: dict[tuple[str, str, str, str], int] = field(default_factory=dict)  # (name, backend, device, dtype)

    def add_event(self, kind: Kind, what: str, *, blocking: bool = True, num_bytes: int = 0) -> None:
        """Add an event at the current code position."""
        self.events.append(Event(kind, what, "", blocking, num_bytes, project_stack()))

    def add_collective(self, what: str, backend: str, device: str, dtype: str) -> None:
        key = (what, backend, device, dtype)
        self.collectives[key] = self.collectives.get(key, 0) + 1

    def clear(self) -> None:
        self.events.clear()
        self.collectives.clear()

    def window_events(self, window: str, kind: Kind) -> list[Event]:
        """Return the blocking events of a window."""
        return [e for e in self.events if e.window == window and e.kind == kind and e.blocking]

    def require_quiet(self, window: str, *, waits: int = 0, copies: int = 0) -> None:
        """Raise NotQuiet, with all stacks, if a window has more waits or blocking copies than given."""
        kinds: tuple[tuple[Kind, int, str], ...] = (("sync", waits, "waits"), ("copy", copies, "blocking copies"))
        for kind, limit, label in kinds:
            found = self.window_events(window, kind)
            if len(found) > limit:
                places = "\n".join(dict.fromkeys(e.describe() for e in found))
                raise NotQuiet(f"{len(found)} {label} in the {window}, expected at most {limit}:\n{places}")

    def end_window(self, name: str, begin: int, end: int) -> None:
        """Assign the events [begin, end) to this window."""
        for i in range(begin, end):
            self.events[i] = replace(self.events[i], window=name)


def project_stack() -> tuple[str, ...]:
    """Return `file:line function` of the innermost frames, without frames of the rehearsal."""
    frames = []
    for frame in traceback.extract_stack(limit=80)[:-2]:
        name = frame.filename
        if any(part in name for part in MACHINERY):
            continue
        short = name.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
        frames.append(f"{short}:{frame.lineno} {frame.name}")
    return tuple(frames[-NUM_FRAMES:])
