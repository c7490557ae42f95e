"""A run's folder in S3: what the run leaves there is copied by a thread while it trains, verified, tried again.

    folder/.storage.json     what the storage has of each file; without it files are only sent once more

Files and folders of a run are complete or have hidden or .tmp names (atomic.py, store.py), so that the thread finds
what is new by looking. The newest checkpoint goes first. Logs and metrics, which grow, are sent whole, as long as they
are.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from wfm_ds.checkpoint import remote, store
from wfm_ds.errors import StorageError
from wfm_ds.monitoring.run_page import DATA
from wfm_ds.run import layout
from wfm_ds.run.layout import CHECKPOINTS, EARLIER, METRICS, PAGE, PAGE_FOLDER, RECIPE, RECORD, RESULT
from wfm_ds.storage import atomic, transfer
from wfm_ds.storage.transfer import Moved

log = logging.getLogger(__name__)

NOTES = ".storage.json"
PASS_S = 300.0  # between two looks at what has grown; checkpoints and exports do not wait for it
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 60.0  # the wait after a failed pass doubles from one to the other
FOLDERS = ("samples", "safetensors", "tensorboard", "logs", EARLIER, PAGE_FOLDER)  # besides checkpoints
LAST = ("model_index.json", "adapter_config.json", "samples.jsonl")  # whoever sees one of these finds what it is about
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sent:
    """A local file as it was when it was sent, and the size of the object in the storage."""

    size: int
    mtime_ns: int
    stored: int


class Progress:
    """Time at which the storage last took something that it had not taken before.

    A file that is sent again after a failure counts from where the try that got furthest was cut off: a storage that
    takes the same part again and again is not taking the run.
    """

    def __init__(self) -> None:
        self.at = time.monotonic()
        self._furthest: dict[str, int] = {}  # bytes of the best try, by name

    def begin(self, name: str) -> Moved:
        """Return a function that counts the bytes of a try to send this name."""
        sent = 0

        def moved(num_bytes: int) -> None:
            nonlocal sent
            sent += num_bytes
            if sent > self._furthest.get(name, -1):
                self._furthest[name] = sent
                self.at = time.monotonic()

        return moved


class Mirror:
    """Copies `folder` to `address` from `start` to `finish`. All methods but the thread's own are the main thread's, on
    rank 0."""

    def __init__(self, folder: Path, address: str, *, keep: int) -> None:
        self.folder, self.address, self.keep = folder, address, keep
        self._sent = self._noted()
        self._copied: dict[tuple[int, ...], str] = {}  # the object of a file with several names, by its identity
        self._wakeup = threading.Event()
        self._finishing, self._complete = False, threading.Event()  # the next whole pass is the last, and is over
        self._progress = Progress()
        self._is_claimed = False  # by the record of what a run may have written there
        self._closed, self._failure = False, ""
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def clear(self) -> None:
        """Remove what the address's record says a run wrote there, and nothing else. Raises StorageError."""
        listed = layout.recorded_at(self.address)
        own = [name for name in transfer.listing(self.address) if name.partition("/")[0] in listed]
        own.sort(key=lambda name: not name.endswith(f"/{store.COMPLETE}"))
        transfer.remove(f"{self.address}/{name}" for name in own)
        self._sent = {}

    def fetch_metrics(self) -> None:
        """Copy the metrics of attempts that saved no checkpoint into the folder, which keeps what it has. Raises
        StorageError."""
        for name, size in transfer.listing(self.address).items():
            path = self.folder / name
            if (name == METRICS or name.partition("/")[0] == EARLIER) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                transfer.download(f"{self.address}/{name}", path, size=size)

    def fetch(self, address: str) -> Path:
        """Copy this checkpoint of the storage, and the metrics up to it, into the folder, and return the checkpoint's
        folder. Raises StorageError."""
        found = remote.read(address)
        stored = transfer.listing(self.address)
        if found is None or METRICS not in stored:
            raise StorageError(f"{address} or {self.address}/{METRICS} has been removed a moment ago: start again")
        began, folder = time.monotonic(), self.folder / CHECKPOINTS / f"step_{found.step}"
        remote.fetch(found, folder)
        transfer.download(f"{self.address}/{METRICS}", self.folder / METRICS, size=stored[METRICS])
        self._keep_note_of(marker(found.step), stored[marker(found.step)])
        self._note()
        log.info("copied %s to %s in %.1f s", address, folder, time.monotonic() - began)
        return folder

    def newer(self) -> int | None:
        """Return the newest step of the storage's complete checkpoints if the folder has none as new, else None. Raises
        StorageError."""
        found = remote.newest(f"{self.address}/{CHECKPOINTS}")
        return None if found is None or found.step <= max(self._steps(), default=-1) else found.step

    def start(self) -> None:
        """Begin to copy; from here on the storage holds a run that is not over. Raises StorageError, also if it holds
        a newer checkpoint than the folder: it is not this run's to replace."""
        newer = self.newer()
        if newer is not None:
            raise StorageError(
                f"{self.address} holds a checkpoint of step {newer}, newer than all in {self.folder}: another machine "
                "has continued this run; if that one has ended, start the same command again to go on from there, else "
                "set checkpoint.storage to another address"
            )
        stored = transfer.listing(self.address)
        transfer.remove([f"{self.address}/{RESULT}"] if RESULT in stored else [])
        self._sent = {name: sent for name, sent in self._sent.items() if stored.get(name) == sent.stored}
        for step in self._steps():  # its COMPLETE stands for the rest
            files = json.loads((self.folder / marker(step)).read_text(encoding="utf-8"))["files"]
            folder = f"{CHECKPOINTS}/step_{step}"
            if any(stored.get(f"{folder}/{name}") != size for name, size in files.items()):
                self._sent.pop(marker(step), None)
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Send what is complete by now without waiting for the next pass."""
        self._wakeup.set()

    def unverified(self) -> Collection[int]:
        """Return the steps of local checkpoints that must not be removed: neither they nor newer ones are stored."""
        verified = max((step for step in self._steps() if self._has(marker(step))), default=-1)
        return [step for step in self._steps() if step > verified]

    def finish(self, stall_s: float) -> list[str]:
        """Wait until the storage has everything, and end; no longer than it takes nothing new for `stall_s`. Returns
        the names that it does not have."""
        self._progress = Progress()
        self._finishing = True
        self._wakeup.set()
        while (left := self._progress.at + stall_s - time.monotonic()) > 0 and not self._complete.wait(left):
            pass  # something has been taken meanwhile, or not
        self._closed = True
        self._wakeup.set()
        if self._complete.is_set():
            self._thread.join()
            return []
        return self.missing()

    @property
    def failure(self) -> str:
        """The reason why the last pass failed; empty if it did not."""
        return self._failure

    def missing(self) -> list[str]:
        """Return the names that the storage does not have as they are; a checkpoint counts as one."""
        return [*(f"{CHECKPOINTS}/step_{step}" for step in self._unsent_steps()), *self._unsent()]

    def send_result(self) -> None:
        """Send the page as it is at last, and result.json, once all else is there. Raises StorageError."""
        if (self.folder / DATA).exists():
            transfer.upload(self.folder / DATA, f"{self.address}/{DATA}")
        transfer.upload(self.folder / RESULT, f"{self.address}/{RESULT}")

    # ---- the thread

    def _run(self) -> None:
        wait_s, retry_s = PASS_S, FIRST_RETRY_S
        while True:
            self._wakeup.wait(wait_s)
            self._wakeup.clear()
            if self._closed:
                return
            is_last = self._finishing  # what the run left before it asked is sent by a pass that begins afterwards
            try:
                self._pass()
            except _ClosedError:
                return
            except (StorageError, OSError) as error:
                self._failed(str(error))
            except Exception as error:  # the border of the thread: training goes on, and the end says what is missing
                log.exception("copying to %s failed", self.address)
                self._failed(f"{type(error).__name__}: {error}")
            else:
                if self._failure:
                    log.info("%s takes copies again", self.address)
                wait_s, retry_s, self._failure = PASS_S, FIRST_RETRY_S, ""
                if is_last:
                    self._complete.set()
                    return
                continue
            wait_s, retry_s = retry_s, min(2 * retry_s, LAST_RETRY_S)

    def _failed(self, reason: str) -> None:
        if not self._failure:
            log.warning("%s; this is tried again, meanwhile nothing is removed from %s", reason, self.folder)
        self._failure = reason

    def _pass(self) -> None:
        """Send everything that the storage does not have. Raises StorageError and OSError."""
        if not self._is_claimed:  # before anything else, so that --overwrite may remove it
            transfer.put(layout.record_of(layout.NAMES).encode(), f"{self.address}/{RECORD}")
            self._is_claimed = True
        try:
            while unsent := self._unsent_steps():
                with contextlib.suppress(FileNotFoundError):  # pruned: it is not among them any more
                    self._send_checkpoint(max(unsent))
            self._send_files()
        finally:
            self._note()

    def _send_files(self) -> None:
        """Send all but checkpoints. A file that fails does not keep the others; if two in a row do, the storage is to
        blame. Raises the first StorageError."""
        first, before = None, None
        for name in self._unsent():
            error = None
            try:
                self._send(name)
            except FileNotFoundError:  # replaced or removed: the next look finds what is there
                continue
            except StorageError as failure:
                error, first = failure, first or failure
                self._failed(str(failure))
            if error is not None and before is not None:
                break
            before = error
        if first is not None:
            raise first

    def _send_checkpoint(self, step: int) -> None:
        began, path = time.monotonic(), self.folder / CHECKPOINTS / f"step_{step}"
        found = store.read(path)
        if found is None:
            raise FileNotFoundError(path)

        def metrics() -> None:  # a checkpoint counts on this many bytes of them
            for name in (RECIPE, METRICS):
                if not (self.folder / name).exists():
                    raise StorageError(
                        f"{self.folder / name} is missing, and no run goes on from a checkpoint without it"
                    )
                self._send(name)

        root = f"{self.address}/{CHECKPOINTS}"
        target = f"{root}/step_{step}"
        num_bytes = remote.publish(found, target, before_complete=metrics, moved=self._counted(marker(step)))
        self._keep_note_of(marker(step), num_bytes[store.COMPLETE])
        self._note()
        seconds, mib = time.monotonic() - began, sum(num_bytes.values()) / MIB
        log.info("copied checkpoint %d to %s: %.1f MiB in %.1f s", step, root, mib, seconds)
        newest = max(step for step in self._steps() if self._has(marker(step)))
        remote.prune(root, newest=newest, keep=self.keep)

    def _send(self, name: str) -> None:
        local, target = self._stat(name), f"{self.address}/{name}"
        identity = (local.st_dev, local.st_ino, local.st_size, local.st_mtime_ns)
        known = self._copied.get(identity) if local.st_nlink > 1 else None  # of the model, as in other full exports
        if known is None or not self._copy_within(known, target, name, local.st_size):
            transfer.upload(self.folder / name, target, size=local.st_size, moved=self._counted(name))
            if local.st_nlink > 1:
                self._copied[identity] = target
        self._sent[name] = Sent(local.st_size, local.st_mtime_ns, local.st_size)

    def _copy_within(self, source: str, target: str, name: str, size: int) -> bool:
        """Return whether the storage made the file of an object of its own, which somebody may have removed."""
        try:
            transfer.copy_within(source, target, size)
        except StorageError as error:
            log.info("%s: the file is sent instead", error)
            return False
        self._counted(name)(size)
        return True

    def _keep_note_of(self, name: str, stored: int) -> None:
        local = self._stat(name)
        self._sent[name] = Sent(local.st_size, local.st_mtime_ns, stored)

    def _counted(self, name: str) -> Moved:
        """Return a function that counts the bytes of this file as they arrive, and ends the transfer once nobody
        waits."""
        moved = self._progress.begin(name)

        def counted(num_bytes: int) -> None:
            if self._closed:
                raise _ClosedError
            moved(num_bytes)

        return counted

    # ---- what is there

    def _steps(self) -> list[int]:
        """Return the steps of complete local checkpoints."""
        root = self.folder / CHECKPOINTS
        return [step for step in store.steps(root) if store.read(root / f"step_{step}") is not None]

    def _unsent_steps(self) -> list[int]:
        """Return the steps of checkpoints that are kept and not yet stored."""
        known = self._steps()
        kept = store.kept_steps(known, newest=max(known, default=0), keep=self.keep)
        return [step for step in known if step in kept and not self._has(marker(step))]

    def _unsent(self) -> Iterator[str]:
        """Yield the files besides checkpoints and result.json that are new or have changed since they were sent."""
        yield from (name for name in (RECIPE, METRICS, PAGE) if (self.folder / name).exists() and not self._has(name))
        for top in FOLDERS:
            names = sorted(_files(self.folder, top), key=lambda name: (name.split("/")[:2], _comes_last(name), name))
            yield from (name for name in names if not self._has(name))

    def _has(self, name: str) -> bool:
        """Return whether the storage has the file as it is."""
        sent = self._sent.get(name)
        if sent is None:
            return False
        try:
            local = self._stat(name)
        except FileNotFoundError:
            return False
        return (sent.size, sent.mtime_ns) == (local.st_size, local.st_mtime_ns)

    def _stat(self, name: str) -> os.stat_result:
        return (self.folder / name).stat()

    # ---- the note of it

    def _note(self) -> None:
        """Write down what the storage has, for the next process in this folder."""
        files = {name: [sent.size, sent.mtime_ns, sent.stored] for name, sent in self._sent.items()}
        try:
            atomic.write_text(self.folder / NOTES, json.dumps({"address": self.address, "files": files}) + "\n")
        except OSError as error:  # a full disk, of which the run itself speaks
            log.warning("%s: %s; a continued run sends these files once more", self.folder / NOTES, error)

    def _noted(self) -> dict[str, Sent]:
        """Read what `_note` wrote; empty if it cannot be used: files are then sent again."""
        try:
            notes = json.loads((self.folder / NOTES).read_text(encoding="utf-8"))
            files = notes["files"] if notes["address"] == self.address else {}
            return {name: Sent(*map(int, numbers)) for name, numbers in files.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s is damaged (%s): all files are sent again", self.folder / NOTES, error)
            return {}


class _ClosedError(Exception):
    """Raised in the thread when the run does not wait any longer."""


def marker(step: int) -> str:
    return f"{CHECKPOINTS}/step_{step}/{store.COMPLETE}"


def _comes_last(name: str) -> bool:
    return name.rpartition("/")[2] in LAST


def _files(folder: Path, top: str) -> Iterator[str]:
    """Yield the complete files below folder/top, as names below `folder`."""
    for parent, folders, names in os.walk(folder / top):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield (Path(parent) / name).relative_to(folder).as_posix()
