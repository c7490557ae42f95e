"""MkDocs hook: add pages from outside docs/ to the site, and replace links to files outside docs/.

In the repository `../recipes/x.yaml` is a link. The site does not contain that file, so the link becomes the file's
name. A link to a missing file fails the build.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\(\.\./(?P<path>[^)#\s]+)[^)]*\)")
FROM_README = re.compile(r"\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<rest>[^)]*)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the README as the first page, the changelog, and the notebook."""
    from mkdocs.structure.files import File

    for name, text in (
        ("index.md", convert_readme((ROOT / "README.md").read_text(encoding="utf-8"))),
        ("changelog.md", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")),
        ("notebook.md", convert_notebook(json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8")))),
    ):
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to files outside docs/ by file names. Raises PluginError if such a file does not exist."""
    from mkdocs.exceptions import PluginError

    docs = ROOT / "docs"
    folder = (docs / page.file.src_path).parent

    def file_name(match: re.Match[str]) -> str:
        target = (folder / ".." / match["path"]).resolve()
        if target.is_relative_to(docs.resolve()):
            return match[0]  # mkdocs checks links between pages
        if not target.exists():
            raise PluginError(f"{page.file.src_path}: file ../{match['path']} does not exist")
        text = match["text"].strip("`")
        path = target.relative_to(ROOT.resolve()).as_posix()
        return f"`{text}`" if "/" in text or "." in text else f"{text} (`{path}`)"

    return OUTSIDE.sub(file_name, markdown)


def convert_readme(text: str) -> str:
    """Return README.md as a page of docs/, with its links made relative to docs/."""

    def relative_link(match: re.Match[str]) -> str:
        path = match["path"]
        return f"]({path.removeprefix('docs/') if path.startswith('docs/') else '../' + path}{match['rest']})"

    return FROM_README.sub(relative_link, text)


def convert_notebook(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: text cells, code, and outputs, with inline images."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![](data:image/png;base64,{''.join(data['image/png']).strip()})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
