"""Check and repair the environment's `deepspeed` script, which must support `-m`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from wfm_ds import __version__
from wfm_ds.cli.doctor.finding import DoctorFinding
from wfm_ds.distributed.hook import PTH_FILE, SCRIPT_NAME, VERSION_OPTION

TWIN_SCRIPT = "deepspeed.pt"  # DeepSpeed also installs the script under this name
ANSWER_TIMEOUT_S = 60
FINDING_NAME = "deepspeed command"
FIX_ADVICE = "wfm doctor --fix; meanwhile wfm train, or deepspeed --module wfm_ds.train"
REINSTALL_COMMAND = "pip install --force-reinstall --no-deps deepspeed"


def scripts_folder() -> Path:
    return Path(sysconfig.get_path("scripts"))


def script_finding(scripts: Path) -> DoctorFinding:
    script = scripts / SCRIPT_NAME
    if not script.is_file():
        return DoctorFinding(FINDING_NAME, "warning", f"{script} does not exist", FIX_ADVICE)
    try:
        answer = subprocess.run(
            [script, VERSION_OPTION], capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, stdin=subprocess.DEVNULL
        ).stdout
    except (subprocess.TimeoutExpired, OSError) as error:
        return DoctorFinding(FINDING_NAME, "warning", f"{script} does not run: {error}", REINSTALL_COMMAND)
    if answer == f"wfm_ds {__version__}\n":
        return DoctorFinding(FINDING_NAME, "ok", f"{script} supports -m")
    is_other = answer.startswith("wfm_ds ")
    problem = f"starts another version: {answer.strip()}" if is_other else "does not support -m"
    return DoctorFinding(FINDING_NAME, "warning", f"{script} {problem}", FIX_ADVICE)


def repair_script(scripts: Path, packages: Path) -> Iterator[str]:
    """Restore wfm_ds's .pth file in `packages` and the `deepspeed` script in `scripts`. Yield a message per change."""
    hook = packages / PTH_FILE.name
    if not hook.is_file() or hook.read_bytes() != PTH_FILE.read_bytes():
        shutil.copyfile(PTH_FILE, hook)
        yield f"wrote {hook}"
    script, twin = scripts / SCRIPT_NAME, scripts / TWIN_SCRIPT
    if script.is_file():
        return
    if twin.is_file():
        shutil.copy(twin, script)
        yield f"wrote {script}, which was missing"
    else:
        yield f"{script} is missing: {REINSTALL_COMMAND}"


def run_fix() -> int:
    messages = list(repair_script(scripts_folder(), Path(sysconfig.get_path("purelib"))))
    finding = script_finding(scripts_folder())
    sys.stdout.write("".join(f"{message}\n" for message in messages) + f"{finding.text}\n")
    return 0 if finding.level == "ok" else 1
