"""Defaults shared by the recipe schema and command-line options. Cheap to import."""

from __future__ import annotations

from typing import Literal

AttentionName = Literal["auto", "native", "cudnn", "flash", "flash3", "sage"]
DEFAULT_FPS = 16.0
DEFAULT_EVAL_STEPS = 40
DEFAULT_GUIDANCE_SCALE = 1.0
