"""`wfm data captions DIR`: write a caption file for each image and video.

--prompt "..." sets the same caption for all files. --from FILE.csv or FILE.jsonl reads a table with the columns or keys
`file` (relative to DIR) and `prompt`. Other columns become metadata. --layout selects the caption files: NAME.json or
NAME.txt next to each image or video, or metas/NAME.txt in a Cosmos folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wfm_ds.data.caption_table import read_rows
from wfm_ds.data.captioned_folder import MEDIA_FOLDERS
from wfm_ds.data.file_lists import files_below
from wfm_ds.data.folder_layout import is_lerobot
from wfm_ds.data.samples import MEDIA_SUFFIXES, is_encodable
from wfm_ds.errors import DataError
from wfm_ds.program import CommandParser
from wfm_ds.storage import atomic

NUM_SHOWN = 10
LAYOUTS = {"json": "NAME.json", "txt": "NAME.txt", "cosmos": "metas/NAME.txt"}

Caption = Mapping[str, Any]
"""A caption as in NAME.json: the key `prompt`, plus any metadata keys."""


def media_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    files = sorted(path for path in map(Path, files_below(folder)) if path.suffix.lower() in MEDIA_SUFFIXES)
    if not files:
        raise DataError(f"{folder} has no images or videos")
    return files


def read_caption_table(table: Path) -> dict[str, Caption]:
    """Return {file: caption} from a .csv or .jsonl table. Raises DataError for an invalid row or a duplicate file."""
    captions: dict[str, Caption] = {}
    for location, row in read_rows(table).items():
        where = f"{table}: {location}"
        file, prompt = row.pop("file", None), row.get("prompt")
        if not isinstance(file, str) or not file or not isinstance(prompt, str) or not prompt.strip():
            raise DataError(f"{where} has no `file` or no `prompt`")
        if not is_encodable(row):
            raise DataError(f"{where} has text that cannot be encoded as UTF-8")
        if file in captions:
            raise DataError(f"{where} repeats the file {file}")
        captions[file] = row
    return captions


def plan_captions(folder: Path, captions: Mapping[str, Caption], layout: str = "json") -> dict[Path, Caption]:
    """Return {caption file to write: its caption}.

    captions: {path of an image or video, relative to `folder`: caption}. Raises DataError if an image or video has no
    caption, if a caption has no image or video, or if the layout cannot store the captions.
    """
    media = {path.relative_to(folder).as_posix(): path for path in media_files(folder)}
    for problem, names in (
        ("are in the table but not in", sorted(captions.keys() - media.keys())),
        ("have no row in the table for", sorted(media.keys() - captions.keys())),
    ):
        if names:
            raise DataError(f"{len(names)} files {problem} {folder}, e.g. {', '.join(names[:NUM_SHOWN])}")
    metadata_keys = sorted({key for caption in captions.values() for key in caption if key != "prompt"})
    if metadata_keys and layout != "json":
        raise DataError(
            f"--layout {layout} stores only captions, but the table also has {', '.join(metadata_keys)}: use json"
        )
    plan = {caption_path(folder, media[name], layout): caption for name, caption in captions.items()}
    if len(plan) < len(media):
        raise DataError(f"{folder}: files with equal names and different suffixes would share one caption")
    return plan


def caption_path(folder: Path, media_file: Path, layout: str) -> Path:
    if layout != "cosmos":
        return media_file.with_suffix(f".{layout}")
    top, *inner = media_file.relative_to(folder).parts
    if not inner or media_file.suffix.lower() not in MEDIA_FOLDERS.get(top, ()):
        raise DataError(
            f"{media_file}: a Cosmos folder has videos in {folder / 'videos'} and images in {folder / 'images'}. "
            "Move the "
            "file there"
        )
    return folder.joinpath("metas", *inner).with_suffix(".txt")


def write_captions(plan: Mapping[Path, Caption], *, overwrite: bool) -> int:
    """Write all captions and return their number.

    Raises DataError, before writing anything, if a caption file exists and `overwrite` is False.
    """
    existing = [path for path in plan if path.exists()]
    if existing and not overwrite:
        raise DataError(f"{len(existing)} captions exist, e.g. {existing[0]}. Replace them with --overwrite")
    for path, caption in plan.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, caption_text(path, caption))
    return len(plan)


def caption_text(path: Path, caption: Caption) -> str:
    if path.suffix == ".json":
        return json.dumps(caption, ensure_ascii=False) + "\n"
    return " ".join(line.strip() for line in str(caption["prompt"]).splitlines() if line.strip()) + "\n"


def parser() -> CommandParser:
    p = CommandParser(
        description="Write a caption for each image and video of a folder.",
        epilog='Example: %(prog)s my_images --prompt "a robot" --layout txt',
    )
    p.add_argument("folder", type=Path, help="folder with images and videos at any depth")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="one caption for all")
    source.add_argument(
        "--from", dest="table", type=Path, metavar="FILE", help=".csv or .jsonl with columns file and prompt"
    )
    p.add_argument(
        "--layout",
        choices=list(LAYOUTS),
        default="json",
        help="NAME.json or NAME.txt next to each file, or metas/NAME.txt",
    )
    p.add_argument("--overwrite", action="store_true", help="replace existing captions")
    return p


def run(args: argparse.Namespace) -> None:
    if is_lerobot(args.folder):
        raise DataError(f"{args.folder} is a LeRobot dataset. Its tasks are the captions: set data.kind: lerobot")
    if args.table is not None:
        captions: Mapping[str, Caption] = read_caption_table(args.table)
    else:
        if not args.prompt.strip() or not is_encodable(args.prompt):
            raise DataError("--prompt is blank or cannot be encoded as UTF-8")
        names = [path.relative_to(args.folder).as_posix() for path in media_files(args.folder)]
        captions = {name: {"prompt": args.prompt.strip()} for name in names}
    count = write_captions(plan_captions(args.folder, captions, args.layout), overwrite=args.overwrite)
    sys.stdout.write(f"{count} captions in {args.folder} ({LAYOUTS[args.layout]})\n")
