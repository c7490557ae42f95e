"""Add the option `-m` to DeepSpeed's own `deepspeed` script.

The file wfm_ds_deepspeed.pth in site-packages calls `take_over` when a script named deepspeed starts. This module has
no slow imports, because it is loaded whenever a `deepspeed` command starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

PTH_FILE = Path(__file__).parent / "wfm_ds_deepspeed.pth"
SCRIPT_NAME = "deepspeed"
VERSION_OPTION = "--wfm-version"  # prints the version of launch.py; not an option of DeepSpeed
SWITCHES = frozenset(
    (
        *("--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid"),
        *("--bind_cores_to_rank", "-q", "--quiet", "-h", "--help"),
    )
)
"""DeepSpeed's options that take no value. All other options take a value."""
# Options with a value that wfm_ds.launch reads.
VALUE_OPTIONS = (
    *("--hostfile", "--node_rank", "--master_port"),
    *("--num_gpus", "--num_accelerators", "--num_nodes", "--include", "--exclude"),
)
OPTION_ALIASES = {
    "-m": "--module",
    "-H": "--hostfile",
    "-i": "--include",
    "-e": "--exclude",
    "--num_accelerators": "--num_gpus",
}


def take_over() -> None:
    """Replace this process by `python -m wfm_ds.launch` if it is a `deepspeed` command that starts wfm_ds."""
    if Path(sys.argv[0]).name == SCRIPT_NAME and is_wfm_command(sys.argv[1:]):
        os.execv(sys.executable, [sys.executable, "-m", "wfm_ds.launch", *sys.argv[1:]])


def is_wfm_command(argv: Sequence[str]) -> bool:
    """Return whether the arguments start a wfm_ds module or contain an option that DeepSpeed does not have."""
    if list(argv[:1]) == [VERSION_OPTION]:
        return True
    options, name_at = parse_runner_options(argv)
    if "--module" not in options or name_at is None:
        return False
    return argv[options["--module"][0]] == "-m" or argv[name_at].startswith("wfm_ds.")


def parse_runner_options(argv: Sequence[str]) -> tuple[dict[str, tuple[int, str]], int | None]:
    """Parse DeepSpeed's command line. Returns ({full option name: (index, value)}, index of the script or None)."""
    options: dict[str, tuple[int, str]] = {}
    i = 0
    while i < len(argv) and argv[i].startswith("-"):
        option, equals, value = argv[i].partition("=")
        num_arguments = 1
        if not option.startswith("--") and len(option) > len("-H"):
            option, value = argv[i][:2], argv[i][2:]  # -Hfile
        elif not equals and full_option_name(option) not in SWITCHES:
            value, num_arguments = " ".join(argv[i + 1 : i + 2]), 2
        options[full_option_name(option)] = (i, value)
        i += num_arguments
    return options, i if i < len(argv) else None


def full_option_name(option: str) -> str:
    """Return an option's full name, such as --node_rank for --node_r. Unknown options are returned unchanged."""
    if option.startswith("--") and option not in SWITCHES:
        option = next((name for name in (*sorted(SWITCHES), *VALUE_OPTIONS) if name.startswith(option)), option)
    return OPTION_ALIASES.get(option, option)
