"""Tables of evaluation reports as text, HTML and CSV, and the formats of their cells."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from wfm_ds.evaluation.paired_statistics import MeanEstimate, ratio_bounds


def format_value(estimate: MeanEstimate | None) -> str:
    return "-" if estimate is None else format_number(estimate.value)


def format_interval(estimate: MeanEstimate | None, sign: str = "") -> str:
    if estimate is None:
        return "-"
    return f"{format_number(estimate.value, sign)}{format_bounds(estimate.low, estimate.high, sign)}"


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
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)


def table_html(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table that can be scrolled. titles: text of the first row. rows: HTML of the cells."""
    lines = ["".join(f"<th>{escape(title)}</th>" for title in titles)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    table = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>{table}</table></div>'


def csv_text(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return CSV text. The cell of None is empty."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([titles, *rows])
    return buffer.getvalue()


def estimate_dict(estimate: MeanEstimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    fields = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {**fields, "prompts": estimate.num_prompts, "samples": estimate.num_samples}
