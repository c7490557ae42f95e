"""Is the wanted text in the image? The OCR reward of Flow-GRPO (arXiv 2505.05470), read by RapidOCR."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, RewardError, Score

QUOTED = re.compile(r'"([^"]*)"')


class Ocr(Reward):
    """1 - d / len(target), 0 to 1: d = 0 if the target is in the text read, else their edit distance, at most len.

    The target is metadata `ocr_target`, else the text in the prompt's first double quotes; case and spaces do not
    count, on either side. The models come inside the package rapidocr-onnxruntime (PP-OCRv4, Apache-2.0).
    """

    name = "ocr"
    media = frozenset({"image"})
    outputs: ClassVar = {"ocr_reward": Range(0.0, 1.0)}
    primary = "ocr_reward"

    def __init__(self, device: str = "cpu", *, threads: int = 1, **options: Any) -> None:
        """`threads`: CPU threads of one worker. Raises RewardError for another device than cpu."""
        super().__init__(device, **options)
        if device != "cpu":
            raise RewardError(
                f"reward ocr runs on the CPU, not on {device}: set its device to cpu and add workers instead"
            )
        if not isinstance(threads, int) or threads < 1:
            raise RewardError(f"reward ocr: threads is {threads!r}; it must be a whole number of at least 1")
        self.threads = threads

    def load(self) -> None:
        """Raises RewardError if the package is not installed."""
        try:
            import cv2
            from rapidocr_onnxruntime import RapidOCR
        except ImportError as error:
            raise RewardError(
                f"reward ocr needs the package rapidocr-onnxruntime ({error}): pip install 'wfm_ds[reward-ocr]'"
            ) from error
        cv2.setNumThreads(self.threads)  # its pool would otherwise have a thread per core
        self._reader: Any = RapidOCR(intra_op_num_threads=self.threads, inter_op_num_threads=1)

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: MediaItem) -> Score:
        target = ocr_target(item)
        if not target:
            return item.failed("no ocr_target in the metadata and no text in double quotes in the prompt")
        text = comparable(self._read(item.frames[0]))
        distance = 0 if target in text else min(edit_distance(text, target), len(target))
        return item.scored(1.0 - distance / len(target))

    def _read(self, image: npt.NDArray[np.uint8]) -> str:
        """All lines that were found, from top to bottom, joined. Text below RapidOCR's confidence of .5 is no text."""
        lines, _ = self._reader(np.ascontiguousarray(image[..., ::-1]))  # arrays are taken as BGR
        return "".join(text for _box, text, _confidence in lines or ())


def ocr_target(item: MediaItem) -> str:
    """The wanted text, lower case and without spaces; "" if there is none."""
    target = item.metadata.get("ocr_target")
    if target is None:
        quoted = QUOTED.search(item.prompt)
        target = quoted[1] if quoted else ""
    return comparable(target) if isinstance(target, str) else ""


def comparable(text: str) -> str:
    return "".join(text.lower().split())


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: the fewest insertions, deletions and replacements of one character that turn a into b."""
    row = list(range(len(b) + 1))  # distances from the read part of a to every beginning of b
    for i, char_a in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, char_b in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (char_a != char_b))
    return row[-1]
