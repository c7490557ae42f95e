"""Read code blocks and tables from the pages in docs/."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def code(page, name):
    """Return the Python block of the page that starts with the line `# NAME`."""
    [text] = re.findall(rf"```python\n(# {re.escape(name)}\n.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return text


def write_code(page, name, folder):
    """Write the Python block `name` of the page to a file in `folder`."""
    (folder / name).write_text(code(page, name))


def table_rows(page, header):
    """Return the cells of each row of the page's table with this start of its header."""
    [table] = re.findall(rf"^{re.escape(header)}.*\n\|[-|]+\n((?:\|.*\n)+)", (DOCS / page).read_text(), re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]
