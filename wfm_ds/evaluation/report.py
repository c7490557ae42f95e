"""The report of an evaluation as text, as JSON and as CSV."""

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
    """The comparison in a line."""
    seeds = f"{len(found.seeds)} seed{'' if len(found.seeds) == 1 else 's'}"
    return f"{len(found.prompts)} prompts x {seeds}, paired by seed, 95 % intervals over prompts"


def text(found: Evaluation) -> str:
    """A table for each model beside the base; without another model, the base's own scores."""
    blocks = [head(found)]
    if not found.others:
        blocks.append(columns([["", found.base.name], *([name, plain(found.means[name])] for name in found.rewards)]))
    for other in found.others:
        rows = [["", "", found.base.name, other.measured.name, "difference", "better in", ""], *rows_of(found, other)]
        blocks.append(columns(rows) + f"\nverdict: {other.verdict.name.upper()}: {other.verdict.sentence}")
    return "\n\n".join([*blocks, *("\n".join(lines) for lines in (list(notes(found)),) if lines)]) + "\n"


def rows_of(found: Evaluation, other: Comparison) -> Iterator[list[str]]:
    """Yield the cells of a table: reward, mark, base, model, difference, better in, remark."""
    for name in found.rewards:
        gap = other.differences[name]
        better = "" if gap is None else f"{gap.better} of {gap.estimate.samples}"
        fell = "fell" if name in other.verdict.fell else ""
        mark = MARKS[other.trained.kind_of(name)]
        yield [name, mark, value(found.means[name]), value(other.means[name]), signed(gap), better, fell]
    if found.base.diversity is not None and other.measured.diversity is not None:
        means = [number(mean_or_nan(one.diversity)) for one in (found.base, other.measured)]
        yield ["diversity", "", *means, times(other.diversity), "", lost(other.diversity)]


def notes(found: Evaluation) -> Iterator[str]:
    """Yield what a reader must know of the numbers."""
    kinds = {other.trained.kind_of(name) for other in found.others for name in found.rewards}
    if "trained" in kinds:
        yield "T: trained on; the others are held out"
    if "related" in kinds:
        yield "R: looks through the same network as a reward that was trained on, so its rise confirms nothing"
    if found.base.diversity is not None:
        yield f"diversity: mean distance of two seeds of a prompt, by {found.eye}"
    for model in found.models:
        if missing := missing_of(model, found.rewards):
            yield f"{model.name}: without a score {missing}; such pairs are left out"
    for name, scores in found.published.items():
        for one in scores:
            tasks = "".join(f", {task} {share:.3f}" for task, share in one.parts.items())
            yield f"{one.benchmark} of {name}: {one.value:.3f}{tasks}"
    for benchmark, differs in {one.benchmark: one.differs for all_ in found.published.values() for one in all_}.items():
        if differs:
            yield f"{benchmark}: not comparable with published numbers: {'; '.join(differs)}"


def missing_of(model: Measured, rewards: Sequence[str]) -> str:
    counts = {name: sum(sample[name].value is None for sample in model.samples) for name in rewards}
    reasons = {name: next((s[name].failure for s in model.samples if s[name].failure), "") for name in rewards}
    return ", ".join(f"{count} by {name} ({reasons[name]})" for name, count in counts.items() if count)


def as_json(found: Evaluation) -> str:
    """The whole evaluation but its single samples, which are in the CSV."""
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
    times_ = None if other.diversity is None else {"value": other.diversity.value, "low": low, "high": high}
    return {
        **model_facts(other.measured, other.means),
        "trained_on": list(other.trained.names),
        "related": sorted(other.trained.related),
        "differences": {name: difference_facts(gap) for name, gap in other.differences.items()},
        "diversity_ratio": times_,
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
    facts = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {**facts, "prompts": estimate.prompts, "samples": estimate.samples}


def as_csv(found: Evaluation) -> str:
    """A line for each sample: model, prompt_id, prompt, seed, file, then a column for each reward; empty: no score."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(["model", "prompt_id", "prompt", "seed", "file", *found.rewards])
    for model in found.models:
        for place, (file, scores) in enumerate(zip(model.files, model.samples, strict=True)):
            prompt, seed = found.prompts[place // len(found.seeds)], found.seeds[place % len(found.seeds)]
            values = [scores[name].value for name in found.rewards]
            cells = ["" if one is None else repr(one) for one in values]
            writer.writerow([model.name, prompt.id, prompt.text, seed, file, *cells])
    return made.getvalue()


# ---- cells


def value(estimate: Estimate | None) -> str:
    return "-" if estimate is None else number(estimate.value)


def plain(estimate: Estimate | None) -> str:
    """A mean with its interval."""
    if estimate is None:
        return "-"
    return f"{number(estimate.value)}{bounds_text(estimate.low, estimate.high)}"


def signed(gap: Difference | None) -> str:
    """A difference with its interval."""
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
    return "lost" if bounds is not None and bounds[1] < 1 else ""


def bounds_text(low: float | None, high: float | None, sign: str = "") -> str:
    return "" if low is None or high is None else f" [{number(low, sign)}, {number(high, sign)}]"


def number(one: float, sign: str = "") -> str:
    return "-" if math.isnan(one) else f"{one:{sign}.3g}" if abs(one) < 100 else f"{one:{sign}.1f}"


def mean_or_nan(values: Any) -> float:
    return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Cells under each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)
