"""wfm_ds: a DeepSpeed post-trainer for diffusion world models. Importing it loads nothing heavy."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Give `wfm_ds.Run` (command/api.py), which stands above all that it uses: whoever asks for it loads that."""
    if name == "Run":
        return importlib.import_module("wfm_ds.command.api").Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
