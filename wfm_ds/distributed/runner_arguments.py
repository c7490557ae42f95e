"""Parse the command line of DeepSpeed's runner like its own parser: options, a script or module, and its arguments.

No heavy imports, because this module is loaded whenever a `deepspeed` command starts (hook.py).
"""

from __future__ import annotations

from collections.abc import Sequence

VERSION_OPTION = "--wfm-version"  # prints the version of launch.py; not an option of DeepSpeed
SWITCHES = frozenset(
    (
        *("--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid"),
        *("--bind_cores_to_rank", "-q", "--quiet", "-h", "--help"),
    )
)
"""The runner's options without a value; all others have a value. A test compares this set with the runner's parser."""
# Options with a value that this package reads.
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


def parse_runner_options(argv: Sequence[str]) -> tuple[dict[str, tuple[int, str]], int | None]:
    """Return ({full option name: (index, value)}, index of the script or module name).

    The index is None if there is no script or module. Like argparse, this function accepts `--name=value`, unambiguous
    prefixes of long options, and `-Xvalue`.
    """
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
    """Return an option's full name: --node_rank for --node_r, --module for -m. Unknown options are unchanged."""
    if option.startswith("--") and option not in SWITCHES:
        option = next((name for name in (*sorted(SWITCHES), *VALUE_OPTIONS) if name.startswith(option)), option)
    return OPTION_ALIASES.get(option, option)
