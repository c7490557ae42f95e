"""Hook of mkdocs.yml: pages of the site that stand elsewhere in the repository, and links that lead out of docs/.

The same files are read on a forge, where `../recipes/x.yaml` is a link, and on the site, which has no such file: there
it becomes its name. A link to a file that is missing ends the build.
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
    """Add the first page, the changelog and the notebook as a page."""
    from mkdocs.structure.files import File

    for name, text in (
        ("index.md", of_readme((ROOT / "README.md").read_text(encoding="utf-8"))),
        ("changelog.md", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")),
        ("notebook.md", of_notebook(json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8")))),
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


def of_readme(text: str) -> str:
    """README.md as a page in docs/: its links are relative to the repository."""

    def moved(match: re.Match[str]) -> str:
        path = match["path"]
        return f"]({path.removeprefix('docs/') if path.startswith('docs/') else '../' + path}{match['rest']})"

    return FROM_README.sub(moved, text)


def of_notebook(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: its text, its code, and what that printed; pictures inline."""
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
