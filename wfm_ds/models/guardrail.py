"""The safety checker that some pipelines come with: what it refuses, and what takes its place when it is off."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.errors import ModelError

log = logging.getLogger(__name__)

Guardrail = Literal["stock", "off"]
LICENCE = "NVIDIA's Open Model License asks for the guardrail, or for one of your own that is as good"


class NoGuardrail:
    """Lets everything pass. A pipeline is called with it; `save_pretrained` writes null for it."""

    def to(self, device: Any) -> NoGuardrail:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return frames


def checker(guardrail: Guardrail, folder: Path) -> Any:
    """Return what the pipeline takes as `safety_checker`; None lets it build its own.

    ModelError if that is asked for and its package is missing: nobody loses the guardrail without having said so.
    """
    from diffusers.utils import is_cosmos_guardrail_available

    if guardrail == "off":
        log.warning("%s: the guardrail is off. %s", folder, LICENCE)
        return NoGuardrail()
    if not is_cosmos_guardrail_available():
        raise ModelError(
            f"{folder}: this pipeline comes with a guardrail, and its package cosmos_guardrail is not installed; "
            f"install it, or set model.guardrail: off ({LICENCE})"
        )
    return None


def refuse_unsafe(safety_checker: Any, prompts: Sequence[str]) -> None:
    """ModelError that names the first prompts which the checker finds unsafe."""
    unsafe = [prompt for prompt in dict.fromkeys(prompts) if not safety_checker.check_text_safety(prompt)]
    if unsafe:
        shown = "; ".join(repr(prompt[:80]) for prompt in unsafe[:3])
        raise ModelError(f"the guardrail refuses {len(unsafe)} prompts, e.g. {shown}: remove them from the prompts")


def guarded(safety_checker: Any, pixels: Tensor) -> Tensor:
    """Videos [B,3,F,H,W] in [0, 1], float32, as the checker leaves them: faces blurred, refused ones black.

    Without a guardrail the pixels themselves, not rounded to the 8 bits that a checker sees.
    """
    if isinstance(safety_checker, NoGuardrail):
        return pixels
    frames = (255 * pixels).to("cpu", torch.uint8).movedim(1, -1).numpy()  # rounds down, as the stock pipeline does
    passed = [safety_checker.check_video_safety(video) for video in frames]
    if refused := sum(video is None for video in passed):
        log.warning("the guardrail refused %d videos: they are black", refused)
    shown = [np.zeros_like(frames[0]) if video is None else video for video in passed]
    return torch.from_numpy(np.stack(shown)).to(pixels.device).movedim(-1, 1).float() / 255
