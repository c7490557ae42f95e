"""Processes of a day's lines: time limits, compile caches, and, in a rehearsal, forks that share one import."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import runs
from benchmarks.gpu.calls import CallLine

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
PRELOADED = ["benchmarks.gpu.__main__", "wfm_ds.train", "wfm_ds.training.rl", "wfm_ds.training.sft", "pytest"]
Record = dict[str, Any]


def run_line(line: CallLine, log: Path, caches: Path, *, forked: bool) -> Record:
    """Run a line and return its record. caches: folder with the compile caches of earlier lines.

    Each line has its own compile cache, because a process that is killed while it compiles leaves files that no
    other process can read. It starts with a copy of the cache of `line.cache`. Only a line that was not killed passes
    its cache on. forked: run the line in a fork of a process that has imported everything; only for CPUs.
    """
    with tempfile.TemporaryDirectory(prefix="wfm-line-") as temporary:
        rows, cache = Path(temporary) / "rows.json", Path(temporary) / "compiled"
        unpack_cache(caches, line.cache, cache)
        command = [*line.command, *(["--json", str(rows)] if line.rows else [])]
        environment = {**os.environ, CACHE_VARIABLE: str(cache)}
        if not torch.cuda.is_available():
            environment["WFM_TEST_DEVICE"] = "cpu"
        began = time.monotonic()
        start = run_forked if forked else run_command
        status = start(command, log, environment, line.limit_s)
        seconds = time.monotonic() - began
        if line.keeps_cache and status == "done":
            pack_cache(cache, caches, line.name)
        found = json.loads(rows.read_text()) if rows.exists() else []
    said = last_words(log, found)
    shown = "" if status == "done" and line.rows else said[:200]
    about = {"command": " ".join(command[1:]), "group": line.group}
    return {"status": status, "s": seconds, "said": shown, **about, "rows": found}


def last_words(log: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the first error of the rows, else the last line of the output."""
    lines = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
    errors = [str(row["error"]) for row in rows if "error" in row]
    return errors[0] if errors else lines[-1].strip() if lines else ""


def run_command(command: Sequence[str], log: Path, environment: Mapping[str, str], limit_s: float) -> str:
    """Return `done`, or a text about another end. At the limit, the process is killed with all its children."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=runs.ROOT, env=environment, start_new_session=True
        )
        try:
            return describe_end(process.wait(timeout=limit_s))
        except subprocess.TimeoutExpired:
            return describe_kill(limit_s)
        finally:
            kill_group(process.pid)
            process.wait()


def run_forked(command: Sequence[str], log: Path, environment: Mapping[str, str], limit_s: float) -> str:
    """Run `PYTHON -m MODULE ...` like `run_command`, in a fork of a process that has imported PRELOADED."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=run_module, args=(command[2:], str(log), dict(environment)))
    log.touch()
    process.start()
    assert process.pid is not None
    try:
        process.join(limit_s)
        code = process.exitcode
    finally:
        kill_group(process.pid)
        process.join()
    return describe_kill(limit_s) if code is None else describe_end(code)


def run_module(command: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    """Run `python -m COMMAND` in this process, as the leader of a process group, with its output in the log.

    torch.compile only traces, because generating code for a CPU takes minutes. Other tests run compiled blocks.
    """
    torch.compile = trace_only(torch.compile)
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(runs.ROOT)
    sys.argv = list(command)
    code = 1
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code + "\n")
    except Exception:  # noqa: BLE001, top level of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def trace_only(compile_function: Any) -> Any:
    """Return a replacement of torch.compile that traces graphs and runs them without generated code."""

    def compile_eagerly(model: Any, *, options: Any = None, **settings: Any) -> Any:
        return compile_function(model, backend="eager", **settings)

    return compile_eagerly


def describe_end(code: int) -> str:
    return "done" if code == 0 else f"failed ({code})"


def describe_kill(limit_s: float) -> str:
    return f"killed at its limit of {limit_s:.0f} s"


def kill_group(group: int) -> None:
    """Kill all processes of a process group, which may have ended."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def cache_archive(caches: Path, line: str) -> Path:
    return caches / f"{line.replace(' ', '-')}.tar.gz"


def pack_cache(folder: Path, caches: Path, line: str) -> None:
    """Write the compile cache of a line as one file."""
    if not folder.exists():  # nothing was compiled
        return
    caches.mkdir(exist_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(folder, arcname=".")
    file = cache_archive(caches, line)
    part = file.with_suffix(".part")
    part.write_bytes(packed.getvalue())
    part.replace(file)


def unpack_cache(caches: Path, line: str, folder: Path) -> None:
    """Unpack the compile cache of a line, if it exists, into a new folder."""
    folder.mkdir()
    file = cache_archive(caches, line)
    if not line or not file.exists():
        return
    try:
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")
    except (OSError, EOFError, zlib.error, tarfile.TarError):  # a damaged archive: compile again
        shutil.rmtree(folder)
        folder.mkdir()
