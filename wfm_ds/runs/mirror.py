"""Copies a run's folder to S3. During training, a thread uploads new files, verifies them and retries failed uploads.

    folder/.storage.json     state of the uploaded files; without it, files are uploaded again

Incomplete files and folders have hidden or .tmp names and are skipped. The newest checkpoint is uploaded first.
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

from wfm_ds.checkpoint import remote_store, store
from wfm_ds.errors import StorageError
from wfm_ds.monitoring.run_page import DATA_FILE
from wfm_ds.monitoring.tracking import RUN_ID_FILES
from wfm_ds.runs import layout
from wfm_ds.runs.layout import (
    BAD_JSON,
    CHECKPOINTS,
    EARLIER,
    METRICS_FILE,
    PAGE,
    PAGE_FOLDER,
    RECIPE_FILE,
    RECORD_FILE,
    RESULT_FILE,
)
from wfm_ds.storage import atomic, transfer
from wfm_ds.storage.transfer import ProgressCallback

log = logging.getLogger(__name__)

SENT_FILES_NAME = ".storage.json"
PASS_INTERVAL_S = 300.0  # interval for growing files; checkpoints and exports are uploaded immediately
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 60.0  # wait after the first failed pass, then doubled up to LAST_RETRY_S
MIRRORED_FOLDERS = ("samples", "safetensors", "tensorboard", "logs", EARLIER, PAGE_FOLDER)  # in addition to checkpoints
LAST_FILES = ("model_index.json", "adapter_config.json", "samples.jsonl")  # uploaded after the files they refer to
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SentFile:
    """An uploaded file: size and mtime of the local file at the upload, and size of the S3 object."""

    size: int
    mtime_ns: int
    stored_size: int


class Mirror:
    """Copies `folder` to the S3 `address`. `start` starts the upload thread, and `finish` stops it.

    Only the main thread of rank 0 may use it.
    """

    def __init__(self, folder: Path, address: str, *, keep: int) -> None:
        self.folder, self.address, self.keep = folder, address, keep
        self._sent = self._read_sent_files()
        self._copied_objects: dict[tuple[int, ...], str] = {}  # S3 objects of hard-linked files, by inode and state
        self._wakeup = threading.Event()
        self._is_finishing = False  # finish() was called
        self._complete = threading.Event()  # set when all files are uploaded after finish() was called
        self._last_progress_s = time.monotonic()
        self._most_bytes: dict[str, int] = {}  # {file: most bytes that one attempt has uploaded}
        self._is_claimed = False  # True after the record file is uploaded
        self._is_closed = False
        self.failure = ""  # why the last round of uploads failed; empty if it succeeded
        self._thread = threading.Thread(target=self._run_thread, name="mirror", daemon=True)

    def clear(self) -> None:
        """Remove all S3 objects that the record file in S3 lists. Raises StorageError if S3 fails."""
        listed = layout.read_storage_record(self.address)
        names = [name for name in transfer.list_objects(self.address) if name.partition("/")[0] in listed]
        names.sort(key=lambda name: not name.endswith(f"/{store.COMPLETE}"))
        transfer.remove_objects(f"{self.address}/{name}" for name in names)
        self._sent = {}

    def fetch_metrics(self) -> None:
        """Download the run's metrics files, unless they exist locally. Raises StorageError."""
        for name, size in transfer.list_objects(self.address).items():
            if (name == METRICS_FILE or name.partition("/")[0] == EARLIER) and not (self.folder / name).exists():
                self._fetch_file(name, size)

    def fetch_checkpoint(self, address: str) -> Path:
        """Download a checkpoint, the run's metrics and tracker ids. Returns its folder. Raises StorageError."""
        checkpoint = remote_store.read_checkpoint(address)
        stored = transfer.list_objects(self.address)
        if checkpoint is None or METRICS_FILE not in stored:
            raise StorageError(f"{address} or {self.address}/{METRICS_FILE} was just removed: start again")
        began, folder = time.monotonic(), self.folder / CHECKPOINTS / f"step_{checkpoint.step}"
        remote_store.fetch_checkpoint(checkpoint, folder)
        for name in (METRICS_FILE, *(name for name in RUN_ID_FILES if name in stored)):
            self._fetch_file(name, stored[name])
        self._mark_sent(marker_name(checkpoint.step), stored[marker_name(checkpoint.step)])
        self._write_sent_files()
        log.info("downloaded %s to %s in %.1f s", address, folder, time.monotonic() - began)
        return folder

    def newer_step(self) -> int | None:
        """Return the step of S3's newest checkpoint, or None if a local one is as new. Raises StorageError."""
        newest = remote_store.find_newest(f"{self.address}/{CHECKPOINTS}")
        return None if newest is None or newest.step <= max(self._complete_steps(), default=-1) else newest.step

    def start(self) -> None:
        """Remove result.json from S3 and start to upload. Raises StorageError, also if S3 has a newer checkpoint."""
        newer = self.newer_step()
        if newer is not None:
            raise StorageError(
                f"{self.address} has a checkpoint of step {newer}, newer than all in {self.folder}: another machine "
                "has continued this run. If it has ended, run the same command again to continue from there, else set "
                "checkpoint.storage to another address"
            )
        stored = transfer.list_objects(self.address)
        transfer.remove_objects([f"{self.address}/{RESULT_FILE}"] if RESULT_FILE in stored else [])
        self._sent = {name: sent for name, sent in self._sent.items() if stored.get(name) == sent.stored_size}
        for step in self._complete_steps():  # the file COMPLETE lists the checkpoint's files
            files = json.loads((self.folder / marker_name(step)).read_text(encoding="utf-8"))["files"]
            folder = f"{CHECKPOINTS}/step_{step}"
            if any(stored.get(f"{folder}/{name}") != size for name, size in files.items()):
                self._sent.pop(marker_name(step), None)
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        self._wakeup.set()

    def list_unverified_steps(self) -> Collection[int]:
        """Return the steps of the local checkpoints after the newest uploaded one, which must not be removed."""
        verified = max((step for step in self._complete_steps() if self._is_sent(marker_name(step))), default=-1)
        return [step for step in self._complete_steps() if step > verified]

    def finish(self, stall_s: float) -> list[str]:
        """Wait until all files are uploaded and stop the thread. Returns the names of files that are missing in S3.

        A checkpoint counts as one file. stall_s: number of seconds without progress after which to stop waiting.
        """
        self._last_progress_s, self._most_bytes = time.monotonic(), {}
        self._is_finishing = True
        self._wakeup.set()
        while (left := self._last_progress_s + stall_s - time.monotonic()) > 0 and not self._complete.wait(left):
            pass  # recompute the deadline after progress
        self._is_closed = True
        self._wakeup.set()
        if self._complete.is_set():
            self._thread.join()
            return []
        return [*(f"{CHECKPOINTS}/step_{step}" for step in self._unsent_steps()), *self._unsent_files()]

    def send_result(self) -> None:
        """Upload the run page's final data, then result.json. Raises StorageError if that fails. Call this last."""
        if (self.folder / DATA_FILE).exists():
            transfer.upload_file(self.folder / DATA_FILE, f"{self.address}/{DATA_FILE}")
        transfer.upload_file(self.folder / RESULT_FILE, f"{self.address}/{RESULT_FILE}")

    # ---- upload thread

    def _run_thread(self) -> None:
        wait_s, retry_s = PASS_INTERVAL_S, FIRST_RETRY_S
        while True:
            self._wakeup.wait(wait_s)
            self._wakeup.clear()
            if self._is_closed:
                return
            is_last = self._is_finishing  # a pass that starts now includes all files written before finish()
            try:
                self._send_all()
            except _ClosedError:
                return
            except (StorageError, OSError) as error:
                self._report_failure(str(error))
            except Exception as error:  # keep training; missing files are reported at the end
                log.exception("copying to %s failed", self.address)
                self._report_failure(f"{type(error).__name__}: {error}")
            else:
                if self.failure:
                    log.info("%s accepts uploads again", self.address)
                wait_s, retry_s, self.failure = PASS_INTERVAL_S, FIRST_RETRY_S, ""
                if is_last:
                    self._complete.set()
                    return
                continue
            wait_s, retry_s = retry_s, min(2 * retry_s, LAST_RETRY_S)

    def _report_failure(self, reason: str) -> None:
        if not self.failure:
            log.warning("%s; retrying; checkpoints stay in %s until they are uploaded", reason, self.folder)
        self.failure = reason

    def _send_all(self) -> None:
        if not self._is_claimed:  # first, so that --overwrite can remove the other files
            transfer.put_object(layout.format_record(layout.RUN_NAMES).encode(), f"{self.address}/{RECORD_FILE}")
            self._is_claimed = True
        try:
            while unsent := self._unsent_steps():
                with contextlib.suppress(FileNotFoundError):  # the checkpoint was pruned in the meantime
                    self._send_checkpoint(max(unsent))
            self._send_files()
        finally:
            self._write_sent_files()

    def _send_files(self) -> None:
        """Upload files outside of checkpoints. Stops after two failures in a row. Raises the first StorageError."""
        first, is_failing = None, False
        for name in self._unsent_files():
            try:
                self._send_file(name)
                is_failing = False
            except FileNotFoundError:  # the file was replaced or removed; the next pass retries
                continue
            except StorageError as error:
                first = first or error
                self._report_failure(str(error))
                if is_failing:
                    break
                is_failing = True
        if first is not None:
            raise first

    def _send_checkpoint(self, step: int) -> None:
        began, path = time.monotonic(), self.folder / CHECKPOINTS / f"step_{step}"
        checkpoint = store.read_checkpoint(path)
        if checkpoint is None:
            raise FileNotFoundError(path)

        def send_metrics() -> None:  # the checkpoint needs the metrics up to its step
            for name in (RECIPE_FILE, METRICS_FILE):
                if not (self.folder / name).exists():
                    raise StorageError(f"{self.folder / name} is missing, and no run can continue without it")
                self._send_file(name)
            for name in RUN_ID_FILES:
                if (self.folder / name).exists() and not self._is_sent(name):
                    self._send_file(name)

        root = f"{self.address}/{CHECKPOINTS}"
        target = f"{root}/step_{step}"
        num_bytes = remote_store.publish_checkpoint(
            checkpoint, target, before_complete=send_metrics, moved=self._byte_counter(marker_name(step))
        )
        self._mark_sent(marker_name(step), num_bytes[store.COMPLETE])
        self._write_sent_files()
        seconds, mib = time.monotonic() - began, sum(num_bytes.values()) / MIB
        log.info("uploaded checkpoint %d to %s: %.1f MiB in %.1f s", step, root, mib, seconds)
        newest = max(step for step in self._complete_steps() if self._is_sent(marker_name(step)))
        remote_store.prune_checkpoints(root, newest=newest, keep=self.keep)

    def _send_file(self, name: str) -> None:
        local, target = self._stat_file(name), f"{self.address}/{name}"
        identity = (local.st_dev, local.st_ino, local.st_size, local.st_mtime_ns)
        known = self._copied_objects.get(identity) if local.st_nlink > 1 else None  # model file shared by full exports
        if known is None or not self._copy_in_storage(known, target, name, local.st_size):
            transfer.upload_file(self.folder / name, target, size=local.st_size, on_progress=self._byte_counter(name))
            if local.st_nlink > 1:
                self._copied_objects[identity] = target
        self._sent[name] = SentFile(local.st_size, local.st_mtime_ns, local.st_size)

    def _fetch_file(self, name: str, size: int) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        transfer.download_file(f"{self.address}/{name}", path, size=size)

    def _copy_in_storage(self, source: str, target: str, name: str, size: int) -> bool:
        """Copy an object within S3. Returns False if the copy fails, for example because `source` was removed."""
        try:
            transfer.copy_object(source, target, size)
        except StorageError as error:
            log.info("%s: uploading the file instead", error)
            return False
        self._byte_counter(name)(size)
        return True

    def _mark_sent(self, name: str, stored: int) -> None:
        local = self._stat_file(name)
        self._sent[name] = SentFile(local.st_size, local.st_mtime_ns, stored)

    def _byte_counter(self, name: str) -> ProgressCallback:
        """Return a function that records upload progress. Call it with the number of bytes of each uploaded chunk.

        The function aborts the upload if `finish` has stopped waiting.
        """
        sent = 0

        def count_bytes(num_bytes: int) -> None:
            nonlocal sent
            if self._is_closed:
                raise _ClosedError
            sent += num_bytes
            if sent > self._most_bytes.get(name, -1):
                self._most_bytes[name], self._last_progress_s = sent, time.monotonic()

        return count_bytes

    # ---- local files

    def _complete_steps(self) -> list[int]:
        root = self.folder / CHECKPOINTS
        return [step for step in store.list_steps(root) if store.read_checkpoint(root / f"step_{step}") is not None]

    def _unsent_steps(self) -> list[int]:
        steps = self._complete_steps()
        retained = store.steps_to_keep(steps, newest=max(steps, default=0), keep=self.keep)
        return [step for step in steps if step in retained and not self._is_sent(marker_name(step))]

    def _unsent_files(self) -> Iterator[str]:
        single_files = (RECIPE_FILE, METRICS_FILE, PAGE, *RUN_ID_FILES)
        files = [name for name in single_files if (self.folder / name).exists()]
        yield from (name for name in files if not self._is_sent(name))
        for top in MIRRORED_FOLDERS:
            names = [
                (name.split("/")[:2], Path(name).name in LAST_FILES, name) for name in _list_files(self.folder, top)
            ]
            yield from (name for *_, name in sorted(names) if not self._is_sent(name))

    def _is_sent(self, name: str) -> bool:
        sent = self._sent.get(name)
        if sent is None:
            return False
        try:
            local = self._stat_file(name)
        except FileNotFoundError:
            return False
        return (sent.size, sent.mtime_ns) == (local.st_size, local.st_mtime_ns)

    def _stat_file(self, name: str) -> os.stat_result:
        return (self.folder / name).stat()

    # ---- state file

    def _write_sent_files(self) -> None:
        files = {name: [sent.size, sent.mtime_ns, sent.stored_size] for name, sent in self._sent.items()}
        try:
            atomic.write_text(
                self.folder / SENT_FILES_NAME, json.dumps({"address": self.address, "files": files}) + "\n"
            )
        except OSError as error:  # a full disk, which the run reports itself
            log.warning("%s: %s; a continued run will upload these files again", self.folder / SENT_FILES_NAME, error)

    def _read_sent_files(self) -> dict[str, SentFile]:
        try:
            state = json.loads((self.folder / SENT_FILES_NAME).read_text(encoding="utf-8"))
            files = state["files"] if state["address"] == self.address else {}
            return {name: SentFile(*map(int, numbers)) for name, numbers in files.items()}
        except FileNotFoundError:
            return {}
        except BAD_JSON as error:
            log.warning("%s is damaged (%s): uploading all files again", self.folder / SENT_FILES_NAME, error)
            return {}


class _ClosedError(Exception):
    """Raised in the upload thread to stop an upload that the run no longer waits for."""


def marker_name(step: int) -> str:
    return f"{CHECKPOINTS}/step_{step}/{store.COMPLETE}"


def _list_files(folder: Path, top: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder / top):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield (Path(parent) / name).relative_to(folder).as_posix()
