"""`wfm page DIR ...`: write the HTML page of runs that have no page or an outdated one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser


def parser() -> CommandParser:
    p = CommandParser(
        description=(
            "Write index.html and page/data.js of a run: curves, samples, recipe. A run also writes its own page."
        ),
        epilog="Example: %(prog)s outputs/sd3_nft",
    )
    p.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run's output folder")
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.monitoring.run_page import write_page
    from wfm_ds.runs.layout import METRICS_FILE

    for folder in args.folders:
        if not (folder / METRICS_FILE).is_file():
            raise UserError(
                f"{folder} has no {METRICS_FILE}, so it is not a run's folder; use the run.output_dir of a run"
            )
    for folder in args.folders:
        try:
            index = write_page(folder)
        except FileExistsError as error:
            raise UserError(f"{error}: move it, then run the same command again") from error
        record_page(folder)
        sys.stdout.write(f"{index}\n")


def record_page(folder: Path) -> None:
    """Add the page to the run's record file if that file exists, so that `wfm train --overwrite` removes the page."""
    from wfm_ds.runs import layout
    from wfm_ds.storage import atomic

    if (folder / layout.RECORD_FILE).exists():
        names = {*layout.read_folder_record(folder), layout.PAGE, layout.PAGE_FOLDER}
        atomic.write_text(folder / layout.RECORD_FILE, layout.format_record(names))
