"""The command line of DeepSpeed's runner, read as its own parser reads it: options, then a script or module, its words.

Pure, and light: it is read whenever a `deepspeed` command starts (hook.py).
"""

from __future__ import annotations

from collections.abc import Sequence

VERSION = "--wfm-version"  # asks launch.py, and nobody else, which one it is
SWITCHES = frozenset(
    (
        *("--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid"),
        *("--bind_cores_to_rank", "-q", "--quiet", "-h", "--help"),
    )
)
"""The runner's options that take no value; all others take one. Compared with the runner's parser by a test."""
# Options with a value that decide something here.
READ_HERE = (
    *("--hostfile", "--node_rank", "--master_port"),
    *("--num_gpus", "--num_accelerators", "--num_nodes", "--include", "--exclude"),
)
SHORT = {"-m": "--module", "-H": "--hostfile", "-i": "--include", "-e": "--exclude", "--num_accelerators": "--num_gpus"}


def scan(argv: Sequence[str]) -> tuple[dict[str, tuple[int, str]], int | None]:
    """The options of the runner's part as {full name: (index, value)}, and the index of the script or module name.

    Read as argparse does: `--name=value`, unambiguous beginnings of long options, values glued to short ones.
    """
    given: dict[str, tuple[int, str]] = {}
    i = 0
    while i < len(argv) and argv[i].startswith("-"):
        word, equals, value = argv[i].partition("=")
        width = 1
        if not word.startswith("--") and len(word) > len("-H"):
            word, value = argv[i][:2], argv[i][2:]  # -Hfile
        elif not equals and full_name(word) not in SWITCHES:
            value, width = " ".join(argv[i + 1 : i + 2]), 2
        given[full_name(word)] = (i, value)
        i += width
    return given, i if i < len(argv) else None


def full_name(word: str) -> str:
    """`--node_r` is --node_rank and -m is --module; options that decide nothing here stay as they are."""
    if word.startswith("--") and word not in SWITCHES:
        word = next((name for name in (*sorted(SWITCHES), *READ_HERE) if name.startswith(word)), word)
    return SHORT.get(word, word)
