"""How many bytes the port holds for its clients at once: bodies on their way, decoded media, media not scored yet."""

from __future__ import annotations

import threading

from wfm_reward.web.problem import Problem


class Room:
    """Of one port, shared by its requests. Any thread may use it and its shares."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._taken = 0
        self._lock = threading.Lock()

    @property
    def taken(self) -> int:
        """Bytes, of all shares together."""
        return self._taken

    def share(self, num_bytes: int) -> Share:
        """Raises Problem as Share.take does."""
        share = Share(self)
        share.take(num_bytes)
        return share

    def change(self, num_bytes: int) -> bool:
        """Whether so many more could be taken; fewer always can."""
        with self._lock:
            if num_bytes > 0 and self._taken + num_bytes > self.max_bytes:
                return False
            self._taken += num_bytes
            return True


class Share:
    """What one request has taken; it must be released in the end."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Before they are allocated. Raises Problem: 413 if the request does not even fit alone, else 429."""
        most = self._room.max_bytes
        if self.num_bytes + num_bytes > most:
            need = self.num_bytes + num_bytes
            detail = f"this request needs {need} bytes at once; this service takes {most}: send fewer items in one"
            raise Problem(413, "too_large", detail)
        if not self._room.change(num_bytes):
            raise Problem(429, "full", f"more than {most} bytes of media wait to be scored", retry_after_s=5)
        self.num_bytes += num_bytes

    def pass_on(self, num_bytes: int) -> Share:
        """A share of so many bytes in place of this one, which is empty then. Raises Problem as `take` does."""
        if num_bytes > self.num_bytes:
            self.take(num_bytes - self.num_bytes)
        heir = Share(self._room)
        heir.num_bytes = num_bytes
        self._room.change(num_bytes - self.num_bytes)
        self.num_bytes = 0
        return heir

    def release(self) -> None:
        """Twice is once."""
        self._room.change(-self.num_bytes)
        self.num_bytes = 0
