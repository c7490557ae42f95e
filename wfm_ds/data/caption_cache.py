"""Captions of a folder as they were read once, believed only for files that cannot have changed since.

    CACHE/captions/<hash of the folder>.json    {"folder", "read_ns", "captions": {name: [size, times, inode, caption]}}

A caption is taken from here if its file has the size, both times and the inode that it had. Two changes within one tick
of a file system's clock leave equal times: what had changed less than RECENT_S before it was read is read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wfm_ds.data.samples import printable
from wfm_ds.storage import atomic
from wfm_ds.storage.regular import read_regular

log = logging.getLogger(__name__)

FORMAT = 2
RECENT_S = 60.0  # the coarsest clock of a file system ticks every 2 s, and that of a server may be behind ours


class CaptionCache:
    """Captions of one folder by file, as JSON; a scan of the folder calls `kept`, `keep` and at last `save`."""

    def __init__(self, folder: Path, cache_dir: Path, *, now_ns: int) -> None:
        """`now_ns`: the time before the scan, since the epoch."""
        self.folder, self.now_ns = os.path.abspath(folder), now_ns
        digest = hashlib.sha256(os.fsencode(self.folder)).hexdigest()
        self.file = cache_dir / "captions" / f"{digest}.json"
        self._old = self._stored()
        self._new: dict[str, list[Any]] = {}
        self._num_read = 0

    def state(self, path: str) -> list[int]:
        """Return size, times and inode of a file, one of which changes when the file does. Raises OSError."""
        status = os.stat(path)
        return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]

    def kept(self, path: str, state: Sequence[int]) -> tuple[bool, Any]:
        """Return whether the caption of this file, in this state, is known, and the caption."""
        entry = self._old.get(path)
        if entry is None or entry[0] != state:
            return False, None
        self._new[path] = entry
        return True, entry[1]

    def keep(self, path: str, state: Sequence[int], caption: Any) -> None:
        """Note the caption that was read from a file after it was in this state. `caption`: JSON."""
        self._num_read += 1
        _, mtime_ns, ctime_ns, _ = state
        if max(mtime_ns, ctime_ns) < self.now_ns - RECENT_S * 1e9:
            self._new[path] = [list(state), caption]

    def save(self) -> None:
        """Write what the next scan may believe, if it differs from what is there. A folder that cannot be written costs
        the next start some seconds, and one line in the log."""
        if not self._num_read and self._new.keys() == self._old.keys():
            return
        names = {os.path.relpath(path, self.folder): entry for path, entry in self._new.items()}
        content = {"format": FORMAT, "folder": printable(self.folder), "captions": names}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self.file, json.dumps(content, separators=(",", ":")))
        except OSError as error:
            log.info("the captions of %s are read again at each start: %s", self.folder, error)

    def _stored(self) -> dict[str, list[Any]]:
        """Return the captions of the last scan by path; none if there is no file of this format for this folder."""
        try:
            content = json.loads(self.file.read_bytes())
            if content["format"] != FORMAT or content["folder"] != printable(self.folder):
                return {}
            return {os.path.join(self.folder, name): entry for name, entry in content["captions"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}


def read_caption(path: str, kept: CaptionCache | None, parse: Callable[[bytes], Any]) -> Any:
    """Return what `parse` makes of a caption file's bytes, JSON or None; None for a file that cannot be read."""
    try:
        if kept is None:
            return parse(read_regular(path))
        state = kept.state(path)
        known, caption = kept.kept(path, state)
        if known:
            return caption
        caption = parse(read_regular(path))
    except OSError:
        return None
    kept.keep(path, state, caption)
    return caption


def user_cache() -> Path:
    """Return the folder for what is kept for all runs of this user: $WFM_CACHE, or ~/.cache/wfm_ds."""
    return Path(os.environ.get("WFM_CACHE") or "~/.cache/wfm_ds").expanduser()
