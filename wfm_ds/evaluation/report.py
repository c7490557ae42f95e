"""The evaluation report as text, JSON, CSV and one HTML page without scripts or external resources."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from wfm_ds.evaluation.clip_report import clips_dict, format_clip_tables, render_clip_section
from wfm_ds.evaluation.paired_statistics import Difference, MeanEstimate, ratio_bounds
from wfm_ds.evaluation.results import EvaluationResults, ModelComparison, ModelResults
from wfm_ds.evaluation.tables import (
    align_columns,
    csv_text,
    diversity_remark,
    estimate_dict,
    format_interval,
    format_number,
    format_ratio,
    format_value,
    mean_or_nan,
    table_html,
)
from wfm_ds.monitoring.gallery import SMALL_SIDE, html_document
from wfm_ds.monitoring.line_chart import CHART_STYLE
from wfm_ds.storage.atomic import finite_or_none

MARKS = {"trained": "T", "held_out": "", "related": "R"}


def format_headline(results: EvaluationResults) -> str:
    seeds = f"{len(results.seeds)} seed{'' if len(results.seeds) == 1 else 's'}"
    return f"{len(results.prompts)} prompts x {seeds}, paired by seed, 95 % intervals over prompts"


def format_text(results: EvaluationResults) -> str:
    """Return the report as text: a table for each model that compares it with the base model.

    Without other models, the report shows only the base model's scores.
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
    blocks += format_clip_tables(results)
    blocks += ["\n".join(notes)] if (notes := list(list_notes(results))) else []
    return "\n\n".join(blocks) + "\n"


