"""Values that the schema and the options of commands share: importing them costs no schema."""

from __future__ import annotations

from typing import Literal

AttentionName = Literal["auto", "native", "cudnn", "flash", "flash3", "sage"]
FPS = 16.0
EVAL_STEPS = 40
GUIDANCE_SCALE = 1.0
