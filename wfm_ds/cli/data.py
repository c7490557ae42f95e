"""`wfm data DIR`: print the detected layout, the contents and three captions of a data folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wfm_ds.program import CommandParser

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
        description="Show how data.kind: folder reads a folder, its contents and three captions. For a LeRobot "
        "dataset, show its episodes, cameras, features and tasks.",
        epilog="Example: %(prog)s my_images",
    )
    p.add_argument(
        "folder",
        help="folder with images or videos and their captions (docs/data.md), or a LeRobot dataset: a folder, "
        "owner/name on the Hub or an s3:// address (docs/robots.md)",
    )
    p.add_argument("--prompt", help="data.prompt: caption for images and videos without one")
    p.add_argument("--caption-column", metavar="NAME", help="data.caption_column: table column with the captions")
    p.key_options = {"data.prompt": "--prompt", "data.caption_column": "--caption-column"}
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.data.folder import load_folder
    from wfm_ds.data.folder_layout import demo_command, detect_layout, is_lerobot
    from wfm_ds.data.media_inputs import ANY_INPUTS
    from wfm_ds.recipe.data import DataRecipe
    from wfm_ds.storage.filesystem import is_remote, is_repo_id

    folder = Path(args.folder).expanduser()
    is_on_hub = is_repo_id(args.folder) and demo_command(folder) is None
    if is_remote(args.folder) or is_on_hub or is_lerobot(folder):
        sys.stdout.write("\n".join(describe_lerobot(args.folder)) + "\n")
        return
    layout = detect_layout(folder)
    recipe = DataRecipe(kind="folder", path=str(folder), prompt=args.prompt, caption_column=args.caption_column)
    dataset = load_folder(recipe, folder, layout, ANY_INPUTS)
    lines = [f"{dataset.source}: {LAYOUT_NAMES[layout.kind]} ({layout.sign})", *summary_lines(dataset)]
    sys.stdout.write("\n".join(lines) + "\n")


def describe_lerobot(path: str) -> list[str]:
    from wfm_ds.data.lerobot_info import download_metadata, find_roots, read_episodes, read_info

    lines: list[str] = []
    for root in find_roots(download_metadata(path)).values():
        info = read_info(root)
        episodes = read_episodes(info, info.cameras)
        lengths = [episode.length for episode in episodes]
        tasks = list(dict.fromkeys(task for episode in episodes for task in episode.tasks))
        cameras = [f"{name} {describe_size(info.features[name])}" for name in info.cameras]
        shown = ", ".join(json.dumps(task, ensure_ascii=False) for task in tasks[:NUM_CAPTIONS])
        lines += [
            f"{root}: LeRobot dataset {info.version}",
            f"episodes   {len(episodes)} of {min(lengths)} to {max(lengths)} frames, {sum(lengths)} in total",
            f"fps        {info.fps:g}",
            f"cameras    {', '.join(cameras) or 'none'}",
            f"features   {', '.join(f'{name} [{width}]' for name, width in info.widths.items())}",
            f"tasks      {len(tasks)}: {shown}" if tasks else "tasks      none: set data.prompt",
        ]
    return lines


def describe_size(feature: Mapping[str, Any]) -> str:
    sizes = dict(zip(feature.get("names") or ("height", "width", "channels"), feature["shape"], strict=False))
    return f"{sizes.get('width', '?')} x {sizes.get('height', '?')}"


def describe_images(dataset: SampleSet) -> list[str]:
    """Return a line with the number of samples that have each input image or video, or [] if none has one."""
    from wfm_ds.types import CONTROL, CONTROL_MASK, MASK, SOURCE, SOURCES

    counts = Counter(name for sample in dataset.samples for name in sample.images)
    shared = [name for name in (*SOURCES, CONTROL, CONTROL_MASK) if counts[name] == len(dataset.samples)]
    keys = [f"data.inputs: [{', '.join(shared)}]"] if shared else []
    keys += [f"data.reward_inputs: [{MASK}]"] if SOURCE in shared and counts[MASK] == len(dataset.samples) else []
    advice = f"; to use them, set {' and '.join(keys)}" if keys else ""
    return [f"{', '.join(f'{counts[name]} {name}' for name in sorted(counts))}{advice}"] if counts else []


def summary_lines(dataset: SampleSet) -> list[str]:
    from wfm_ds.data.samples import IMAGE_SUFFIXES, REASONS

    kinds = Counter("images" if s.media.suffix in IMAGE_SUFFIXES else "videos" for s in dataset.samples)
    lines = [f"samples    {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}"]
    lines += [f"inputs     {text}" for text in describe_images(dataset)]
    lines += [f"note       {note}" for note in dataset.notes]
    lines += [f"skipped    {len(names)}, {REASONS[why]}, e.g. {names[0]}" for why, names in dataset.bad.items()]
    examples = dataset.samples[:: max(1, len(dataset.samples) // NUM_CAPTIONS)][:NUM_CAPTIONS]
    return [*lines, *(f"{sample.id}: {json.dumps(sample.prompt.text, ensure_ascii=False)}" for sample in examples)]
