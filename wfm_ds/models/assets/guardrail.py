"""The safety checker of some pipelines, and its replacement if `model.guardrail` is `off`."""

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
from wfm_ds.recipe.shared_defaults import TINY_FOLDER, user_cache_folder

log = logging.getLogger(__name__)

Guardrail = Literal["stock", "off"]
LICENCE = "NVIDIA's Open Model License requires the guardrail or an equivalent one"


class NoGuardrail:
    """A safety checker that accepts everything. Saved pipelines contain null instead."""

    def to(self, device: Any) -> NoGuardrail:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return frames


def load_safety_checker(guardrail: Guardrail, folder: Path) -> Any:
    """Return the `safety_checker` argument for the constructor of the pipeline.

    Returns None if the pipeline should create its own checker. Raises ModelError if the guardrail is on but its package
    is not installed.
    """
    from diffusers.utils import is_cosmos_guardrail_available

    if guardrail == "off":
        if folder.is_relative_to(user_cache_folder() / TINY_FOLDER):  # random weights have no license
            return NoGuardrail()
        log.warning("%s: the guardrail is off. %s", folder, LICENCE)
        return NoGuardrail()
    if not is_cosmos_guardrail_available():
        raise ModelError(
            f"{folder}: the package cosmos_guardrail of this pipeline's guardrail is not installed; install it, or set "
            f"model.guardrail: off ({LICENCE})"
        )
    return None


def require_safe_prompts(safety_checker: Any, prompts: Sequence[str]) -> None:
    """Raise ModelError if the checker rejects prompts."""
    unsafe = [prompt for prompt in dict.fromkeys(prompts) if not safety_checker.check_text_safety(prompt)]
    if unsafe:
        examples = "; ".join(repr(prompt[:80]) for prompt in unsafe[:3])
        raise ModelError(f"the guardrail rejects {len(unsafe)} prompts, e.g. {examples}: remove them")


def apply_guardrail(safety_checker: Any, pixels: Tensor) -> Tensor:
    """Blur faces in videos and replace unsafe videos by black videos. Does nothing if the guardrail is off.

    pixels: float32 [batch, 3, frames, height, width] in [0, 1]. The result is rounded down to multiples of 1/255.
    """
    if isinstance(safety_checker, NoGuardrail):
        return pixels
    frames = (255 * pixels).to("cpu", torch.uint8).movedim(1, -1).numpy()  # rounds down, as the diffusers pipeline does
    results = [safety_checker.check_video_safety(video) for video in frames]
    if rejected := sum(video is None for video in results):
        log.warning("the guardrail rejected %d videos and replaced them by black videos", rejected)
    videos = [np.zeros_like(frames[0]) if video is None else video for video in results]
    return torch.from_numpy(np.stack(videos)).to(pixels.device).movedim(-1, 1).float() / 255
