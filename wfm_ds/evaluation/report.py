"""The evaluation report as text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wfm_ds.evaluation.paired import Difference, Estimate, ratio_bounds
from wfm_ds.evaluation.results import Comparison, Evaluation, Measured
from wfm_ds.storage.atomic import finite_or_none

MARKS = {"trained": "T", "judge": "", "related": "R"}


def head(found: Evaluation) -> str:
    """Summarise the protocol in one line."""
    seeds = f"{len(found.seeds)} seed{'' if len(found.seeds) == 1 else 's'}"
    return f"{len(found.prompts)} prompts x {seeds}, paired by seed, 95 % intervals over prompts"


def text(found: Evaluation) -> str:
    """Return a table per model with its comparison to the base, or the base model's scores if it is alone."""
    blocks = [head(found)]
    if not found.others:
        blocks.append(columns([["", found.base.name], *([name, plain(found.means[name])] for name in found.rewards)]))
    for model_comparison in found.others:
        rows = [
            ["", "", found.base.name, model_comparison.measured.name, "difference", "better in", ""],
            *rows_of(found, model_comparison),
        ]
        blocks.append(
            columns(rows) + f"\nverdict: {model_comparison.verdict.name.upper()}: {model_comparison.verdict.sentence}"
        )
    return "\n\n".join([*blocks, *("\n".join(lines) for lines in (list(notes(found)),) if lines)]) + "\n"


def rows_of(found: Evaluation, other: Comparison) -> Iterator[list[str]]:
    """Yield the table rows of a model: reward, mark, base, model, difference, better in, remark."""
    for name in found.rewards:
        difference = other.differences[name]
        better = "" if difference is None else f"{difference.better} of {difference.estimate.samples}"
        remark = "decreased" if name in other.verdict.fell else ""
        mark = MARKS[other.trained.kind_of(name)]
        yield [name, mark, value(found.means[name]), value(other.means[name]), signed(difference), better, remark]
    if found.base.diversity is not None and other.measured.diversity is not None:
        means = [number(mean_or_nan(one.diversity)) for one in (found.base, other.measured)]
        yield ["diversity", "", *means, times(other.diversity), "", lost(other.diversity)]


def notes(found: Evaluation) -> Iterator[str]:
    """Yield the notes below the tables."""
    kinds = {other.trained.kind_of(name) for other in found.others for name in found.rewards}
    if "trained" in kinds:
        yield "T: trained on; the others are held out"
    if "related" in kinds:
        yield "R: uses the same network as a trained reward, so an increase is no confirmation"
    if found.base.diversity is not None:
        yield f"diversity: mean distance between seeds of a prompt, by {found.eye}"
    for model in found.models:
        if missing := missing_of(model, found.rewards):
            yield f"{model.name}: samples without a score: {missing}; their pairs are excluded"
    for name, scores in found.published.items():
        for one in scores:
            tasks = "".join(f", {task} {share:.3f}" for task, share in one.parts.items())
            yield f"{one.benchmark} of {name}: {one.value:.3f}{tasks}"
    for benchmark, differs in {
        one.benchmark: one.differs for score_list in found.published.values() for one in score_list
    }.items():
        if differs:
            yield f"{benchmark}: not comparable with published numbers: {'; '.join(differs)}"


def missing_of(model: Measured, rewards: Sequence[str]) -> str:
    counts = {name: sum(sample[name].value is None for sample in model.samples) for name in rewards}
    reasons = {name: next((s[name].failure for s in model.samples if s[name].failure), "") for name in rewards}
    return ", ".join(f"{count} by {name} ({reasons[name]})" for name, count in counts.items() if count)


