"""Check and repair of the `deepspeed` script of this environment, which must support `-m`."""

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

TWIN = "deepspeed.pt"  # DeepSpeed also installs the script under this name
ANSWER_TIMEOUT_S = 60
NAME = "deepspeed command"
ADVICE = "wfm doctor --fix; meanwhile wfm train, or deepspeed --module wfm_ds.train"
REINSTALL = "pip install --force-reinstall --no-deps deepspeed"


def scripts_folder() -> Path:
    return Path(sysconfig.get_path("scripts"))


def packages_folder() -> Path:
    return Path(sysconfig.get_path("purelib"))


def script_finding(scripts: Path) -> Finding:
    """Check that `deepspeed -m wfm_ds.train` works, by running the script in this folder with the version option."""
    script = scripts / SCRIPT
    if not script.is_file():
        return Finding(NAME, "warning", f"{script} does not exist", ADVICE)
    try:
        process = subprocess.run(
            [script, VERSION], capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return Finding(NAME, "warning", f"{script} does not run: {error}", REINSTALL)
    if process.stdout == f"wfm_ds {__version__}\n":
        return Finding(NAME, "ok", f"{script} supports -m")
    if process.stdout.startswith("wfm_ds "):
        return Finding(NAME, "warning", f"{script} starts another version: {process.stdout.strip()}", ADVICE)
    return Finding(NAME, "warning", f"{script} does not support -m", ADVICE)


def mend(scripts: Path, packages: Path) -> Iterator[str]:
    """Restore the missing hook and script, and yield a message for each change.

    The script may be missing after uninstalling a version of wfm_ds that installed its own.
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
    """Repair the command, print the changes and the check's result, and return 0 if the command works."""
    messages = list(mend(scripts_folder(), packages_folder()))
    finding = script_finding(scripts_folder())
    sys.stdout.write("".join(f"{message}\n" for message in messages) + f"{finding.text}\n")
    return 0 if finding.level == "ok" else 1
