"""Defaults shared by the recipe schema and command-line options. Cheap to import."""

from __future__ import annotations

from typing import Literal

AttentionName = Literal["auto", "native", "cudnn", "flash", "flash3", "sage"]
FPS = 16.0
EVAL_STEPS = 40
GUIDANCE_SCALE = 1.0
