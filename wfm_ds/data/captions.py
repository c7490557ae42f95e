"""`python -m wfm_ds.data.captions DIR`: writes NAME.json beside each image and video, which makes DIR a paired folder.

--prompt "..." gives all of them one caption, --from FILE.csv or FILE.jsonl each its own: columns or keys `file` (a path
below DIR) and `prompt`; all others become metadata.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wfm_ds.data.paired import walk
from wfm_ds.data.samples import MEDIA_SUFFIXES, is_encodable
from wfm_ds.errors import DataError
from wfm_ds.program import program
from wfm_ds.storage import atomic
from wfm_ds.storage.regular import open_regular

NUM_SHOWN = 10

Caption = Mapping[str, Any]
"""Content of a NAME.json: `prompt`, and any metadata."""


def media_files(folder: Path) -> list[Path]:
    """Return all images and videos below the folder, sorted. DataError if there is none."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    found = sorted(path for path in walk(folder) if path.suffix.lower() in MEDIA_SUFFIXES)
    if not found:
        raise DataError(f"{folder} holds no image or video")
    return found


def read_table(table: Path) -> dict[str, Caption]:
    """Read captions by file, from a CSV file with a header line or a JSONL file, both UTF-8.

    DataError, with the line, for a row without `file` or `prompt`, and for a file that comes twice.
    """
    captions: dict[str, Caption] = {}
    for number, row in table_rows(table):
        file, prompt = row.pop("file", None), row.get("prompt")
        if not isinstance(file, str) or not file or not isinstance(prompt, str) or not prompt.strip():
            raise DataError(f"{table}: line {number} has no `file` or no `prompt`")
        if not is_encodable(row):
            raise DataError(f"{table}: line {number} has text that UTF-8 cannot encode")
        if file in captions:
            raise DataError(f"{table}: line {number} names {file} again")
        captions[file] = row
    return captions


def table_rows(table: Path) -> list[tuple[int, dict[str, Any]]]:
    """Read rows with the numbers of the lines on which they end."""
    try:
        with io.TextIOWrapper(open_regular(table), encoding="utf-8-sig", newline="") as file:
            if table.suffix.lower() == ".jsonl":
                return [(n, json_row(table, n, line)) for n, line in enumerate(file, start=1) if line.strip()]
            if table.suffix.lower() == ".csv":
                reader = csv.DictReader(file, strict=True)
                return [(reader.line_num, csv_row(table, reader.line_num, row)) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} cannot be read: {error}") from error
    raise DataError(f"{table} is neither a .csv nor a .jsonl file")


def json_row(table: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{table}: line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{table}: line {number} is not a JSON object")
    return row


def csv_row(table: Path, number: int, row: dict[str | None, Any]) -> dict[str, Any]:
    if None in row or None in row.values():
        raise DataError(f"{table}: line {number} has more or fewer fields than the header")
    return {str(name): value for name, value in row.items()}


def planned(folder: Path, captions: Mapping[str, Caption]) -> dict[Path, Caption]:
    """Return the caption files to be written. DataError if the table and the folder do not name the same media."""
    media = {path.relative_to(folder).as_posix(): path for path in media_files(folder)}
    for problem, names in (
        ("are in the table but not in", sorted(captions.keys() - media.keys())),
        ("have no line in the table for", sorted(media.keys() - captions.keys())),
    ):
        if names:
            raise DataError(f"{len(names)} files {problem} {folder}, e.g. {', '.join(names[:NUM_SHOWN])}")
    plan = {media[name].with_suffix(".json"): caption for name, caption in captions.items()}
    if len(plan) < len(media):
        raise DataError(f"{folder}: media of the same name but another suffix share one caption")
    return plan


def write_captions(plan: Mapping[Path, Caption], *, overwrite: bool) -> int:
    """Write all of them and return their number; DataError, before any is written, if one exists and may not go."""
    there = [path for path in plan if path.exists()]
    if there and not overwrite:
        raise DataError(f"{len(there)} captions exist, e.g. {there[0]}: --overwrite replaces them")
    for path, caption in plan.items():
        atomic.write_text(path, json.dumps(caption, ensure_ascii=False) + "\n")
    return len(plan)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="wfm_ds.data.captions", description="Write NAME.json with a caption beside each image and video."
    )
    p.add_argument("folder", type=Path, help="a folder with images and videos, at any depth")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the caption of all of them")
    source.add_argument("--from", dest="table", type=Path, metavar="FILE", help=".csv or .jsonl with file and prompt")
    p.add_argument("--overwrite", action="store_true", help="replace captions that exist")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    if args.table is not None:
        captions: Mapping[str, Caption] = read_table(args.table)
    else:
        if not args.prompt.strip() or not is_encodable(args.prompt):
            raise DataError("--prompt is blank, or text that UTF-8 cannot encode")
        names = [path.relative_to(args.folder).as_posix() for path in media_files(args.folder)]
        captions = {name: {"prompt": args.prompt.strip()} for name in names}
    count = write_captions(planned(args.folder, captions), overwrite=args.overwrite)
    sys.stdout.write(f"{count} captions in {args.folder}\n")


if __name__ == "__main__":
    sys.exit(main())
