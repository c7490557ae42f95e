"""`-m` for the `deepspeed` script of DeepSpeed itself, whichever package was installed last.

Two packages with a script of one name overwrite it in the order of their installation, and uninstalling one removes it
for both. So the script stays DeepSpeed's. wfm_ds_deepspeed.pth, which lies beside the installed packages, calls
`take_over` when an interpreter starts on a script called deepspeed; what is asked of wfm_ds goes to launch.py then,
anything else to DeepSpeed as ever.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from wfm_ds.distributed.runner_line import VERSION, scan

PTH = Path(__file__).parent / "wfm_ds_deepspeed.pth"
SCRIPT = "deepspeed"


def take_over() -> None:
    """Become `python -m wfm_ds.launch` if this process is the script, and its line is one for wfm_ds."""
    if Path(sys.argv[0]).name == SCRIPT and is_ours(sys.argv[1:]):
        os.execv(sys.executable, [sys.executable, "-m", "wfm_ds.launch", *sys.argv[1:]])


def is_ours(argv: Sequence[str]) -> bool:
    """Return whether the line uses `-m`, which DeepSpeed does not know, or starts a module of wfm_ds."""
    if list(argv[:1]) == [VERSION]:
        return True
    given, name_at = scan(argv)
    if "--module" not in given or name_at is None:
        return False
    return argv[given["--module"][0]] == "-m" or argv[name_at].startswith("wfm_ds.")
