"""OCR reward of Flow-GRPO (arXiv 2505.05470), with RapidOCR: does the image show the requested text?"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import ItemReward, MediaItem, Range, RewardError, Score

QUOTED_TEXT = re.compile(r'"([^"]*)"')


class Ocr(ItemReward):
    """1 - d / len(target), where d is the edit distance between the recognized text and the target (0 to 1).

    d is 0 if the recognized text contains the target, and at most len(target). The target is the metadata `ocr_target`.
    If it is missing, the target is the first text in double quotes in the prompt. Case and whitespace are ignored. The
    models are part of the package rapidocr-onnxruntime (PP-OCRv4, Apache-2.0).
    """

    name = "ocr"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"ocr_reward": Range(0.0, 1.0)}
    primary_output = "ocr_reward"

    def __init__(self, device: str = "cpu", *, threads: int = 1, **options: Any) -> None:
        """threads: CPU threads per worker process. Raises RewardError unless the device is cpu."""
        super().__init__(device, **options)
        if device != "cpu":
            raise RewardError(f"reward ocr runs on the CPU, not on {device}: set device to cpu and add workers instead")
        if not isinstance(threads, int) or threads < 1:
            raise RewardError(f"reward ocr: threads is {threads!r}; it must be an integer >= 1")
        self.threads = threads

    def load(self) -> None:
        try:
            import cv2
            from rapidocr_onnxruntime import RapidOCR
        except ImportError as error:
            raise RewardError(
                f"reward ocr needs the package rapidocr-onnxruntime ({error}): pip install 'wfm_ds[reward-ocr]'"
            ) from error
        cv2.setNumThreads(self.threads)  # by default, OpenCV uses one thread per core
        self._reader: Any = RapidOCR(intra_op_num_threads=self.threads, inter_op_num_threads=1)

    def score_item(self, item: MediaItem) -> Score:
        target = ocr_target(item)
        if not target:
            return item.fail("no ocr_target in the metadata and no text in double quotes in the prompt")
        text = normalize_text(self._read_text(item.frames[0]))
        distance = 0 if target in text else min(edit_distance(text, target), len(target))
        return item.score(1.0 - distance / len(target))

    def _read_text(self, image: npt.NDArray[np.uint8]) -> str:
        lines, _ = self._reader(np.ascontiguousarray(image[..., ::-1]))  # RapidOCR expects BGR
        return "".join(text for _box, text, _confidence in lines or ())


def ocr_target(item: MediaItem) -> str:
    target = item.metadata.get("ocr_target")
    if target is None:
        quoted = QUOTED_TEXT.search(item.prompt)
        target = quoted[1] if quoted else ""
    return normalize_text(target) if isinstance(target, str) else ""


def normalize_text(text: str) -> str:
    return "".join(text.lower().split())


def edit_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))  # distances of the processed part of a to all prefixes of b
    for i, char_a in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, char_b in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (char_a != char_b))
    return row[-1]
