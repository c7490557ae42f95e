"""Scores by clip in the evaluation report: tables, charts, JSON and CSV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from wfm_ds.evaluation.clip_curves import ClipCurve, clip_curve, scores_by_clip
from wfm_ds.evaluation.recordings import RECORDING
from wfm_ds.evaluation.results import EvaluationResults
from wfm_ds.evaluation.tables import (
    align_columns,
    csv_text,
    estimate_dict,
    format_interval,
    format_value,
    table_html,
)
from wfm_ds.monitoring.line_chart import chart_html

NOTES = (
    "drift: mean difference between the last clip and the first clip of the same sample",
    f"{RECORDING}: similarity of new frames to the recorded video; PSNR in dB",
)
MARGIN_OF_RANGE = 0.05  # free space above and below the curves, as a fraction of their range


@dataclass(frozen=True, slots=True)
class ClipComparison:
    """Scores by clip of all models: rewards, their parts (Score.parts), and the similarity to recordings."""

    curves: Mapping[str, Mapping[str, ClipCurve]]  # {score: {model: curve}}
    differences: Mapping[str, Mapping[str, ClipCurve]]
    """{score: {model: curve of the differences from the base model}}, without the base model."""

    @classmethod
    def from_results(cls, results: EvaluationResults) -> ClipComparison:
        arrays = {model.name: scores_by_clip(model.clips, len(results.seeds)) for model in results.models}
        base = arrays.pop(results.base.name)
        curves, differences = {}, {}
        for name, first in base.items():
            others = {model: scores[name] for model, scores in arrays.items() if name in scores}
            curves[name] = {model: clip_curve(scores) for model, scores in {results.base.name: first, **others}.items()}
            differences[name] = {
                model: clip_curve([after - before for before, after in zip(first, scores, strict=True)])
                for model, scores in others.items()
            }
        return cls(curves, differences)

    def table(self, score: str, base: str) -> list[list[str]]:
        """Return the rows of a score's table: titles, one row per clip, and the drift. base: name of the base model.

        Each model has a column of means. Models other than the base model also have a column of differences from it.
        """
        columns = []
        for model, curve in self.curves[score].items():
            columns.append([model, *map(format_value, curve.means), *format_drift(curve)])
            if (gaps := self.differences[score].get(model)) is not None:
                cells = [format_interval(gap, "+") for gap in gaps.means]
                columns.append([f"{model} - {base}", *cells, *format_drift(gaps)])
        num_clips = len(self.curves[score][base].means)
        names = [score, *(f"clip {k}" for k in range(1, num_clips + 1)), "drift"][: len(columns[0])]
        return [list(row) for row in zip(names, *columns, strict=True)]


def format_drift(curve: ClipCurve) -> list[str]:
    """Return [table cell with the drift of the last clip], or [] for a single clip."""
    return [format_interval(drift, "+") for drift in curve.drifts[-1:]]


def format_clip_tables(results: EvaluationResults) -> list[str]:
    """Return one table per score as text, followed by notes. Returns [] if there are no scores by clip."""
    comparison = ClipComparison.from_results(results)
    tables = [align_columns(comparison.table(score, results.base.name)) for score in comparison.curves]
    return [*tables, "\n".join(NOTES)] if tables else []


def clips_dict(results: EvaluationResults) -> dict[str, Any]:
    """Return {score: {model: {"means", "drifts", "differences"}}}. Each value is a list of estimates or None.

    means: mean score of each clip. drifts: mean difference of each later clip from the first clip. differences: mean
    difference of each clip from the base model's clip; missing for the base model.
    """
    comparison = ClipComparison.from_results(results)
    content: dict[str, Any] = {}
    for score, curves in comparison.curves.items():
        content[score] = {
            model: {"means": list(map(estimate_dict, curve.means)), "drifts": list(map(estimate_dict, curve.drifts))}
            for model, curve in curves.items()
        }
        for model, gaps in comparison.differences[score].items():
            content[score][model]["differences"] = list(map(estimate_dict, gaps.means))
    return content


def format_clips_csv(results: EvaluationResults) -> str:
    """Return CSV text with one line per clip of each sample. The cell of a missing score is empty."""
    names = list(results.base.clips[0][0])
    rows = (
        [model.name, prompt.id, seed, clip, *(scores[name].value for name in names)]
        for model in results.models
        for clip, samples in enumerate(model.clips, 1)
        for (prompt, seed), scores in zip(results.sample_keys(), samples, strict=True)
    )
    return csv_text(["model", "prompt_id", "seed", "clip", *names], rows)


def render_clip_section(results: EvaluationResults) -> str:
    """Return HTML with a chart and a table for each score, or "" if there are no scores by clip."""
    comparison = ClipComparison.from_results(results)
    if not comparison.curves:
        return ""
    parts = ["<h2>Scores by clip</h2>"]
    for score, curves in comparison.curves.items():
        parts += [f"<h3>{escape(score)}</h3>", *render_chart(curves)]
        (_, *titles), *rows = comparison.table(score, results.base.name)
        parts.append(table_html(["", *titles], [[escape(cell) for cell in cells] for cells in rows]))
    notes = "".join(f"<p>{escape(note)}</p>" for note in NOTES)
    return "\n".join([*parts, f'<div class="notes">{notes}</div>'])


def render_chart(curves: Mapping[str, ClipCurve]) -> list[str]:
    """Return [HTML chart of one score], or [] for fewer than two clips. curves: {model name: curve}."""
    estimates = {model: enumerate(curve.means, 1) for model, curve in curves.items()}
    points = {model: [(clip, mean) for clip, mean in means if mean is not None] for model, means in estimates.items()}
    points = {model: known for model, known in points.items() if known}
    if len({clip for known in points.values() for clip, _ in known}) < 2:
        return []
    half_widths = {model: [estimate.half_width for _, estimate in known] for model, known in points.items()}
    lines = {model: [(clip, estimate.value) for clip, estimate in known] for model, known in points.items()}
    ends = [
        estimate.value + sign * (estimate.half_width or 0.0)
        for known in points.values()
        for _, estimate in known
        for sign in (-1, 1)
    ]
    margin = MARGIN_OF_RANGE * (max(ends) - min(ends)) or 0.5
    return [chart_html(lines, "clip", (min(ends) - margin, max(ends) + margin), half_widths)]
