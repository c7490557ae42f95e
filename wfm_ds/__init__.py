"""wfm_ds: a DeepSpeed post-trainer for diffusion world models. Importing this package is fast."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `wfm_ds.Run` and its dependencies on first access."""
    if name == "Run":
        return importlib.import_module("wfm_ds.cli.api").Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
