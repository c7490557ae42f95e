"""The code that pages of docs/ show, as files."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def write_code(page, name, folder):
    """Write the Python file that the page shows, whose first line is `# NAME`, into the folder."""
    [text] = re.findall(rf"```python\n(# {re.escape(name)}\n.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (folder / name).write_text(text)
