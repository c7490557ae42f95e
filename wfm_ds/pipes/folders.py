"""Folders for ipc sockets: private, with a short path, and removed by the next start if their owners were killed.

Each process that uses a folder holds a shared lock on it, which ends with the process. A sweep takes the exclusive
lock first, and looks into the folder and removes it under that lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from wfm_ds.errors import UserError

log = logging.getLogger(__name__)

IPC_PATH_BYTES = 107  # of sockaddr_un
NAME_BYTES = 48  # of a folder and of a file in it
PREFIX = f"wfm-pipes-{os.geteuid()}-"
ATTEMPTS = 100
OURS = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")  # as mkdtemp completes it


class SocketFolder:
    """A new 0700 folder at `path`, in use until `remove` or the end of this process."""

    def __init__(self) -> None:
        """Sweep the place first. Raises UserError if there is no place for such a folder."""
        base = _base()
        sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        self._lock = _held(self.path)
        self.restore()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def restore(self) -> None:
        """Make it again if somebody has removed it, such as a sweep between its making and its locking."""
        for _ in range(ATTEMPTS):
            if self._lock is not None and _is_at(self._lock, self.path):
                return
            self._release()
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._lock = _held(self.path)
        raise UserError(f"{self.path} is removed again and again, or another user's: set TMPDIR to another folder")

    def remove(self) -> None:
        """Remove it with what is in it. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def hold(path: Path) -> int | None:
    """Keep a SocketFolder that another process has made, for as long as the returned descriptor is open.

    None for any other folder, which nobody sweeps, and for one that is gone or about to go.
    """
    return _held(path) if OURS.fullmatch(path.name) else None


def sweep(base: Path) -> list[Path]:
    """Remove the SocketFolders of this user in `base` that no process holds. Returns them."""
    swept = []
    for path in base.iterdir():
        if OURS.fullmatch(path.name) and _swept(path):
            log.info("removed %s, whose owner was killed", path)
            swept.append(path)
    return swept


def _base() -> Path:
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if base and len(os.fsencode(base)) < IPC_PATH_BYTES - NAME_BYTES and os.access(base, os.R_OK | os.W_OK):
            return Path(base)
    raise UserError("no writable folder with a short path for sockets: set TMPDIR to one")


def _swept(path: Path) -> bool:
    """Remove this folder, if it is this user's, nobody holds it, and there are only files in it."""
    with _opened(path) as folder:
        with contextlib.suppress(OSError):  # it is held, gone meanwhile, or there is a folder in it that is not ours
            if folder is None:
                return False
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(folder, path):
                for name in os.listdir(folder):
                    os.unlink(name, dir_fd=folder)
                path.rmdir()
                return True
        return False


def _held(path: Path) -> int | None:
    """A descriptor with a shared lock on this folder; None if it is gone, or another user's."""
    with _opened(path) as folder:
        if folder is None:
            return None
        fcntl.flock(folder, fcntl.LOCK_SH)  # waits for a sweep, which is over at once
        return os.dup(folder)  # the lock lasts as long as any descriptor of it


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A descriptor of this folder; None if it is gone, is not a folder, or belongs to another user."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield folder if os.fstat(folder).st_uid == os.geteuid() else None
    finally:
        os.close(folder)


def _is_at(folder: int, path: Path) -> bool:
    """True if the open folder is the one at this path, not one that was there before."""
    try:
        return os.path.samestat(os.fstat(folder), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False
