"""Add the option `-m` to DeepSpeed's own `deepspeed` script.

This package does not install a script called deepspeed. If two packages installed a script of the same name, the later
one would overwrite the other, and uninstalling one would remove the script of both. Instead, wfm_ds_deepspeed.pth in
site-packages calls `take_over` when a script named deepspeed starts. Commands for wfm_ds are passed to launch.py, and
DeepSpeed runs all others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from wfm_ds.distributed.runner_arguments import VERSION_OPTION, parse_runner_options

PTH_FILE = Path(__file__).parent / "wfm_ds_deepspeed.pth"
SCRIPT_NAME = "deepspeed"


def take_over() -> None:
    """Replace this process by `python -m wfm_ds.launch` if it runs `deepspeed` with a command for wfm_ds."""
    if Path(sys.argv[0]).name == SCRIPT_NAME and is_wfm_command(sys.argv[1:]):
        os.execv(sys.executable, [sys.executable, "-m", "wfm_ds.launch", *sys.argv[1:]])


def is_wfm_command(argv: Sequence[str]) -> bool:
    """Return whether these arguments are a command for wfm_ds.

    They are if they start a wfm_ds module, or use `-m` or --wfm-version, which DeepSpeed lacks.
    """
    if list(argv[:1]) == [VERSION_OPTION]:
        return True
    options, name_at = parse_runner_options(argv)
    if "--module" not in options or name_at is None:
        return False
    return argv[options["--module"][0]] == "-m" or argv[name_at].startswith("wfm_ds.")
