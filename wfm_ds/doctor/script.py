"""The `deepspeed` script of this environment: does it understand `-m`, and how to put that right."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from wfm_ds import __version__
from wfm_ds.distributed.hook import PTH, SCRIPT
from wfm_ds.distributed.runner_line import VERSION
from wfm_ds.doctor.finding import Finding

TWIN = "deepspeed.pt"  # DeepSpeed installs the same script by this name too
ANSWER_TIMEOUT_S = 60
NAME = "deepspeed command"
ADVICE = "wfm doctor --fix; meanwhile wfm train, or deepspeed --module wfm_ds.train"
REINSTALL = "pip install --force-reinstall --no-deps deepspeed"


def scripts_folder() -> Path:
    return Path(sysconfig.get_path("scripts"))


def packages_folder() -> Path:
    return Path(sysconfig.get_path("purelib"))


def script_finding(scripts: Path) -> Finding:
    """Return whether `deepspeed -m wfm_ds.train` works with the script in this folder: it is asked for our version."""
    script = scripts / SCRIPT
    if not script.is_file():
        return Finding(NAME, "warning", f"there is no {script}", ADVICE)
    try:
        told = subprocess.run(
            [script, VERSION], capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return Finding(NAME, "warning", f"{script} does not run: {error}", REINSTALL)
    if told.stdout == f"wfm_ds {__version__}\n":
        return Finding(NAME, "ok", f"{script} knows -m")
    if told.stdout.startswith("wfm_ds "):
        return Finding(NAME, "warning", f"{script} starts another version, {told.stdout.strip()}", ADVICE)
    return Finding(NAME, "warning", f"{script} does not know -m", ADVICE)


def mend(scripts: Path, packages: Path) -> Iterator[str]:
    """Put back what the command needs and lacks, and say what was done; nothing where nothing was to do.

    The hook may have been removed by hand, the script by the uninstall of a version of wfm_ds that had one of its own.
    """
    hook = packages / PTH.name
    if not hook.is_file() or hook.read_bytes() != PTH.read_bytes():
        shutil.copyfile(PTH, hook)
        yield f"wrote {hook}"
    script, twin = scripts / SCRIPT, scripts / TWIN
    if script.is_file():
        return
    if twin.is_file():
        shutil.copy(twin, script)
        yield f"wrote {script}, which was missing"
    else:
        yield f"{script} is missing: {REINSTALL}"


def fix() -> int:
    """Mend this environment and print what was done and found. Returns 0 if the command works then."""
    done = list(mend(scripts_folder(), packages_folder()))
    found = script_finding(scripts_folder())
    sys.stdout.write("".join(f"{line}\n" for line in done) + f"{found.text}\n")
    return 0 if found.level == "ok" else 1
