"""The evaluation report as one HTML page: verdicts, plots of the differences, and samples side by side.

The page has no scripts or external resources and uses relative links. All text is escaped, since prompts are untrusted.
"""

from __future__ import annotations

import math
from html import escape
from urllib.parse import quote

from wfm_ds.evaluation.paired import Difference
from wfm_ds.evaluation.report import head, notes, plain, rows_of
from wfm_ds.evaluation.results import Comparison, Evaluation, Measured
from wfm_ds.monitoring.gallery import SMALL, document

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


def page(found: Evaluation) -> str:
    """Return the complete HTML document."""
    title = " and ".join(model.name for model in found.models)
    details = {model.name: model.path for model in found.models} | dict(found.settings)
    parts = [f"<p>{escape(head(found))}</p>"]
    parts += [comparison(found, model_comparison) for model_comparison in found.others] or [alone(found)]
    parts.append(f'<div class="notes">{"".join(f"<p>{escape(note)}</p>" for note in notes(found))}</div>')
    parts += [samples_of(found, index) for index in range(len(found.prompts))]
    return document(f"Evaluation of {title}", details, "\n".join(parts), style=STYLE)


def comparison(found: Evaluation, other: Comparison) -> str:
    """Return the verdict on a model and its table of differences."""
    verdict = other.verdict
    titles = ["", "", found.base.name, other.measured.name, "difference", "better in", "", "in sd of the base"]
    rows = []
    for cells in rows_of(found, other):
        plot = interval(other.differences.get(cells[0]), scale_of(other))
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}<td>{plot}</td></tr>")
    return (
        f'<h2>{escape(other.measured.name)}</h2>\n<p class="verdict {verdict.name.replace(" ", "-")}">'
        f"<b>{escape(verdict.name)}</b>: {escape(verdict.sentence)}</p>\n"
        f'<div class="scroll"><table><tr>{"".join(f"<th>{escape(one)}</th>" for one in titles)}</tr>\n'
        + "\n".join(rows)
        + "</table></div>"
    )


def alone(found: Evaluation) -> str:
    """Return the table of the base model's scores, for an evaluation without other models."""
    rows = (f"<tr><td>{escape(name)}</td><td>{escape(plain(found.means[name]))}</td></tr>" for name in found.rewards)
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def scale_of(other: Comparison) -> float:
    """Return the largest interval bound among the differences, in standard deviations of the base."""
    ends = [abs(gap.z) + width(gap) for gap in other.differences.values() if gap is not None]
    return max((end for end in ends if math.isfinite(end)), default=0.0) or 1.0


def width(gap: Difference) -> float:
    """Return the half width of the interval in standard deviations of the base."""
    return (gap.estimate.half_width or 0.0) / gap.spread if gap.spread > 0 else 0.0


def interval(gap: Difference | None, scale: float) -> str:
    """Plot a difference as a dot on its interval, with a line at 0."""
    if gap is None or not math.isfinite(gap.z):
        return ""
    centre, half, middle = HALF + HALF * gap.z / scale, HALF * width(gap) / scale, HEIGHT / 2
    return (
        f'<svg width="{2 * HALF + 8}" height="{HEIGHT}" viewBox="-4 0 {2 * HALF + 8} {HEIGHT}" role="img" '
        f'aria-label="{gap.z:+.2f}"><g stroke="currentColor"><path d="M{HALF} 0V{HEIGHT}" stroke-opacity=".35"/>'
        f'<path d="M{centre - half:.1f} {middle}H{centre + half:.1f}" stroke-width="2"/></g>'
        f'<circle cx="{centre:.1f}" cy="{middle}" r="3.5" fill="currentColor"/></svg>'
    )


def samples_of(found: Evaluation, prompt: int) -> str:
    """Return the table of a prompt's samples: one row per seed, one column per model."""
    text = found.prompts[prompt].text
    titles = "".join(f"<th>{escape(model.name)}</th>" for model in found.models)
    rows = []
    for column, seed in enumerate(found.seeds):
        index = prompt * len(found.seeds) + column
        cells = "".join(f"<td>{sample(model, index, text, found)}</td>" for model in found.models)
        rows.append(f"<tr><th>seed {seed}</th>{cells}</tr>")
    table = f'<table class="samples"><tr><th></th>{titles}</tr>\n{"".join(rows)}</table>'
    return f'<h2>{escape(text)}</h2>\n<div class="scroll">{table}</div>'


def sample(model: Measured, place: int, prompt: str, found: Evaluation) -> str:
    """Return a sample with its scores."""
    link, (height, width_pixels) = escape(quote(model.files[place])), model.sizes[place]
    size = f'width="{width_pixels}" height="{height}"' + (' class="small"' if max(height, width_pixels) < SMALL else "")
    media = (
        f'<video src="{link}" {size} controls loop muted playsinline preload="none"></video>'
        if link.endswith(".mp4")
        else f'<a href="{link}"><img src="{link}" {size} alt="{escape(prompt)}" loading="lazy"></a>'
    )
    lines = []
    for name in found.rewards:
        score = model.samples[place][name]
        lines.append(f"{name} {score.value:.3g}" if score.value is not None else f"{name}: {score.failure}")
    return media + "".join(f"<div>{escape(line)}</div>" for line in lines)
