"""The code that pages of docs/ show, as text and as files."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def code(page, name):
    """The Python file that the page shows, whose first line is `# NAME`."""
    [text] = re.findall(rf"```python\n(# {re.escape(name)}\n.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return text


def write_code(page, name, folder):
    """Write it into the folder."""
    (folder / name).write_text(code(page, name))