def as_json(found: Evaluation) -> str:
    """Return the evaluation as JSON, without single samples (see the CSV)."""
    content = {
        "settings": dict(found.settings),
        "prompts": [{"id": prompt.id, "prompt": prompt.text} for prompt in found.prompts],
        "seeds": list(found.seeds),
        "rewards": list(found.rewards),
        "diversity_by": found.eye,
        "base": model_facts(found.base, found.means),
        "models": [other_facts(other) for other in found.others],
        "published": {
            name: [
                {"benchmark": one.benchmark, "value": one.value, "parts": dict(one.parts), "differs": list(one.differs)}
                for one in scores
            ]
            for name, scores in found.published.items()
        },
    }
    return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def model_facts(model: Measured, means: Mapping[str, Estimate | None]) -> dict[str, Any]:
    diversity = None if model.diversity is None else finite_or_none(mean_or_nan(model.diversity))
    return {
        "name": model.name,
        "path": model.path,
        "means": {name: estimate_facts(mean) for name, mean in means.items()},
        "diversity": diversity,
    }


def other_facts(other: Comparison) -> dict[str, Any]:
    bounds = None if other.diversity is None else ratio_bounds(other.diversity)
    low, high = bounds or (None, None)
    diversity_ratio = None if other.diversity is None else {"value": other.diversity.value, "low": low, "high": high}
    return {
        **model_facts(other.measured, other.means),
        "trained_on": list(other.trained.names),
        "related": sorted(other.trained.related),
        "differences": {name: difference_facts(gap) for name, gap in other.differences.items()},
        "diversity_ratio": diversity_ratio,
        "verdict": {"name": other.verdict.name, "sentence": other.verdict.sentence, "fell": dict(other.verdict.fell)},
    }


def difference_facts(gap: Difference | None) -> dict[str, Any] | None:
    if gap is None:
        return None
    z, p = finite_or_none(gap.z), finite_or_none(gap.p_fell)
    return {**(estimate_facts(gap.estimate) or {}), "better": gap.better, "missing": gap.missing, "sd": z, "p_fell": p}


def estimate_facts(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    fields = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {**fields, "prompts": estimate.prompts, "samples": estimate.samples}


def as_csv(found: Evaluation) -> str:
    """Return one line per sample: model, prompt_id, prompt, seed, file, one column per reward (or empty)."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["model", "prompt_id", "prompt", "seed", "file", *found.rewards])
    for model in found.models:
        for index, (file, scores) in enumerate(zip(model.files, model.samples, strict=True)):
            prompt, seed = found.prompts[index // len(found.seeds)], found.seeds[index % len(found.seeds)]
            values = [scores[name].value for name in found.rewards]
            cells = ["" if score is None else repr(score) for score in values]
            writer.writerow([model.name, prompt.id, prompt.text, seed, file, *cells])
    return buffer.getvalue()


# ---- cells


def value(estimate: Estimate | None) -> str:
    return "-" if estimate is None else number(estimate.value)


def plain(estimate: Estimate | None) -> str:
    """Format a mean with its interval."""
    if estimate is None:
        return "-"
    return f"{number(estimate.value)}{bounds_text(estimate.low, estimate.high)}"


def signed(gap: Difference | None) -> str:
    """Format a difference with its interval."""
    if gap is None:
        return "-"
    estimate = gap.estimate
    return f"{number(estimate.value, '+')}{bounds_text(estimate.low, estimate.high, '+')}"


def times(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"x{number(estimate.value)}{bounds_text(*(ratio_bounds(estimate) or (None, None)))}"


def lost(estimate: Estimate | None) -> str:
    bounds = None if estimate is None else ratio_bounds(estimate)
    return "decreased" if bounds is not None and bounds[1] < 1 else ""


def bounds_text(low: float | None, high: float | None, sign: str = "") -> str:
    return "" if low is None or high is None else f" [{number(low, sign)}, {number(high, sign)}]"


def number(one: float, sign: str = "") -> str:
    return "-" if math.isnan(one) else f"{one:{sign}.3g}" if abs(one) < 100 else f"{one:{sign}.1f}"


def mean_or_nan(values: Any) -> float:
    return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Join rows of cells to aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)
