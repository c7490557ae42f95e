"""Scores as benchmarks publish them, and what keeps ours from standing beside theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wfm_ds.evaluation.paired import Array
from wfm_ds.types import Prompt

GENEVAL_PROMPTS, GENEVAL_SEEDS = 553, 4  # of its prompts/evaluation_metadata.jsonl; images of each
GENEVAL_TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


@dataclass(frozen=True, slots=True)
class Published:
    """The score of one model in a benchmark."""

    benchmark: str
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    differs: Sequence[str] = ()  # what is not as published: with any, the number is not comparable


def published(prompts: Sequence[Prompt], scores: Mapping[str, Array], num_seeds: int) -> list[Published]:
    """Return what the scores [P, S] of these prompts amount to in benchmarks."""
    found = (
        [geneval(prompts, scores["gen_eval/gen_eval_score"], num_seeds)] if "gen_eval/gen_eval_score" in scores else []
    )
    return [one for one in [*found, ocr(scores.get("ocr"))] if one is not None]


def geneval(prompts: Sequence[Prompt], correct: Array, num_seeds: int) -> Published | None:
    """GenEval (arXiv 2310.11513, evaluation/summary_scores.py): the mean over its six tasks of the share of correct
    images, not the mean over images. None without an image that was judged."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for prompt, row in zip(prompts, correct, strict=True):
        by_task[str(prompt.metadata.get("tag"))] += [float(value) for value in row if not np.isnan(value)]
    shares = {task: float(np.mean(values)) for task, values in by_task.items() if values}
    if not shares:
        return None
    lacking = [task for task in GENEVAL_TASKS if task not in shares]
    differs = ["detector Mask2Former of transformers and its CLIP, not those of mmdet and open_clip"]
    differs += [f"no prompt of {', '.join(lacking)}"] if lacking else []
    differs += [f"{len(prompts)} prompts, not {GENEVAL_PROMPTS}"] if len(prompts) != GENEVAL_PROMPTS else []
    differs += [f"{num_seeds} images each, not {GENEVAL_SEEDS}"] if num_seeds != GENEVAL_SEEDS else []
    differs += [f"{missing} images without a score"] if (missing := int(np.isnan(correct).sum())) else []
    return Published("GenEval", float(np.mean(list(shares.values()))), shares, differs)


def ocr(scores: Array | None) -> Published | None:
    """The OCR reward of Flow-GRPO (arXiv 2505.05470): its mean over images."""
    if scores is None or np.isnan(scores).all():
        return None
    differs = ["read by RapidOCR, not by PaddleOCR"]
    differs += [f"{missing} images without a score"] if (missing := int(np.isnan(scores).sum())) else []
    return Published("OCR", float(np.nanmean(scores)), {}, differs)
