"""Defaults shared by the recipe schema and command-line options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

AttentionName = Literal["auto", "native", "cudnn", "flash", "flash3", "sage"]
Checkpointing = bool | Literal["attention"]  # model.gradient_checkpointing
TINY_FOLDER = "tiny"  # folder of the tiny models in the user's cache
DEFAULT_FPS = 16.0
DEFAULT_EVAL_STEPS = 40
DEFAULT_GUIDANCE_SCALE = 1.0
DEFAULT_MAX_FAILED_FRACTION = 0.2  # of the samples of an RL step


def user_cache_folder() -> Path:
    """Return the cache folder shared by all runs of this user: $WFM_CACHE, or ~/.cache/wfm_ds."""
    return Path(os.environ.get("WFM_CACHE") or "~/.cache/wfm_ds").expanduser()
