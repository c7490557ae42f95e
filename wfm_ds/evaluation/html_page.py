"""The evaluation report as one HTML page: verdicts, plots of the differences, and samples next to each other.

The page has no scripts or external resources and uses relative links. All text is escaped, because prompts are
untrusted.
"""

from __future__ import annotations

import math
from html import escape
from urllib.parse import quote

from wfm_ds.evaluation.paired_statistics import Difference
from wfm_ds.evaluation.report import format_headline, format_interval, list_notes, table_rows
from wfm_ds.evaluation.results import EvaluationResults, ModelComparison, ModelResults
from wfm_ds.monitoring.gallery import SMALL_SIDE, html_document

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
svg { display: block; }
"""
HALF, HEIGHT = 90, 16  # half width and height of an interval plot, in pixels


def render_page(results: EvaluationResults) -> str:
    title = " and ".join(model.name for model in results.models)
    details = {model.name: model.path for model in results.models} | dict(results.settings)
    parts = [f"<p>{escape(format_headline(results))}</p>"]
    parts += [render_comparison(results, model_comparison) for model_comparison in results.comparisons] or [
        render_base(results)
    ]
    parts.append(f'<div class="notes">{"".join(f"<p>{escape(note)}</p>" for note in list_notes(results))}</div>')
    parts += [render_samples(results, index) for index in range(len(results.prompts))]
    return html_document(f"Evaluation of {title}", details, "\n".join(parts), style=STYLE)


def render_comparison(results: EvaluationResults, comparison: ModelComparison) -> str:
    """Return HTML with a model's verdict and a table that compares the model with the base model."""
    verdict = comparison.verdict
    titles = ["", "", results.base.name, comparison.results.name, "difference", "better in", "", "in sd of the base"]
    rows = []
    for cells in table_rows(results, comparison):
        plot = render_interval(comparison.differences.get(cells[0]), axis_scale(comparison))
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}<td>{plot}</td></tr>")
    return (
        f'<h2>{escape(comparison.results.name)}</h2>\n<p class="verdict {verdict.name.replace(" ", "-")}">'
        f"<b>{escape(verdict.name)}</b>: {escape(verdict.message)}</p>\n"
        f'<div class="scroll"><table><tr>{"".join(f"<th>{escape(one)}</th>" for one in titles)}</tr>\n'
        + "\n".join(rows)
        + "</table></div>"
    )


def render_base(results: EvaluationResults) -> str:
    """Return the HTML table of the base model's scores. Used if the base model is the only model."""
    rows = (
        f"<tr><td>{escape(name)}</td><td>{escape(format_interval(results.means[name]))}</td></tr>"
        for name in results.rewards
    )
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def axis_scale(comparison: ModelComparison) -> float:
    """Return the largest absolute bound of all confidence intervals, or 1 if there are no intervals.

    The result is in units of the standard deviation of the base model's scores.
    """
    ends = [abs(gap.z) + interval_width(gap) for gap in comparison.differences.values() if gap is not None]
    return max((end for end in ends if math.isfinite(end)), default=0.0) or 1.0


def interval_width(gap: Difference) -> float:
    """Return half the width of the confidence interval.

    The result is in units of the standard deviation of the base model's scores.
    """
    return (gap.estimate.half_width or 0.0) / gap.base_std if gap.base_std > 0 else 0.0


def render_interval(gap: Difference | None, scale: float) -> str:
    """Return an SVG plot of a score difference, or "" if the difference is unknown.

    The plot shows the confidence interval, a dot at the difference and a line at 0.
    """
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
    """Return the HTML table of the samples of one prompt. It has one row per seed and one column per model."""
    text = results.prompts[prompt].text
    titles = "".join(f"<th>{escape(model.name)}</th>" for model in results.models)
    rows = []
    for column, seed in enumerate(results.seeds):
        index = prompt * len(results.seeds) + column
        cells = "".join(f"<td>{render_sample(model, index, text, results)}</td>" for model in results.models)
        rows.append(f"<tr><th>seed {seed}</th>{cells}</tr>")
    table = f'<table class="samples"><tr><th></th>{titles}</tr>\n{"".join(rows)}</table>'
    return f'<h2>{escape(text)}</h2>\n<div class="scroll">{table}</div>'


def render_sample(model: ModelResults, index: int, prompt: str, results: EvaluationResults) -> str:
    link, (height, width_pixels) = escape(quote(model.files[index])), model.sizes[index]
    size = f'width="{width_pixels}" height="{height}"' + (
        ' class="small"' if max(height, width_pixels) < SMALL_SIDE else ""
    )
    media = (
        f'<video src="{link}" {size} controls loop muted playsinline preload="none"></video>'
        if link.endswith(".mp4")
        else f'<a href="{link}"><img src="{link}" {size} alt="{escape(prompt)}" loading="lazy"></a>'
    )
    lines = []
    for name in results.rewards:
        score = model.samples[index][name]
        lines.append(f"{name} {score.value:.3g}" if score.value is not None else f"{name}: {score.failure}")
    return media + "".join(f"<div>{escape(line)}</div>" for line in lines)
