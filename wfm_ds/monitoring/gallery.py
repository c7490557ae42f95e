"""An HTML page of generated samples, without scripts, stored next to the sample files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

SMALL_SIDE = 128  # pixels; smaller samples are enlarged without smoothing

STYLE = """
:root { color-scheme: light dark; font: 16px/1.45 system-ui, sans-serif; }
body { margin: 0 auto; padding: 1rem clamp(.75rem, 3vw, 2rem) 3rem; max-width: 90rem; }
h1 { font-size: 1.35rem; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; font-weight: 600; margin: 2rem 0 .6rem; overflow-wrap: anywhere; }
dl { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: 0 0 1.5rem; font-size: .85rem; }
dl div { display: flex; gap: .4rem; min-width: 0; }
dt { opacity: .65; }
dd { margin: 0; overflow-wrap: anywhere; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(45%, 15rem), 1fr)); }
figure { margin: 0; border: 1px solid color-mix(in srgb, currentColor 18%, transparent); border-radius: .5rem;
  overflow: hidden; }
img, video { display: block; width: 100%; height: auto; background: #8882; }
.small { image-rendering: pixelated; }
figcaption { padding: .5rem .65rem; font-size: .85rem; overflow-wrap: anywhere; }
figcaption p { margin: 0 0 .25rem; }
small { opacity: .7; font-size: .95em; }
.failed { color: #c22; }
""".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class GalleryEntry:
    """An image or video file on the page, with its prompt and generation parameters."""

    file: str  # relative to the page; .mp4 is shown as a video, other files as images
    width: int  # pixels
    height: int
    prompt: str
    caption: str  # seed and parameters
    failure: str = ""  # why the sample is invalid; empty for a valid sample


def gallery_page(title: str, facts: Mapping[str, str], entries: Sequence[GalleryEntry]) -> str:
    """Return the HTML page of generated samples. facts: {name: value} listed below the title.

    Consecutive entries with the same prompt form a group with the prompt as its heading. If no prompt repeats, the
    caption of each entry contains the prompt.
    """
    groups = [list(group) for _, group in itertools.groupby(entries, key=lambda entry: entry.prompt)]
    if all(len(group) == 1 for group in groups):
        body = grid_html(entries, with_prompt=True)
    else:
        parts = [f"<h2>{escape(g[0].prompt)}</h2>\n{grid_html(g, with_prompt=False)}" for g in groups]
        body = "\n".join(parts)
    return html_document(title, facts, body)


def html_document(title: str, facts: Mapping[str, str], body: str, *, style: str = "") -> str:
    """Return an HTML page. facts: {name: value} below the title. body: HTML. style: CSS added to STYLE."""
    facts_html = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>\n" for k, v in facts.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{STYLE}{style}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
<dl>
{facts_html}</dl>
{body}
</body>
</html>
"""


def grid_html(entries: Sequence[GalleryEntry], *, with_prompt: bool) -> str:
    figures = "\n".join(figure_html(entry, with_prompt=with_prompt) for entry in entries)
    return f'<div class="grid">\n{figures}\n</div>'


def figure_html(entry: GalleryEntry, *, with_prompt: bool) -> str:
    link, text = escape(quote(entry.file)), escape(entry.prompt)
    size = f'width="{entry.width}" height="{entry.height}"'
    small = ' class="small"' if max(entry.width, entry.height) < SMALL_SIDE else ""
    if entry.file.endswith(".mp4"):
        element = (
            f'<video{small} src="{link}" {size} aria-label="{text}" controls loop muted playsinline preload="metadata">'
            f'<a href="{link}">{link}</a></video>'
        )
    else:
        element = f'<a href="{link}"><img{small} src="{link}" {size} alt="{text}" loading="lazy"></a>'
    prompt = f"<p>{text}</p>" if with_prompt else ""
    failure = f'<p class="failed">{escape(entry.failure)}</p>' if entry.failure else ""
    return f"<figure>{element}<figcaption>{prompt}{failure}<small>{escape(entry.caption)}</small></figcaption></figure>"
