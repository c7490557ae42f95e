"""Private folders with short paths for ipc sockets. If a process was killed, a later process removes its folder."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

from wfm_ds.errors import UserError

log = logging.getLogger(__name__)

MAX_IPC_PATH_BYTES = 107  # limit of sockaddr_un
MAX_NAME_BYTES = 48  # of a folder name and a file name, joined
FOLDER_PREFIX = f"wfm-pipes-{os.geteuid()}-"
MAX_ATTEMPTS = 100
FOLDER_NAME = re.compile(rf"{FOLDER_PREFIX}[a-z0-9_]{{8}}")  # mkdtemp appends the random part


class SocketFolder:
    """A new folder at `path` with mode 0700. It is locked until `remove` is called or this process ends."""

    def __init__(self, base: Path | None = None) -> None:
        """Remove orphaned folders and create a folder in `base`.

        base: None: use a suitable folder. Raises UserError if there is none.
        """
        base = base or _find_base_folder()
        remove_orphaned_folders(base)
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))
        self._lock = _lock_shared(self.path)
        self.restore()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def restore(self) -> None:
        """Create and lock the folder again if it was removed."""
        for _ in range(MAX_ATTEMPTS):
            if self._lock is not None and _is_same_folder(self._lock, self.path):
                return
            self._unlock()
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._lock = _lock_shared(self.path)
        raise UserError(f"{self.path} is removed repeatedly or belongs to another user: set TMPDIR to another folder")

    def remove(self) -> None:
        """Remove the folder and its content. Repeated calls are allowed."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def hold_folder(path: Path) -> int | None:
    """Lock another process's SocketFolder. Returns a descriptor; close it to release the lock.

    Returns None if `path` is no SocketFolder or was removed.
    """
    return _lock_shared(path) if FOLDER_NAME.fullmatch(path.name) else None


def remove_orphaned_folders(base: Path) -> list[Path]:
    """Remove the SocketFolders of this user in `base` that no process has locked, and return their paths."""
    removed = []
    for path in base.iterdir():
        if FOLDER_NAME.fullmatch(path.name) and _remove_if_orphaned(path):
            log.info("removed %s: its owner was killed", path)
            removed.append(path)
    return removed


def _find_base_folder() -> Path:
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if base and len(os.fsencode(base)) < MAX_IPC_PATH_BYTES - MAX_NAME_BYTES and os.access(base, os.R_OK | os.W_OK):
            return Path(base)
    raise UserError("no writable folder with a short path for sockets: set TMPDIR to one")


def _remove_if_orphaned(path: Path) -> bool:
    """Remove the folder if it belongs to this user, is not locked, and contains only files. Returns True if removed."""
    if (folder := _open_own_folder(path)) is None:
        return False
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_same_folder(folder, path):
            return False
        for name in os.listdir(folder):
            os.unlink(name, dir_fd=folder)
        path.rmdir()
    except OSError:  # the folder is locked, already removed, or contains a folder
        return False
    finally:
        os.close(folder)
    return True


def _lock_shared(path: Path) -> int | None:
    folder = _open_own_folder(path)
    if folder is not None:
        try:
            fcntl.flock(folder, fcntl.LOCK_SH)  # waits for a removal in progress, which is short
        except OSError:
            os.close(folder)
            raise
    return folder


def _open_own_folder(path: Path) -> int | None:
    """Return a descriptor of the folder, or None if it does not exist or belongs to another user."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(folder).st_uid == os.geteuid():
        return folder
    os.close(folder)
    return None


def _is_same_folder(folder: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(folder), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False
