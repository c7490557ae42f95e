"""The evaluation report as text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wfm_ds.evaluation.paired_statistics import Difference, MeanEstimate, ratio_bounds
from wfm_ds.evaluation.results import EvaluationResults, ModelComparison, ModelResults
from wfm_ds.storage.atomic import finite_or_none

MARKS = {"trained": "T", "held_out": "", "related": "R"}


def format_headline(results: EvaluationResults) -> str:
    """Return one line with the number of prompts, the number of seeds and the kind of confidence interval."""
    seeds = f"{len(results.seeds)} seed{'' if len(results.seeds) == 1 else 's'}"
    return f"{len(results.prompts)} prompts x {seeds}, paired by seed, 95 % intervals over prompts"


def format_text(results: EvaluationResults) -> str:
    """Return the report as text.

    Each model has a table that compares it with the base model. Without other models, the report shows only the base
    model's scores.
    """
    blocks = [format_headline(results)]
    if not results.comparisons:
        blocks.append(
            align_columns(
                [["", results.base.name], *([name, format_interval(results.means[name])] for name in results.rewards)]
            )
        )
    for model_comparison in results.comparisons:
        rows = [
            ["", "", results.base.name, model_comparison.results.name, "difference", "better in", ""],
            *table_rows(results, model_comparison),
        ]
        blocks.append(
            align_columns(rows)
            + f"\nverdict: {model_comparison.verdict.name.upper()}: {model_comparison.verdict.message}"
        )
    return "\n\n".join([*blocks, *("\n".join(lines) for lines in (list(list_notes(results)),) if lines)]) + "\n"


def table_rows(results: EvaluationResults, comparison: ModelComparison) -> Iterator[list[str]]:
    """Yield the rows of a model's table. Each row is a list of cells.

    Columns: reward, mark (T: trained on, R: related), mean of the base model, mean of the model, difference, number of
    pairs in which the model is better, remark.
    """
    for name in results.rewards:
        difference = comparison.differences[name]
        better = "" if difference is None else f"{difference.num_better} of {difference.estimate.num_samples}"
        remark = "decreased" if name in comparison.verdict.decreases else ""
        mark = MARKS[comparison.trained_rewards.reward_role(name)]
        yield [
            name,
            mark,
            format_value(results.means[name]),
            format_value(comparison.means[name]),
            format_difference(difference),
            better,
            remark,
        ]
    if results.base.diversity is not None and comparison.results.diversity is not None:
        means = [format_number(mean_or_nan(one.diversity)) for one in (results.base, comparison.results)]
        yield ["diversity", "", *means, format_ratio(comparison.diversity), "", diversity_remark(comparison.diversity)]


def list_notes(results: EvaluationResults) -> Iterator[str]:
    kinds = {other.trained_rewards.reward_role(name) for other in results.comparisons for name in results.rewards}
    if "trained" in kinds:
        yield "T: trained on; the others are held out"
    if "related" in kinds:
        yield "R: uses the same network as a trained reward, so an increase is no confirmation"
    if results.base.diversity is not None:
        yield f"diversity: mean distance between seeds of a prompt, by {results.embedder_name}"
    for model in results.models:
        if missing := describe_missing(model, results.rewards):
            yield f"{model.name}: samples without a score: {missing}; their pairs are excluded"
    for name, scores in results.benchmark_scores.items():
        for one in scores:
            tasks = "".join(f", {task} {share:.3f}" for task, share in one.parts.items())
            yield f"{one.benchmark} of {name}: {one.value:.3f}{tasks}"
    for benchmark, differs in {
        one.benchmark: one.deviations for score_list in results.benchmark_scores.values() for one in score_list
    }.items():
        if differs:
            yield f"{benchmark}: not comparable with published numbers: {'; '.join(differs)}"


def describe_missing(model: ModelResults, rewards: Sequence[str]) -> str:
    counts = {name: sum(sample[name].value is None for sample in model.samples) for name in rewards}
    reasons = {name: next((s[name].failure for s in model.samples if s[name].failure), "") for name in rewards}
    return ", ".join(f"{count} by {name} ({reasons[name]})" for name, count in counts.items() if count)


def format_json(results: EvaluationResults) -> str:
    """Return the results as JSON. The JSON does not contain individual samples; see `format_csv`."""
    content = {
        "settings": dict(results.settings),
        "prompts": [{"id": prompt.id, "prompt": prompt.text} for prompt in results.prompts],
        "seeds": list(results.seeds),
        "rewards": list(results.rewards),
        "diversity_by": results.embedder_name,
        "base": model_dict(results.base, results.means),
        "models": [comparison_dict(other) for other in results.comparisons],
        "published": {
            name: [
                {
                    "benchmark": one.benchmark,
                    "value": one.value,
                    "parts": dict(one.parts),
                    "differs": list(one.deviations),
                }
                for one in scores
            ]
            for name, scores in results.benchmark_scores.items()
        },
    }
    return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def model_dict(model: ModelResults, means: Mapping[str, MeanEstimate | None]) -> dict[str, Any]:
    diversity = None if model.diversity is None else finite_or_none(mean_or_nan(model.diversity))
    return {
        "name": model.name,
        "path": model.path,
        "means": {name: estimate_dict(mean) for name, mean in means.items()},
        "diversity": diversity,
    }


def comparison_dict(comparison: ModelComparison) -> dict[str, Any]:
    bounds = None if comparison.diversity is None else ratio_bounds(comparison.diversity)
    low, high = bounds or (None, None)
    diversity_ratio = (
        None if comparison.diversity is None else {"value": comparison.diversity.value, "low": low, "high": high}
    )
    return {
        **model_dict(comparison.results, comparison.means),
        "trained_on": list(comparison.trained_rewards.names),
        "related": sorted(comparison.trained_rewards.related),
        "differences": {name: difference_dict(gap) for name, gap in comparison.differences.items()},
        "diversity_ratio": diversity_ratio,
        "verdict": {
            "name": comparison.verdict.name,
            "sentence": comparison.verdict.message,
            "fell": dict(comparison.verdict.decreases),
        },
    }


def difference_dict(gap: Difference | None) -> dict[str, Any] | None:
    if gap is None:
        return None
    z, p = finite_or_none(gap.z), finite_or_none(gap.p_decrease)
    return {
        **(estimate_dict(gap.estimate) or {}),
        "better": gap.num_better,
        "missing": gap.num_missing,
        "sd": z,
        "p_fell": p,
    }


def estimate_dict(estimate: MeanEstimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    fields = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {**fields, "prompts": estimate.num_prompts, "samples": estimate.num_samples}


def format_csv(results: EvaluationResults) -> str:
    """Return CSV text with one line per sample.

    Columns: model, prompt_id, prompt, seed, file, and one column per score. A missing score is empty.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["model", "prompt_id", "prompt", "seed", "file", *results.rewards])
    for model in results.models:
        for index, (file, scores) in enumerate(zip(model.files, model.samples, strict=True)):
            prompt, seed = results.prompts[index // len(results.seeds)], results.seeds[index % len(results.seeds)]
            values = [scores[name].value for name in results.rewards]
            cells = ["" if score is None else repr(score) for score in values]
            writer.writerow([model.name, prompt.id, prompt.text, seed, file, *cells])
    return buffer.getvalue()


# ---- cells


def format_value(estimate: MeanEstimate | None) -> str:
    return "-" if estimate is None else format_number(estimate.value)


def format_interval(estimate: MeanEstimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{format_number(estimate.value)}{format_bounds(estimate.low, estimate.high)}"


def format_difference(gap: Difference | None) -> str:
    if gap is None:
        return "-"
    estimate = gap.estimate
    return f"{format_number(estimate.value, '+')}{format_bounds(estimate.low, estimate.high, '+')}"


def format_ratio(estimate: MeanEstimate | None) -> str:
    if estimate is None:
        return "-"
    return f"x{format_number(estimate.value)}{format_bounds(*(ratio_bounds(estimate) or (None, None)))}"


def diversity_remark(estimate: MeanEstimate | None) -> str:
    bounds = None if estimate is None else ratio_bounds(estimate)
    return "decreased" if bounds is not None and bounds[1] < 1 else ""


def format_bounds(low: float | None, high: float | None, sign: str = "") -> str:
    return "" if low is None or high is None else f" [{format_number(low, sign)}, {format_number(high, sign)}]"


def format_number(value: float, sign: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{sign}.3g}" if abs(value) < 100 else f"{value:{sign}.1f}"


def mean_or_nan(values: Any) -> float:
    return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as lines of text with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)
