"""Cache of the captions of a folder. A caption is reused only if its file cannot have changed.

    CACHE/captions/<hash of the folder>.json    {"format", "folder", "captions": {name: [state, caption]}}

The state is the size, modification time, change time and inode of the caption file. Two changes within one tick of the
file system's clock would not change the state. Files that were changed less than RECENT_S before the scan are therefore
not cached.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wfm_ds.data.samples import to_printable
from wfm_ds.storage import atomic
from wfm_ds.storage.filesystem import read_regular

log = logging.getLogger(__name__)

FORMAT = 2
RECENT_S = 60.0  # file system clocks tick every 2 s at worst, and a file server's clock may lag


class CaptionCache:
    """Cached captions of a folder. A scan calls `lookup` for each file, `store` after a miss, and `save` at the end."""

    def __init__(self, folder: Path, cache_dir: Path, *, now_ns: int) -> None:
        """now_ns: Unix time in nanoseconds, measured before the scan of the folder."""
        self.folder, self.now_ns = os.path.abspath(folder), now_ns
        digest = hashlib.sha256(os.fsencode(self.folder)).hexdigest()
        self.file = cache_dir / "captions" / f"{digest}.json"
        self._previous = self._load()
        self._current: dict[str, list[Any]] = {}
        self._num_read = 0

    def file_state(self, path: str) -> list[int]:
        """Return [size, mtime_ns, ctime_ns, inode] of a file. Raises OSError."""
        status = os.stat(path)
        return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]

    def lookup(self, path: str, state: Sequence[int]) -> tuple[bool, Any]:
        """Return (True, caption) if the caption is cached for this state of the file, otherwise (False, None)."""
        entry = self._previous.get(path)
        if entry is None or entry[0] != state:
            return False, None
        self._current[path] = entry
        return True, entry[1]

    def store(self, path: str, state: Sequence[int], caption: Any) -> None:
        """Cache a caption (a JSON value) unless its file changed recently.

        The caller must determine `state` before it reads the caption.
        """
        self._num_read += 1
        _, mtime_ns, ctime_ns, _ = state
        if max(mtime_ns, ctime_ns) < self.now_ns - RECENT_S * 1e9:
            self._current[path] = [list(state), caption]

    def save(self) -> None:
        """Write the cache file if its content changed. A write error is only logged."""
        if not self._num_read and self._current.keys() == self._previous.keys():
            return
        names = {os.path.relpath(path, self.folder): entry for path, entry in self._current.items()}
        content = {"format": FORMAT, "folder": to_printable(self.folder), "captions": names}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self.file, json.dumps(content, separators=(",", ":")))
        except OSError as error:
            log.info("caption cache of %s cannot be written, captions are read at each start: %s", self.folder, error)

    def _load(self) -> dict[str, list[Any]]:
        """Return {path: [state, caption]} of the last scan. Returns {} if this folder has no valid cache file."""
        try:
            content = json.loads(self.file.read_bytes())
            if content["format"] != FORMAT or content["folder"] != to_printable(self.folder):
                return {}
            return {os.path.join(self.folder, name): entry for name, entry in content["captions"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}


def read_caption(path: str, cache: CaptionCache | None, parse: Callable[[bytes], Any]) -> Any:
    """Return the caption that `parse` (bytes to JSON value) extracts from a file, from the cache if possible.

    Returns None if the file cannot be read.
    """
    try:
        if cache is None:
            return parse(read_regular(path))
        state = cache.file_state(path)
        is_cached, caption = cache.lookup(path, state)
        if is_cached:
            return caption
        caption = parse(read_regular(path))
    except OSError:
        return None
    cache.store(path, state, caption)
    return caption
