"""The events of a rehearsal: waits for the device, copies between host and device, collectives; each with its stack."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(f"{ROOT / folder}/" for folder in ("wfm_ds", "kernels", "reward", "tests"))
MACHINERY = (f"{ROOT / 'benchmarks' / 'rehearsal'}/", "/torch/utils/", "/torch/_subclasses/", "/torch/_ops.py")
NUM_FRAMES = 12  # of a stack, the innermost

Kind = Literal["sync", "copy", "collective"]


@dataclass(frozen=True, slots=True)
class Event:
    """A moment at which the host talks to the device, or to the other ranks."""

    kind: Kind
    what: str  # the operator
    phase: str  # of the run: rollout, train, ...; "" outside all of them
    window: str  # "denoise loop", "between micro-steps" or ""
    blocking: bool
    num_bytes: int
    stack: tuple[str, ...]  # frames of the project and of the caller, outermost first

    @property
    def place(self) -> str:
        """The innermost frame of the project."""
        own = [frame for frame in self.stack if frame.startswith(("wfm_ds/", "kernels/", "reward/", "tests/"))]
        return (own or self.stack or ("",))[-1]

    def describe(self) -> str:
        size = f" of {self.num_bytes} bytes" if self.kind == "copy" else ""
        lines = "".join(f"\n    {frame}" for frame in self.stack)
        return f"{self.what}{size} in the phase {self.phase or '(none)'}{lines}"


class NotQuiet(AssertionError):
    """The host stood still where it must only queue work."""


@dataclass
class Record:
    """All events of a rehearsal, in order. watch.py says in which phase and window they are."""

    events: list[Event] = field(default_factory=list)
    collectives: dict[tuple[str, str, str, str], int] = field(default_factory=dict)  # (name, backend, device, dtype)
    _phases: list[str] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phases.append(name)
        try:
            yield
        finally:
            self._phases.pop()

    def note(self, kind: Kind, what: str, *, blocking: bool = True, num_bytes: int = 0) -> None:
        """Add an event at the place that runs just then."""
        phase = self._phases[-1] if self._phases else ""
        self.events.append(Event(kind, what, phase, "", blocking, num_bytes, stack()))

    def collective(self, what: str, backend: str, device: str, dtype: str) -> None:
        key = (what, backend, device, dtype)
        self.collectives[key] = self.collectives.get(key, 0) + 1

    def clear(self) -> None:
        self.events.clear()
        self.collectives.clear()

    def within(self, window: str, kind: Kind) -> list[Event]:
        """The events of a window at which the host stands still."""
        return [e for e in self.events if e.window == window and e.kind == kind and e.blocking]

    def require_quiet(self, window: str, *, waits: int = 0, copies: int = 0) -> None:
        """Raise NotQuiet, with the stack of each, for more waits or blocking copies in this window."""
        kinds: tuple[tuple[Kind, int, str], ...] = (("sync", waits, "waits"), ("copy", copies, "blocking copies"))
        for kind, most, words in kinds:
            found = self.within(window, kind)
            if len(found) > most:
                places = "\n".join(dict.fromkeys(e.describe() for e in found))
                raise NotQuiet(f"{len(found)} {words} in the {window}, at most {most} are known:\n{places}")

    def end_window(self, name: str, begin: int, end: int) -> None:
        """Mark the events [begin, end) as those of this window."""
        for i in range(begin, end):
            e = self.events[i]
            self.events[i] = Event(e.kind, e.what, e.phase, name, e.blocking, e.num_bytes, e.stack)


def stack() -> tuple[str, ...]:
    """`file:line function` of the innermost frames, without the rehearsal's own."""
    frames = []
    for frame in traceback.extract_stack(limit=80)[:-2]:
        name = frame.filename
        if any(part in name for part in MACHINERY):
            continue
        short = name.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
        frames.append(f"{short}:{frame.lineno} {frame.name}")
    return tuple(frames[-NUM_FRAMES:])