def table_rows(results: EvaluationResults, comparison: ModelComparison) -> Iterator[list[str]]:
    """Yield the rows of a model's table. Each row is a list of cells.

    Columns: reward, mark (T: trained on, R: related), mean of the base model, mean of the model, difference, number of
    sample pairs in which the model is better, remark.
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
            format_interval(None if difference is None else difference.estimate, "+"),
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
        yield "R: uses the same network as a trained reward, so an increase does not confirm a gain"
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
    """Return the results as JSON, without individual samples."""
    content = {
        "settings": dict(results.settings),
        "prompts": [{"id": prompt.id, "prompt": prompt.text} for prompt in results.prompts],
        "seeds": list(results.seeds),
        "rewards": list(results.rewards),
        "diversity_by": results.embedder_name,
        "base": model_dict(results.base, results.means),
        "models": [comparison_dict(other) for other in results.comparisons],
        **({"clips": clips} if (clips := clips_dict(results)) else {}),
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
    ratio = comparison.diversity
    low, high = (None if ratio is None else ratio_bounds(ratio)) or (None, None)
    return {
        **model_dict(comparison.results, comparison.means),
        "trained_on": list(comparison.trained_rewards.names),
        "related": sorted(comparison.trained_rewards.related),
        "differences": {name: difference_dict(gap) for name, gap in comparison.differences.items()},
        "diversity_ratio": None if ratio is None else {"value": ratio.value, "low": low, "high": high},
        "verdict": {
            "name": comparison.verdict.name,
            "sentence": comparison.verdict.message,
            "fell": dict(comparison.verdict.decreases),
        },
    }


def difference_dict(gap: Difference | None) -> dict[str, Any] | None:
    if gap is None:
        return None
    return {
        **(estimate_dict(gap.estimate) or {}),
        "better": gap.num_better,
        "missing": gap.num_missing,
        "sd": finite_or_none(gap.z),
        "p_fell": finite_or_none(gap.p_decrease),
    }


def format_csv(results: EvaluationResults) -> str:
    """Return CSV text with one line per sample. The cell of a missing score is empty.

    Columns: model, prompt_id, prompt, seed, file, and one column per score.
    """
    rows = (
        [model.name, prompt.id, prompt.text, seed, file, *(scores[name].value for name in results.rewards)]
        for model in results.models
        for (prompt, seed), file, scores in zip(results.sample_keys(), model.files, model.samples, strict=True)
    )
    return csv_text(["model", "prompt_id", "prompt", "seed", "file", *results.rewards], rows)


STYLE = """
table { border-collapse: collapse; font-size: .9rem; }
.scroll { overflow-x: auto; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; vertical-align: top; }
th { font-weight: 600; }
td { font-variant-numeric: tabular-nums; }
.samples td { min-width: 8rem; max-width: 22rem; font-size: .8rem; }
.verdict { border-left: 4px solid #888; padding: .4rem .8rem; margin: .8rem 0; }
.verdict.hacked { border-color: #c22; }
.verdict.improved { border-color: #1a9; }
.notes { font-size: .85rem; opacity: .8; }
h3 { font-size: .95rem; font-weight: 600; margin: 1.2rem 0 .3rem; }
"""
HALF, HEIGHT = 90, 16  # half width and height of an interval plot, in pixels


def render_page(results: EvaluationResults) -> str:
    title = " and ".join(model.name for model in results.models)
    details = {model.name: model.path for model in results.models} | dict(results.settings)
    parts = [f"<p>{escape(format_headline(results))}</p>"]
    parts += [render_comparison(results, model_comparison) for model_comparison in results.comparisons] or [
        render_base(results)
    ]
    parts += [section] if (section := render_clip_section(results)) else []
    parts.append(f'<div class="notes">{"".join(f"<p>{escape(note)}</p>" for note in list_notes(results))}</div>')
    parts += [render_samples(results, index) for index in range(len(results.prompts))]
    return html_document(f"Evaluation of {title}", details, "\n".join(parts), style=STYLE + CHART_STYLE)


def render_comparison(results: EvaluationResults, comparison: ModelComparison) -> str:
    verdict = comparison.verdict
    titles = ["", "", results.base.name, comparison.results.name, "difference", "better in", "", "in sd of the base"]
    rows = []
    for cells in table_rows(results, comparison):
        plot = render_interval(comparison.differences.get(cells[0]), axis_scale(comparison))
        rows.append([*map(escape, cells), plot])
    return (
        f'<h2>{escape(comparison.results.name)}</h2>\n<p class="verdict {verdict.name.replace(" ", "-")}">'
        f"<b>{escape(verdict.name)}</b>: {escape(verdict.message)}</p>\n"
        f"{table_html(titles, rows)}"
    )


def render_base(results: EvaluationResults) -> str:
    rows = ([escape(name), escape(format_interval(results.means[name]))] for name in results.rewards)
    return table_html(["", results.base.name], rows)


def axis_scale(comparison: ModelComparison) -> float:
    """Return the largest absolute bound of the confidence intervals of all differences, or 1 if there are no intervals.

    Unit: standard deviation of the base model's scores.
    """
    ends = [abs(gap.z) + interval_width(gap) for gap in comparison.differences.values() if gap is not None]
    return max((end for end in ends if math.isfinite(end)), default=0.0) or 1.0


def interval_width(gap: Difference) -> float:
    """Return half the width of the confidence interval of `gap`, in standard deviations of the base model's scores."""
    return (gap.estimate.half_width or 0.0) / gap.base_std if gap.base_std > 0 else 0.0


def render_interval(gap: Difference | None, scale: float) -> str:
    """Return an SVG plot of a score difference with its confidence interval, or "" if the difference is unknown."""
    if gap is None or not math.isfinite(gap.z):
        return ""
    centre, half, middle = HALF + HALF * gap.z / scale, HALF * interval_width(gap) / scale, HEIGHT / 2
    return (
        f'<svg width="{2 * HALF + 8}" height="{HEIGHT}" viewBox="-4 0 {2 * HALF + 8} {HEIGHT}" role="img" '
        f'aria-label="{gap.z:+.2f}"><g stroke="currentColor"><path d="M{HALF} 0V{HEIGHT}" stroke-opacity=".35"/>'
        f'<path d="M{centre - half:.1f} {middle}H{centre + half:.1f}" stroke-width="2"/></g>'
        f'<circle cx="{centre:.1f}" cy="{middle}" r="3.5" fill="currentColor"/></svg>'
    )


def render_samples(results: EvaluationResults, prompt: int) -> str:
    text = results.prompts[prompt].text
    images = results.base.images[prompt * len(results.seeds)] if results.base.images else {}
    titles = "".join(f"<th>{escape(name)}</th>" for name in (*images, *(model.name for model in results.models)))
    inputs = "".join(f"<td>{render_media(file, results.base.sizes[0], name)}</td>" for name, file in images.items())
    rows = []
    for column, seed in enumerate(results.seeds):
        index = prompt * len(results.seeds) + column
        cells = inputs + "".join(f"<td>{render_sample(model, index, text, results)}</td>" for model in results.models)
        rows.append(f"<tr><th>seed {seed}</th>{cells}</tr>")
    table = f'<table class="samples"><tr><th></th>{titles}</tr>\n{"".join(rows)}</table>'
    return f'<h2>{escape(text)}</h2>\n<div class="scroll">{table}</div>'


def render_sample(model: ModelResults, index: int, prompt: str, results: EvaluationResults) -> str:
    lines = []
    for name in results.rewards:
        score = model.samples[index][name]
        lines.append(f"{name} {score.value:.3g}" if score.value is not None else f"{name}: {score.failure}")
    media = render_media(model.files[index], model.sizes[index], prompt)
    return media + "".join(f"<div>{escape(line)}</div>" for line in lines)


def render_media(file: str, shape: tuple[int, int], text: str) -> str:
    """Return the HTML of an image or video. shape: height and width in pixels. text: description of the image."""
    link, (height, width_pixels) = escape(quote(file)), shape
    size = f'width="{width_pixels}" height="{height}"' + (
        ' class="small"' if max(height, width_pixels) < SMALL_SIDE else ""
    )
    return (
        f'<video src="{link}" {size} controls loop muted playsinline preload="none"></video>'
        if link.endswith(".mp4")
        else f'<a href="{link}"><img src="{link}" {size} alt="{escape(text)}" loading="lazy"></a>'
    )
