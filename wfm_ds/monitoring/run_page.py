"""The HTML page of a run: a constant `index.html`, and `page/data.js`, which is rewritten while the run continues.

Browsers open it from disk without a server, so the data is stored as a script.
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

INDEX_FILE, PAGE_FOLDER = "index.html", "page"
DATA_FILE, MACHINE_FILE = f"{PAGE_FOLDER}/data.js", f"{PAGE_FOLDER}/machine.json"
TEMPLATE = Path(__file__).with_name("run_page.html")
PAGE_MARKER = (
    "<!-- the page of a run of wfm_ds -->"  # index.html without this marker is the user's and is not overwritten
)
UPDATE_INTERVAL_S = 10.0
MAX_TIME_SHARE = 0.005  # largest fraction of the run's time spent on the page, which takes longer to write in long runs
MAX_BYTES = 2 << 20
PACKAGES = ("wfm_ds", "torch", "diffusers", "transformers", "peft", "deepspeed")


def write_page(folder: Path, reader: RunReader | None = None) -> Path:
    """Write index.html and page/data.js into a run's folder. Returns the path of index.html.

    Raises FileExistsError if the folder has an index.html that is not the page of a run, and OSError if a file cannot
    be read or written.
    """
    index = folder / INDEX_FILE
    if index.exists() and not is_run_page(index):
        raise FileExistsError(f"{index} exists and is not the page of a run")
    content = (reader or RunReader(folder)).read_page()
    (folder / PAGE_FOLDER).mkdir(exist_ok=True)
    atomic.write_text(folder / DATA_FILE, encode_script(content))
    text = TEMPLATE.read_text(encoding="utf-8")
    if not index.exists() or index.read_text(encoding="utf-8") != text:
        atomic.write_text(index, text)
    return index


def is_run_page(index: Path) -> bool:
    with index.open("rb") as file:
        return PAGE_MARKER.encode() in file.read(256)


def encode_script(content: Mapping[str, Any]) -> str:
    """Return the text of data.js, with escaped HTML characters.

    If the text is longer than MAX_BYTES, the curves are omitted. If it is still too long, the samples are omitted too.
    """
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for name in ("panels", "samples"):
        if len(text) > MAX_BYTES:
            content = {**content, name: []}
            text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f"wfmRun({text});\n"


def machine_info(devices: str) -> dict[str, str]:
    facts = {"devices": devices, "system": platform.platform(), "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return facts


def try_write_page(folder: Path, reader: RunReader | None = None, *, has_warned: bool = False) -> bool:
    try:
        write_page(folder, reader)
    except Exception as error:  # noqa: BLE001  (an error in the page must not end the run)
        if not has_warned:
            kind = type(error).__name__
            log.warning("the page %s cannot be written (%s: %s); the run continues", folder / INDEX_FILE, kind, error)
        return False
    return True


@contextlib.contextmanager
def update_page_live(folder: Path, *, devices: str) -> Iterator[None]:
    """Update a run's page in a thread during the `with` block, and once at its end. Only for rank 0."""
    stop = threading.Event()
    thread = threading.Thread(target=_update_until_stopped, args=(folder, devices, stop), name="page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(3 * UPDATE_INTERVAL_S)  # if the disk hangs, the run ends without the page


def _update_until_stopped(folder: Path, devices: str, stop_event: threading.Event) -> None:
    reader, wait_s, is_over, has_warned, last_state = RunReader(folder), 0.0, False, False, None
    try:
        (folder / PAGE_FOLDER).mkdir(exist_ok=True)
        atomic.write_text(folder / MACHINE_FILE, json.dumps(machine_info(devices)) + "\n")
    except OSError as error:
        log.warning("%s cannot be written (%s); the run continues", folder / MACHINE_FILE, error)
        has_warned = True
    while not is_over:
        is_over = stop_event.wait(wait_s)
        start = time.thread_time()
        if is_over or (state := folder_state(folder)) != last_state:
            has_warned = not try_write_page(folder, reader, has_warned=has_warned) or has_warned
            last_state = None if is_over else state
        wait_s = max(UPDATE_INTERVAL_S, (time.thread_time() - start) / MAX_TIME_SHARE)


def folder_state(folder: Path) -> tuple[int, ...]:
    paths = (folder / "metrics.jsonl", folder / "logs" / "rank_0.log", folder / "samples")
    stats = [path.stat() for path in paths if path.exists()]
    return tuple(number for stat in stats for number in (stat.st_size, stat.st_mtime_ns))
