"""The page of a run: `index.html`, which never changes, and `page/data.js`, written anew while the run goes on.

Both work from the disk without a server: a script may be loaded there, and nothing else may be fetched. A disk that
does not take them is one warning; the run goes on.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wfm_ds.monitoring.run_data import RunReader
from wfm_ds.storage import atomic

log = logging.getLogger(__name__)

INDEX, FOLDER = "index.html", "page"
DATA, MACHINE = f"{FOLDER}/data.js", f"{FOLDER}/machine.json"
TEMPLATE = Path(__file__).with_name("run_page.html")
MARK = "<!-- the page of a run of wfm_ds -->"  # of our index.html: a file without it is somebody else's
EVERY_S = 10.0
SHARE = 0.005  # of the time at most that goes into the page: a long run's takes longer to write
MAX_BYTES = 2 << 20
PACKAGES = ("wfm_ds", "torch", "diffusers", "transformers", "peft", "deepspeed")


def write_page(folder: Path, reader: RunReader | None = None) -> Path:
    """Write index.html and page/data.js of the run in this folder, and return the former's path. Raises OSError, of an
    index.html that is no page of a run FileExistsError."""
    index = folder / INDEX
    if index.exists() and not is_ours(index):
        raise FileExistsError(f"{index} is there and is not the page of a run")
    content = (reader or RunReader(folder)).read()
    (folder / FOLDER).mkdir(exist_ok=True)
    atomic.write_text(folder / DATA, encoded(content))
    text = TEMPLATE.read_text(encoding="utf-8")
    if not index.exists() or index.read_text(encoding="utf-8") != text:
        atomic.write_text(index, text)
    return index


def is_ours(index: Path) -> bool:
    """Tell if a run's page has this file. Raises OSError."""
    with index.open("rb") as file:
        return MARK.encode() in file.read(256)


def encoded(content: Mapping[str, Any]) -> str:
    """Return the script of data.js, at most MAX_BYTES: prompts are anybody's words, and no text in it can end a script
    or begin a tag. Curves give way if it is too long, then samples."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for name in ("panels", "samples"):
        if len(text) > MAX_BYTES:
            text = json.dumps({**content, name: []}, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f"wfmRun({text});\n"


def machine_facts(devices: str) -> dict[str, str]:
    """Return what the run runs on: devices in words, system, versions."""
    facts = {"devices": devices, "system": platform.platform(), "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return facts


def write_or_warn(folder: Path, reader: RunReader | None = None, *, warned: bool = False) -> bool:
    """Write the page; False, with a warning unless there was one, if that cannot be done: no run ends for its page."""
    try:
        write_page(folder, reader)
    except Exception as error:  # noqa: BLE001  (whatever is wrong with a page, it is not worth a run)
        if not warned:
            log.warning(
                "the page %s is not written (%s: %s); the run goes on", folder / INDEX, type(error).__name__, error
            )
        return False
    return True


@contextlib.contextmanager
def live_page(folder: Path, *, devices: str) -> Iterator[None]:
    """Inside, a thread keeps the page of this run; at the end it is written once more. Rank 0 enters it."""
    stop = threading.Event()
    thread = threading.Thread(target=_keep, args=(folder, devices, stop), name="page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(3 * EVERY_S)  # a disk that hangs keeps the page, not the run


def _keep(folder: Path, devices: str, stop: threading.Event) -> None:
    reader, wait_s, is_over, warned, seen = RunReader(folder), 0.0, False, False, None
    try:
        (folder / FOLDER).mkdir(exist_ok=True)
        atomic.write_text(folder / MACHINE, json.dumps(machine_facts(devices)) + "\n")
    except OSError as error:
        log.warning("%s is not written (%s); the run goes on", folder / MACHINE, error)
        warned = True
    while not is_over:
        is_over = stop.wait(wait_s)
        began = time.thread_time()
        if is_over or (state := state_of(folder)) != seen:
            warned = not write_or_warn(folder, reader, warned=warned) or warned
            seen = None if is_over else state
        wait_s = max(EVERY_S, (time.thread_time() - began) / SHARE)


def state_of(folder: Path) -> tuple[int, ...]:
    """Return numbers that change when there is something new to show."""
    paths = (folder / "metrics.jsonl", folder / "logs" / "rank_0.log", folder / "samples")
    stats = [path.stat() for path in paths if path.exists()]
    return tuple(number for stat in stats for number in (stat.st_size, stat.st_mtime_ns))
