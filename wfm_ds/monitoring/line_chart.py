"""Line charts for HTML pages, as SVG without scripts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 240  # of the plot area of the chart, in pixels
MARGIN = 40  # around the plot area, for the labels of the axes
COLORS = ("#1a7f37", "#0969da", "#bc4c00", "#8250df", "#bf3989")  # of the curves, readable on white and on black
CHART_STYLE = """
svg { display: block; max-width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; fill: currentColor; }
""".strip()

Curve = Sequence[tuple[int, float]]
"""(x, y) of each point, with ascending x."""


@dataclass(frozen=True, slots=True)
class ChartAxes:
    x: tuple[int, int]
    y: tuple[float, float]

    def position(self, x: float, y: float) -> tuple[float, float]:
        (left, right), (bottom, top) = self.x, self.y
        return MARGIN + WIDTH * (x - left) / (right - left), MARGIN + HEIGHT * (top - y) / (top - bottom)


def chart_html(
    curves: Mapping[str, Curve],
    x_label: str,
    y_range: tuple[float, float] = (0.0, 1.0),
    half_widths: Mapping[str, Sequence[float | None]] | None = None,
) -> str:
    """Return HTML: a line chart, and a legend with each curve's first and last value.

    curves: {label: curve}, with at least two different x values in total. half_widths: {label: half the width of the
    confidence interval at each point, or None for a point without interval}.
    """
    numbers = sorted({x for points in curves.values() for x, _ in points})
    axes = ChartAxes((numbers[0], numbers[-1]), y_range)
    legend, lines = [], []
    for color, (label, points) in zip(itertools.cycle(COLORS), curves.items(), strict=False):
        legend.append(
            f'<div><b style="color: {color}">&#9679; {escape(label)}</b>: '
            f"{points[0][1]:.3f} &rarr; {points[-1][1]:.3f}</div>"
        )
        lines.append(curve_svg(points, color, axes, (half_widths or {}).get(label, [None] * len(points))))
    low, high = y_range
    ticks = [axis_tick(low + (high - low) * k / 4, axes) for k in range(5)]
    for number in numbers:
        x, _ = axes.position(number, low)
        ticks.append(f'<text x="{x:.0f}" y="{MARGIN + HEIGHT + 18}" text-anchor="middle">{number}</text>')
    width, height = WIDTH + 2 * MARGIN, HEIGHT + 2 * MARGIN
    return (
        f"<div>{''.join(legend)}</div>\n"
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(", ".join(curves))}">\n'
        f"{''.join(ticks)}\n{''.join(lines)}\n"
        f'<text x="{MARGIN + WIDTH / 2:.0f}" y="{MARGIN + HEIGHT + 36}" text-anchor="middle">{escape(x_label)}</text>'
        "</svg>"
    )


def curve_svg(points: Curve, color: str, axes: ChartAxes, half_widths: Sequence[float | None]) -> str:
    positions = [axes.position(x, y) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in positions)
    bars = []
    for (x, y), half_width in zip(points, half_widths, strict=True):
        if half_width is not None:
            (left, top), (_, bottom) = axes.position(x, y + half_width), axes.position(x, y - half_width)
            bars.append(f'<path d="M{left:.1f} {top:.1f}V{bottom:.1f}" stroke="{color}" stroke-opacity=".6"/>')
    return f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>{dots}{"".join(bars)}'


def axis_tick(value: float, axes: ChartAxes) -> str:
    _, y = axes.position(axes.x[0], value)
    return (
        f'<path d="M{MARGIN} {y:.0f}h{WIDTH}" stroke="currentColor" stroke-opacity=".2"/>'
        f'<text x="{MARGIN - 8}" y="{y + 4:.0f}" text-anchor="end">{value:.3g}</text>'
    )
