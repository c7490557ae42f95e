"""Copy of a run's folder in S3: a thread uploads new files during training, verifies them and retries.

    folder/.storage.json     state of the uploaded files; without it, files are uploaded again

Incomplete files and folders have hidden or .tmp names (atomic.py, store.py), so the thread finds new files by listing
the folder. The newest checkpoint is uploaded first. Growing files (logs, metrics) are uploaded as a whole each time.
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
PASS_S = 300.0  # interval for growing files; checkpoints and exports are uploaded immediately
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 60.0  # waiting time after failed passes: doubles from the first to the last
FOLDERS = ("samples", "safetensors", "tensorboard", "logs", EARLIER, PAGE_FOLDER)  # in addition to checkpoints
LAST = ("model_index.json", "adapter_config.json", "samples.jsonl")  # uploaded after the files they refer to
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sent:
    """State of a local file when it was uploaded, and the size of its object in the storage."""

    size: int
    mtime_ns: int
    stored: int


class Progress:
    """Time of the last upload progress.

    A repeated upload only counts as progress once it exceeds the bytes of the best earlier attempt, so that a storage
    that always fails at the same point counts as stalled.
    """

    def __init__(self) -> None:
        self.at = time.monotonic()
        self._furthest: dict[str, int] = {}  # bytes of the best attempt, by name

    def begin(self, name: str) -> Moved:
        """Return a function that counts the bytes of a new attempt to upload this file."""
        sent = 0

        def count_bytes(num_bytes: int) -> None:
            nonlocal sent
            sent += num_bytes
            if sent > self._furthest.get(name, -1):
                self._furthest[name] = sent
                self.at = time.monotonic()

        return count_bytes


class Mirror:
    """Copies `folder` to `address` between `start` and `finish`. Rank 0 only; public methods belong to the main
    thread."""

    def __init__(self, folder: Path, address: str, *, keep: int) -> None:
        self.folder, self.address, self.keep = folder, address, keep
        self._sent = self._noted()
        self._copied: dict[tuple[int, ...], str] = {}  # uploaded objects of hard-linked files, by identity
        self._wakeup = threading.Event()
        self._finishing, self._complete = False, threading.Event()  # the next complete pass is the last one; it is done
        self._progress = Progress()
        self._is_claimed = False  # the record of the run's names is uploaded
        self._closed, self._failure = False, ""
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def clear(self) -> None:
        """Remove the files listed in the storage's record. Raises StorageError."""
        listed = layout.recorded_at(self.address)
        names = [name for name in transfer.listing(self.address) if name.partition("/")[0] in listed]
        names.sort(key=lambda name: not name.endswith(f"/{store.COMPLETE}"))
        transfer.remove(f"{self.address}/{name}" for name in names)
        self._sent = {}

    def fetch_metrics(self) -> None:
        """Download the metrics of attempts without a checkpoint, unless they are in the folder. Raises StorageError."""
        for name, size in transfer.listing(self.address).items():
            path = self.folder / name
            if (name == METRICS or name.partition("/")[0] == EARLIER) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                transfer.download(f"{self.address}/{name}", path, size=size)

    def fetch(self, address: str) -> Path:
        """Download a checkpoint and its metrics into the folder, and return the checkpoint's folder. Raises
        StorageError."""
        checkpoint = remote.read(address)
        stored = transfer.listing(self.address)
        if checkpoint is None or METRICS not in stored:
            raise StorageError(f"{address} or {self.address}/{METRICS} was just removed: start again")
        began, folder = time.monotonic(), self.folder / CHECKPOINTS / f"step_{checkpoint.step}"
        remote.fetch(checkpoint, folder)
        transfer.download(f"{self.address}/{METRICS}", self.folder / METRICS, size=stored[METRICS])
        self._keep_note_of(marker(checkpoint.step), stored[marker(checkpoint.step)])
        self._note()
        log.info("downloaded %s to %s in %.1f s", address, folder, time.monotonic() - began)
        return folder

    def newer(self) -> int | None:
        """Return the step of the storage's newest complete checkpoint if it is newer than all local ones, else None.
        Raises StorageError."""
        newest = remote.newest(f"{self.address}/{CHECKPOINTS}")
        return None if newest is None or newest.step <= max(self._steps(), default=-1) else newest.step

    def start(self) -> None:
        """Start uploading, and remove result.json from the storage. Raises StorageError, also if the storage has a
        newer checkpoint than the folder."""
        newer = self.newer()
        if newer is not None:
            raise StorageError(
                f"{self.address} has a checkpoint of step {newer}, newer than all in {self.folder}: another machine "
                "has continued this run. If it has ended, run the same command again to continue from there, else set "
                "checkpoint.storage to another address"
            )
        stored = transfer.listing(self.address)
        transfer.remove([f"{self.address}/{RESULT}"] if RESULT in stored else [])
        self._sent = {name: sent for name, sent in self._sent.items() if stored.get(name) == sent.stored}
        for step in self._steps():  # COMPLETE lists its files
            files = json.loads((self.folder / marker(step)).read_text(encoding="utf-8"))["files"]
            folder = f"{CHECKPOINTS}/step_{step}"
            if any(stored.get(f"{folder}/{name}") != size for name, size in files.items()):
                self._sent.pop(marker(step), None)
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Upload complete files now instead of at the next pass."""
        self._wakeup.set()

    def unverified(self) -> Collection[int]:
        """Return the steps of local checkpoints that must be kept: neither they nor newer ones are in the storage."""
        verified = max((step for step in self._steps() if self._has(marker(step))), default=-1)
        return [step for step in self._steps() if step > verified]

    def finish(self, stall_s: float) -> list[str]:
        """Wait until all files are uploaded, or for `stall_s` seconds without progress, and stop the thread.

        Returns the names of missing files.
        """
        self._progress = Progress()
        self._finishing = True
        self._wakeup.set()
        while (left := self._progress.at + stall_s - time.monotonic()) > 0 and not self._complete.wait(left):
            pass  # recompute the deadline after progress
        self._closed = True
        self._wakeup.set()
        if self._complete.is_set():
            self._thread.join()
            return []
        return self.missing()

    @property
    def failure(self) -> str:
        """Reason why the last pass failed; empty if it succeeded."""
        return self._failure

    def missing(self) -> list[str]:
        """Return the names of files that are missing or outdated in the storage. A checkpoint counts as one."""
        return [*(f"{CHECKPOINTS}/step_{step}" for step in self._unsent_steps()), *self._unsent()]

    def send_result(self) -> None:
        """Upload the final page data and result.json, after all other files. Raises StorageError."""
        if (self.folder / DATA).exists():
            transfer.upload(self.folder / DATA, f"{self.address}/{DATA}")
        transfer.upload(self.folder / RESULT, f"{self.address}/{RESULT}")

    # ---- upload thread

    def _run(self) -> None:
        wait_s, retry_s = PASS_S, FIRST_RETRY_S
        while True:
            self._wakeup.wait(wait_s)
            self._wakeup.clear()
            if self._closed:
                return
            is_last = self._finishing  # a pass that starts now includes all files written before finish()
            try:
                self._pass()
            except _ClosedError:
                return
            except (StorageError, OSError) as error:
                self._failed(str(error))
            except Exception as error:  # keep training; missing files are reported at the end
                log.exception("copying to %s failed", self.address)
                self._failed(f"{type(error).__name__}: {error}")
            else:
                if self._failure:
                    log.info("%s accepts uploads again", self.address)
                wait_s, retry_s, self._failure = PASS_S, FIRST_RETRY_S, ""
                if is_last:
                    self._complete.set()
                    return
                continue
            wait_s, retry_s = retry_s, min(2 * retry_s, LAST_RETRY_S)

    def _failed(self, reason: str) -> None:
        if not self._failure:
            log.warning("%s; retrying, and removing nothing from %s meanwhile", reason, self.folder)
        self._failure = reason

    def _pass(self) -> None:
        """Upload all missing files. Raises StorageError and OSError."""
        if not self._is_claimed:  # first, so that --overwrite can remove the other files
            transfer.put(layout.record_of(layout.NAMES).encode(), f"{self.address}/{RECORD}")
            self._is_claimed = True
        try:
            while unsent := self._unsent_steps():
                with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                    self._send_checkpoint(max(unsent))
            self._send_files()
        finally:
            self._note()

    def _send_files(self) -> None:
        """Upload all files except checkpoints. Stop after two consecutive failures. Raises the first StorageError."""
        first, previous = None, None
        for name in self._unsent():
            error = None
            try:
                self._send(name)
            except FileNotFoundError:  # replaced or removed: the next pass retries
                continue
            except StorageError as failure:
                error, first = failure, first or failure
                self._failed(str(failure))
            if error is not None and previous is not None:
                break
            previous = error
        if first is not None:
            raise first

    def _send_checkpoint(self, step: int) -> None:
        began, path = time.monotonic(), self.folder / CHECKPOINTS / f"step_{step}"
        checkpoint = store.read(path)
        if checkpoint is None:
            raise FileNotFoundError(path)

        def send_metrics() -> None:  # the checkpoint needs the metrics up to its step
            for name in (RECIPE, METRICS):
                if not (self.folder / name).exists():
                    raise StorageError(
                        f"{self.folder / name} is missing, and no run can continue from a checkpoint without it"
                    )
                self._send(name)

        root = f"{self.address}/{CHECKPOINTS}"
        target = f"{root}/step_{step}"
        num_bytes = remote.publish(checkpoint, target, before_complete=send_metrics, moved=self._counted(marker(step)))
        self._keep_note_of(marker(step), num_bytes[store.COMPLETE])
        self._note()
        seconds, mib = time.monotonic() - began, sum(num_bytes.values()) / MIB
        log.info("uploaded checkpoint %d to %s: %.1f MiB in %.1f s", step, root, mib, seconds)
        newest = max(step for step in self._steps() if self._has(marker(step)))
        remote.prune(root, newest=newest, keep=self.keep)

    def _send(self, name: str) -> None:
        local, target = self._stat(name), f"{self.address}/{name}"
        identity = (local.st_dev, local.st_ino, local.st_size, local.st_mtime_ns)
        known = self._copied.get(identity) if local.st_nlink > 1 else None  # model file shared by full exports
        if known is None or not self._copy_within(known, target, name, local.st_size):
            transfer.upload(self.folder / name, target, size=local.st_size, moved=self._counted(name))
            if local.st_nlink > 1:
                self._copied[identity] = target
        self._sent[name] = Sent(local.st_size, local.st_mtime_ns, local.st_size)

    def _copy_within(self, source: str, target: str, name: str, size: int) -> bool:
        """Copy an uploaded object inside the storage. Return False if that fails, for example because it was
        removed."""
        try:
            transfer.copy_within(source, target, size)
        except StorageError as error:
            log.info("%s: uploading the file instead", error)
            return False
        self._counted(name)(size)
        return True

    def _keep_note_of(self, name: str, stored: int) -> None:
        local = self._stat(name)
        self._sent[name] = Sent(local.st_size, local.st_mtime_ns, stored)

    def _counted(self, name: str) -> Moved:
        """Return a function that counts the uploaded bytes of a file, and aborts the upload after `finish`."""
        count_bytes = self._progress.begin(name)

        def count_or_abort(num_bytes: int) -> None:
            if self._closed:
                raise _ClosedError
            count_bytes(num_bytes)

        return count_or_abort

    # ---- local files

    def _steps(self) -> list[int]:
        """Return the steps of complete local checkpoints."""
        root = self.folder / CHECKPOINTS
        return [step for step in store.steps(root) if store.read(root / f"step_{step}") is not None]

    def _unsent_steps(self) -> list[int]:
        """Return the steps of retained checkpoints that are not yet uploaded."""
        steps = self._steps()
        retained = store.kept_steps(steps, newest=max(steps, default=0), keep=self.keep)
        return [step for step in steps if step in retained and not self._has(marker(step))]

    def _unsent(self) -> Iterator[str]:
        """Yield new and changed files, except checkpoints and result.json."""
        yield from (name for name in (RECIPE, METRICS, PAGE) if (self.folder / name).exists() and not self._has(name))
        for top in FOLDERS:
            names = sorted(_files(self.folder, top), key=lambda name: (name.split("/")[:2], _comes_last(name), name))
            yield from (name for name in names if not self._has(name))

    def _has(self, name: str) -> bool:
        """Return whether the current version of the file is uploaded."""
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

    # ---- state file

    def _note(self) -> None:
        """Save the state of the uploads for the next process in this folder."""
        files = {name: [sent.size, sent.mtime_ns, sent.stored] for name, sent in self._sent.items()}
        try:
            atomic.write_text(self.folder / NOTES, json.dumps({"address": self.address, "files": files}) + "\n")
        except OSError as error:  # a full disk, which the run reports itself
            log.warning("%s: %s; a continued run will upload these files again", self.folder / NOTES, error)

    def _noted(self) -> dict[str, Sent]:
        """Load the state of the uploads. Empty if it is missing or invalid; files are then uploaded again."""
        try:
            state = json.loads((self.folder / NOTES).read_text(encoding="utf-8"))
            files = state["files"] if state["address"] == self.address else {}
            return {name: Sent(*map(int, numbers)) for name, numbers in files.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s is damaged (%s): uploading all files again", self.folder / NOTES, error)
            return {}


class _ClosedError(Exception):
    """Raised in the thread when the run no longer waits for uploads."""


def marker(step: int) -> str:
    return f"{CHECKPOINTS}/step_{step}/{store.COMPLETE}"


def _comes_last(name: str) -> bool:
    return name.rpartition("/")[2] in LAST


def _files(folder: Path, top: str) -> Iterator[str]:
    """Yield the complete files in folder/top, as paths relative to `folder`."""
    for parent, folders, names in os.walk(folder / top):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield (Path(parent) / name).relative_to(folder).as_posix()
