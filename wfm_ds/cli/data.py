"""`wfm data DIR`: print the detected layout, the contents and three captions of a data folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wfm_ds.program import CommandParser, run_command

if TYPE_CHECKING:
    from wfm_ds.data.samples import SampleSet

NUM_CAPTIONS = 3
LAYOUT_NAMES = {
    "cosmos": "Cosmos folder",
    "webdataset": "tar shards (WebDataset)",
    "table": "caption table",
    "hf": "Hugging Face dataset",
    "media": "images or videos with caption files",
}


def parser() -> CommandParser:
    p = CommandParser(
        prog="wfm data",
        description="Show how data.kind: folder reads a folder, its contents and three captions.",
        epilog="Example: %(prog)s my_images",
    )
    p.add_argument("folder", type=Path, help="folder with images or videos and their captions (docs/data.md)")
    p.add_argument("--prompt", help="data.prompt: caption for images and videos without one")
    p.add_argument("--caption-column", metavar="NAME", help="data.caption_column: table column with the captions")
    p.key_options = {"data.prompt": "--prompt", "data.caption_column": "--caption-column"}
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    from wfm_ds.data.folder import load_folder
    from wfm_ds.data.folder_layout import detect_layout
    from wfm_ds.recipe.data import DataRecipe

    layout = detect_layout(args.folder)
    recipe = DataRecipe(kind="folder", path=str(args.folder), prompt=args.prompt, caption_column=args.caption_column)
    dataset = load_folder(recipe, args.folder, layout)
    lines = [f"{dataset.source}: {LAYOUT_NAMES[layout.kind]} ({layout.sign})", *summary_lines(dataset)]
    sys.stdout.write("\n".join(lines) + "\n")


def summary_lines(dataset: SampleSet) -> list[str]:
    from wfm_ds.data.samples import IMAGE_SUFFIXES, REASONS

    kinds = Counter("images" if s.media.suffix in IMAGE_SUFFIXES else "videos" for s in dataset.samples)
    lines = [f"samples    {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}"]
    lines += [f"note       {note}" for note in dataset.notes]
    lines += [f"skipped    {len(names)}, {REASONS[why]}, e.g. {names[0]}" for why, names in dataset.bad.items()]
    examples = dataset.samples[:: max(1, len(dataset.samples) // NUM_CAPTIONS)][:NUM_CAPTIONS]
    return [*lines, *(f"{sample.id}: {json.dumps(sample.prompt.text, ensure_ascii=False)}" for sample in examples)]
