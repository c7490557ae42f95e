"""Replace torch.cuda streams and events by fakes that record calls."""

import contextlib

import torch


def recorded_streams(monkeypatch, name):
    """Return a list that collects stream and event calls in order.

    The current stream is called `main`, every other stream `name`.
    """
    asked = []

    class Stream:
        def __init__(self, device=None):
            self.name = name if device is not None else "main"

        def wait_stream(self, other):
            asked.append(f"{self.name} waits for {other.name}")

    class Event:
        def record(self, stream):
            asked.append(f"recorded on {stream.name}")

        def synchronize(self):
            asked.append("host waits")

    @contextlib.contextmanager
    def on(stream):
        asked.append(f"on {stream.name}")
        yield
        asked.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    return asked
