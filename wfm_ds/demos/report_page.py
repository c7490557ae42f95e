"""The HTML page of a quickstart: the score over the RL steps, samples before and after RL, a table and commands."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from wfm_ds.demos.base import Demo, load_evaluations
from wfm_ds.monitoring.gallery import html_document
from wfm_ds.monitoring.line_chart import CHART_STYLE, Curve, chart_html
from wfm_ds.monitoring.samples import SAMPLES_FILE, list_sample_folders
from wfm_ds.storage import atomic
from wfm_ds.storage.json_lines import read_json_rows

PAGE_FILE = "index.html"
MIN_POINTS = 3  # minimum number of points for a curve to be shown
MIN_IMAGE_WIDTH = 650  # pixels; narrower images of samples are enlarged by an integer factor
MAX_VIDEOS = 12  # MP4 samples of an evaluation
STAGES = {"before": "before RL", "after": "after RL"}
"""{name of the files with samples, without suffix: caption}."""

STYLE = (
    """
.pair { display: flex; flex-wrap: wrap; gap: 1rem; margin: .5rem 0; }
.pair figure { max-width: 48%; min-width: 20rem; }
.pair img { width: auto; max-width: 100%; }
.samples { display: flex; flex-wrap: wrap; gap: .5rem; font-size: .75rem; }
.samples div { width: 6rem; }  /* a video and its prompt */
figcaption { font-weight: 600; }
table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0; }
th, td { text-align: left; padding: .25rem 1rem .25rem 0; font-variant-numeric: tabular-nums; }
pre { overflow-x: auto; padding: .6rem; background: #8882; border-radius: .3rem; font-size: .85rem; }
""".rstrip()
    + f"\n{CHART_STYLE}"
)


def write_page(demo: Demo, folder: Path, run: Path, report: Sequence[str]) -> None:
    """Write index.html into the folder of a quickstart. Call `Demo.write_comparison` first: the page shows its images.

    run: output folder of the RL run. report: lines of the report, in Markdown.
    """
    sections = demo.page_sections(folder, run) or run_sections(demo, folder, run)
    runs = sorted(file.parent.name for file in folder.glob("*/metrics.jsonl"))
    write_sections(demo.description, folder, sections, report, runs)


def write_sections(
    description: str, folder: Path, sections: Sequence[str], report: Sequence[str], runs: Iterable[str]
) -> None:
    """Write index.html: sections of HTML, the lines of the report, and links to the pages of the runs."""
    links = ", ".join(f'<a href="{escape(name)}/index.html">{escape(name)}</a>' for name in runs)
    links = f"<p>Pages of the runs, with all metrics and samples: {links}</p>"
    body = "\n".join([*sections, "<h2>Result</h2>", report_html(report), links])
    atomic.write_text(folder / PAGE_FILE, html_document(f"Quickstart: {description}", {}, body, style=STYLE))


def run_sections(demo: Demo, folder: Path, run: Path) -> list[str]:
    curves = load_curves(run, demo.curves)
    parts = ["<h2>Samples</h2>", *images_html(folder), *videos_html(folder, run)]
    if any(len(points) >= MIN_POINTS for points in curves.values()):
        parts[:0] = ["<h2>Score over the RL steps, on held-out noise seeds</h2>", chart_html(curves, "RL step")]
    return parts


def load_curves(run: Path, tags: Mapping[str, str]) -> dict[str, Curve]:
    """Return {label of a curve: [(RL step, value of a metric)]}, with one point for each evaluation of an RL run.

    run: output folder of the RL run. tags: {label of a curve: name of its metric}.
    """
    return {
        label: [
            (int(samples.name.removeprefix("step_")), metrics[tag]) for samples, metrics in load_evaluations(run, tag)
        ]
        for label, tag in tags.items()
    }


def images_html(folder: Path) -> list[str]:
    from PIL import Image

    parts = []
    for suffix in (".png", ".gif"):
        files = {stage: f"{stage}{suffix}" for stage in STAGES}
        if not all((folder / file).exists() for file in files.values()):
            continue
        elements = {}
        for stage, file in files.items():
            with Image.open(folder / file) as image:
                factor = max(1, round(MIN_IMAGE_WIDTH / image.width))
                style = f'class="small" style="width: {factor * image.width}px"' if factor > 1 else ""
            elements[STAGES[stage]] = f'<img src="{file}" alt="{STAGES[stage]}" {style}>'
        parts.append(figures_html(elements))
    return parts


def videos_html(folder: Path, run: Path) -> list[str]:
    folders = list(list_sample_folders(run).values())
    elements = {}
    for caption, samples in zip(STAGES.values(), (folders[0], folders[-1]), strict=True):
        rows = [row for row in read_json_rows(samples / SAMPLES_FILE) if row["file"].endswith(".mp4")][:MAX_VIDEOS]
        elements[caption] = "".join(
            f'<div><video src="{escape(quote((samples / row["file"]).relative_to(folder).as_posix()))}" '
            f'class="small" autoplay loop muted playsinline></video>{escape(row["prompt"])}</div>'
            for row in rows
        )
    return [figures_html(elements)] if all(elements.values()) else []


def figures_html(elements: Mapping[str, str]) -> str:
    """Return figures side by side. elements: {caption: HTML of the figure}."""
    figures = (
        f'<figure><div class="samples">{element}</div><figcaption>{escape(caption)}</figcaption></figure>'
        for caption, element in elements.items()
    )
    return f'<div class="pair">{"".join(figures)}</div>'


def report_html(lines: Sequence[str]) -> str:
    parts = []
    for kind, group in itertools.groupby(lines, key=line_kind):
        if kind == "table":
            head, _, *rows = group
            table = "\n".join([table_row_html(head, "th"), *(table_row_html(row, "td") for row in rows)])
            parts.append(f"<table>{table}</table>")
        elif kind == "code":
            parts.append(f"<pre>{escape(chr(10).join(line[4:] for line in group))}</pre>")
        elif kind == "text":
            parts += [f"<p>{escape(line)}</p>" for line in group]
    return "\n".join(parts)


def table_row_html(line: str, tag: str) -> str:
    cells = [f"<{tag}>{escape(cell.strip())}</{tag}>" for cell in line.strip("|").split("|")]
    return f"<tr>{''.join(cells)}</tr>"


def line_kind(line: str) -> str:
    if line.startswith("|"):
        return "table"
    return "code" if line.startswith("    ") else "text" if line else ""
