"""`wfm data stats DIR|RECIPE`: write the statistics of the actions of a data set, for data.actions.stats."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from wfm_ds.cli.sampling_options import parse_above_zero
from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser
from wfm_ds.recipe.actions import SpaceName

if TYPE_CHECKING:
    from wfm_ds.data.samples import Sample
    from wfm_ds.recipe.actions import ActionsRecipe

ACTIONS = "actions"
DEFAULT_FILE = Path("action_stats.json")


TrainingPart: TypeAlias = "tuple[str, ActionsRecipe, float | None, Sequence[Sample]]"
"""(name of the data set in a mixture or "", data.actions, data.fps, the training samples with these settings)"""


def parser() -> CommandParser:
    p = CommandParser(
        description="Write the quantiles, mean, std, minimum and maximum of all actions of a data set, or of "
        "the training data of a recipe.",
        epilog="Example: %(prog)s nvidia/Cosmos3-DROID --space droid --fps 15",
    )
    p.add_argument("data", help="a LeRobot data set (folder, s3:// or owner/name), a folder, or a recipe (.yaml)")
    p.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="values of the recipe")
    p.add_argument("--space", choices=get_args(SpaceName), help="data.actions.space (default: actions as stored)")
    p.add_argument("--fps", type=parse_above_zero, metavar="N", help="data.fps (default: the rate of the files)")
    p.add_argument("--out", type=Path, metavar="FILE", default=DEFAULT_FILE, help=f"default: {DEFAULT_FILE}")
    p.key_options = {"data.actions.space": "--space", "data.fps": "--fps", "data.path": "DIR"}
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.data.action_statistics import compute_statistics, read_all_actions, unique_sources

    for name, actions, fps, samples in find_training_data(args):
        arrays = read_all_actions(unique_sources(samples), actions, fps)
        statistics = compute_statistics(arrays)
        file = args.out.with_name(f"{args.out.stem}.{name}{args.out.suffix}") if name else args.out
        try:
            file.write_text(json.dumps(statistics, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out: {file} cannot be written: {error.strerror}") from error
        title = f"{name}: " if name else ""
        sys.stdout.write(f"{title}{sum(map(len, arrays))} actions of {len(arrays)} episodes or videos\n")
        sys.stdout.write("\n".join(format_table(statistics)) + f"\nwrote {file}\n")


def find_training_data(args: argparse.Namespace) -> list[TrainingPart]:
    """Return one part with all training samples. For a mixture, return one part per data set with actions."""
    from wfm_ds.data.datasets import load_data
    from wfm_ds.data.samples import dataset_name
    from wfm_ds.recipe import file as recipe_file
    from wfm_ds.recipe.actions import ActionsRecipe

    if not args.data.endswith((".yaml", ".yml")):
        if args.overrides:
            raise UserError(f"{args.overrides[0]}: only a recipe has keys to override")
        actions = ActionsRecipe(space=args.space)
        return [("", actions, args.fps, read_folder(args.data, actions))]
    if args.space is not None or args.fps is not None:
        raise UserError("--space and --fps: a recipe has its own space and fps: remove the options")
    recipe = recipe_file.load_recipe(Path(args.data), args.overrides)
    if ACTIONS not in recipe.data.inputs:
        raise UserError(f"{args.data}: data.inputs has no actions: add it")
    # Without normalization, loading the data does not need the statistics.
    unscaled = {"actions": strip_normalization(recipe.data.actions)}
    if recipe.data.sets is not None:
        parts = [one.model_copy(update={"actions": strip_normalization(one.actions)}) for one in recipe.data.sets]
        unscaled["sets"] = parts
    data = recipe.data.model_copy(update=unscaled)
    samples = load_data(recipe.model_copy(update={"data": data})).samples
    if data.sets is None:
        return [("", data.actions, data.fps, samples)]
    own = {name: part.actions for name, (part, _) in data.set_recipes().items() if ACTIONS in part.inputs}
    return [
        (name, actions, data.fps, [sample for sample in samples if dataset_name(sample) == name])
        for name, actions in own.items()
    ]


def strip_normalization(actions: ActionsRecipe | None) -> Any:
    return actions and actions.model_copy(update={"normalize": "none", "stats": None})


def read_folder(path: str, actions: ActionsRecipe) -> list[Sample]:
    from wfm_ds.data.action_space import ActionSpace
    from wfm_ds.data.episode import EpisodeVideo
    from wfm_ds.data.folder_layout import is_lerobot
    from wfm_ds.data.lerobot_info import META_FILES, download_files, find_roots, read_episodes, read_info
    from wfm_ds.data.sample_sets import build_sample_set
    from wfm_ds.data.samples import Sample
    from wfm_ds.recipe.data import DataRecipe
    from wfm_ds.storage.filesystem import is_remote, is_repo_id
    from wfm_ds.types import Prompt

    if not (is_remote(path) or is_repo_id(path) or is_lerobot(Path(path))):
        if actions.space is not None:
            raise UserError("--space: only LeRobot data sets have the features of a space: remove it")
        data = DataRecipe(kind="folder", path=path, inputs=[ACTIONS])
        return build_sample_set(data, data.shard_patterns).samples
    if is_repo_id(path):
        path = download_files(path, None, (*META_FILES, "data/*", "*/data/*"))
    samples = []
    for part, root in find_roots(path).items():
        info = read_info(root)
        ActionSpace.from_recipe(actions).find_features(info.widths)
        for episode in read_episodes(info, []):
            name = f"{part}/{episode.index}"
            video = EpisodeVideo(name, (), info.fps, 0, episode.length)
            samples.append(Sample(id=name, media=video, prompt=Prompt(id=name, text=""), rows=episode.rows))
    return samples


def format_table(statistics: Mapping[str, Sequence[float]]) -> list[str]:
    lines = ["".join(f"{name:>12}" for name in ("number", *statistics))]
    rows = enumerate(zip(*statistics.values(), strict=True))
    return [*lines, *(f"{i:>12}" + "".join(f"{value:>12.5g}" for value in row) for i, row in rows)]
