"""Reading of JSONL files. Only the newline character ends a line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def split_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) for each line that is not blank. A byte order mark is removed."""
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            yield number, line


def read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file. Other lines are skipped. Yields nothing if the file does not exist."""
    for _, line in split_lines(path.read_bytes()) if path.is_file() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # such as an incomplete last line
            continue
        if isinstance(row, dict):
            yield row
