"""`wfm init`: look at data and a model, and write a recipe that fits both, with a reason beside each number."""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wfm_ds.errors import UserError
from wfm_ds.program import Parser

if TYPE_CHECKING:
    from wfm_ds.data.samples import SampleSet

NUM_MEASURED = 200  # media whose size is looked at
MAX_UPSCALE = 2.0  # data.max_upscale: smaller media are not trained on
MULTIPLE = 32  # of sizes that are ours to choose; every family's own divides it
OTHER_SHAPE, MANY = 4 / 3, 0.1  # buckets pay where more than this share is that far from the size's shape


class Line(NamedTuple):
    """One key of a recipe, and why it has its value."""

    key: str
    value: Any
    why: str = ""


Sections = dict[str, list[Line]]
FROM_AN_IMAGE = [
    Line("min_num_conditional_frames", 1, "of each clip, which the pipeline makes a video of"),
    Line("max_num_conditional_frames", 1),
]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Facts that a stock pipeline states of itself."""

    path: str
    title: str
    video: bool
    height: int
    width: int
    num_frames: int
    guidance_scale: float
    needs_image: bool = False
    inputs: tuple[str, ...] = ()  # that it cannot do without


@dataclass(frozen=True, slots=True)
class Media:
    """Findings in a folder of data."""

    told: str
    num_samples: int
    are_videos: bool
    sizes: list[tuple[int, int]]  # height and width


def parser() -> Parser:
    p = Parser(
        prog="wfm init",
        description="Look at a folder of captioned media, or a file of prompts, and at a model; write a recipe.",
        epilog="Example: %(prog)s --data my_pictures --model tiny:sd3 --out mine.yaml",
    )
    p.add_argument(
        "--data", type=Path, required=True, help="a folder as wfm data reads it; with --rl a file of prompts"
    )
    p.add_argument("--model", required=True, help="a pipeline folder, owner/name of the hub, or tiny:FAMILY")
    p.add_argument("--rl", metavar="REWARD", help="improve the model by this reward (wfm rewards) instead of SFT")
    p.add_argument("--prompt", help="one caption for media that have none")
    p.add_argument("--full", action="store_true", help="train all weights, not a LoRA")
    p.add_argument("--out", type=Path, default=Path("mine.yaml"), help="the recipe to write (default mine.yaml)")
    p.add_argument("--force", action="store_true", help="replace a file of that name")
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.distributed.logs import quieten_libraries

    quieten_libraries()
    out: Path = args.out
    if out.exists() and not args.force:
        raise UserError(f"{out} exists: name another file with --out, or replace it with --force")
    if not out.parent.is_dir():
        raise UserError(f"{out}: there is no folder {out.parent}")
    model = described(args.model)
    if args.rl is not None:
        told, sections = reinforced(args, model)
    else:
        media = measured(args.data, args.prompt)
        told, sections = media.told, supervised(args, model, media)
    write(out, text_of(sections, out))
    sys.stdout.write(f"data: {told}\nmodel: {model.title}\nwrote {out}; next: wfm check {out}\n")


def described(path: str) -> Pipeline:
    """Read a pipeline's configs, of the hub without its weights. Raises ModelError as `registry.resolve` does."""
    import diffusers

    from wfm_ds.models import registry
    from wfm_ds.models.loading import read_json, stored_call

    folder = registry.resolve(path, weights=False)
    family = registry.family_of(folder)
    index = read_json(folder / "model_index.json")
    name = index["_class_name"]
    stock = inspect.signature(getattr(diffusers, name).__call__).parameters
    call = {key: parameter.default for key, parameter in stock.items()} | stored_call(folder)
    side = family.default_side if call.get("height") is None else None
    if side is None and call.get("height") is None:  # the pipeline asks its parts, as here
        side = read_json(folder / "transformer" / "config.json")["sample_size"]
        side *= 2 ** (len(read_json(folder / "vae" / "config.json")["block_out_channels"]) - 1)
    frames = call.get("num_frames", call.get("frames", 1)) if family.video else 1
    return Pipeline(
        path=path,
        title=f"{path} ({family.family}, {name})",
        video=family.video,
        height=side or call["height"],
        width=side or call["width"],
        num_frames=frames,
        guidance_scale=family.stock_guidance(index, call),
        needs_image=family.needs_first_frame(folder),
        inputs=tuple(name for name, taken in family.takes.items() if taken.required),
    )


def measured(folder: Path, prompt: str | None) -> Media:
    """Read a folder as `data.kind: folder` does, and the sizes of some of its media. Raises DataError."""
    from wfm_ds.data.folder import folder_set
    from wfm_ds.data.media import media_size
    from wfm_ds.data.pixels import BadMedia
    from wfm_ds.data.samples import VIDEO_SUFFIXES
    from wfm_ds.errors import DataError
    from wfm_ds.recipe.data import DataRecipe

    found: SampleSet = folder_set(DataRecipe(kind="folder", path=str(folder), prompt=prompt), folder)
    some = found.samples[:: -(-len(found.samples) // NUM_MEASURED)]
    sizes = []
    for sample in some:
        try:
            sizes.append(media_size(sample.media))
        except BadMedia:
            continue  # training counts such files and goes on
    if not sizes:
        raise DataError(f"{found.source}: none of {len(some)} media can be decoded, {some[0].media.name} among them")
    num_videos = sum(sample.media.suffix in VIDEO_SUFFIXES for sample in some)
    (low, high), kind = (min(sizes), max(sizes)), "videos" if num_videos else "images"
    return Media(
        told=f"{len(found.samples)} {kind}, {low[1]} x {low[0]} to {high[1]} x {high[0]}",
        num_samples=len(found.samples),
        are_videos=2 * num_videos > len(some),
        sizes=sizes,
    )


def supervised(args: argparse.Namespace, model: Pipeline, media: Media) -> Sections:
    """A recipe of SFT on these media. Raises UserError for videos and a model that draws images."""
    if media.are_videos and not model.video:
        raise UserError(f"{args.data} holds videos, and {model.title} makes images: name a video model, or images")
    if model.needs_image and not media.are_videos:
        raise UserError(f"{args.data} holds images, and {model.title} makes videos that begin with one: name videos")
    height, width, why = training_size(model, media.sizes)
    far = [size for size in media.sizes if is_far(size, (height, width))]
    data = [Line("kind", "folder"), Line("path", str(args.data)), Line("caption_dropout", 0.1, "for guidance")]
    if args.prompt is not None:
        data.insert(2, Line("prompt", args.prompt, "of media that have no caption"))
    if len(far) > MANY * len(media.sizes):
        share = round(100 * len(far) / len(media.sizes))
        data.append(Line("buckets", "auto", f"{share} % of the media have quite another shape than {width} x {height}"))
    if model.inputs:
        data.append(Line("inputs", list(model.inputs), "beside each of the media (docs/data.md#inputs)"))
    frames = model.num_frames if media.are_videos else 1
    return {
        **started(args, model, steps=1000, unit=f"a sample a GPU in each; there are {media.num_samples}"),
        "data": data,
        "sampling": [
            Line("height", height, why),
            Line("width", width),
            *([Line("num_frames", frames)] if model.video else []),
            Line("guidance_scale", model.guidance_scale, "in samples; the pipeline's own"),
        ],
        "algorithm": [Line("name", "sft"), *(FROM_AN_IMAGE if model.needs_image else [])],
        "validation": [Line("every", 100, "optimizer steps between samples")],
        "checkpoint": [Line("every", 200)],
    }


def reinforced(args: argparse.Namespace, model: Pipeline) -> tuple[str, Sections]:
    """Read the prompts, and make a recipe that improves the model on them by one reward. Raises UserError for a folder,
    and as the prompt file and the reward's registry do."""
    from wfm_ds.data.prompts import load_prompts
    from wfm_reward import registry

    file: Path = args.data
    if not file.is_file():
        raise UserError(f"{file} is no file: with --rl, --data names a .txt with a prompt a line, or a .jsonl")
    if model.needs_image:
        raise UserError(
            f"{file} has prompts alone, and {model.title} makes videos that begin with an image: copy the recipe of "
            "such a model (wfm recipes), recipes/wan22_i2v_nft.yaml or sana_wm_nft.yaml"
        )
    reward = registry.describe(args.rl)
    kind = "video" if model.video else "image"
    if kind not in reward.media:
        scored = ", ".join(sorted(reward.media))
        raise UserError(f"the reward {args.rl} scores {scored}, and {model.title} makes {kind}s")
    prompts = load_prompts(file.parent, file.stem, file.stem)
    prompts_per_step = min(8, len(prompts))
    return f"{len(prompts)} prompts", {
        **started(args, model, steps=200, unit="each a rollout of all that a step asks for"),
        "data": [
            Line("kind", "prompts"),
            Line("path", str(file.parent)),
            Line("name", file.stem),
            Line("split", file.stem, f"the prompts of {file.name}"),
        ],
        "sampling": [
            Line("height", model.height, "the pipeline's own"),
            Line("width", model.width),
            *([Line("num_frames", model.num_frames)] if model.video else []),
            Line("steps", 10, "of a rollout; validation draws with eval_steps"),
        ],
        "algorithm": [Line("name", "diffusion_nft", "docs/algorithms.md compares them")],
        "rollout": [Line("prompts_per_step", prompts_per_step), Line("group_size", 8, "samples of a prompt, compared")],
        "reward": [Line("functions", [{"name": args.rl}])],
        "validation": [Line("every", 20), Line("num_prompts", prompts_per_step)],
        "checkpoint": [Line("every", 40)],
    }


def started(args: argparse.Namespace, model: Pipeline, *, steps: int, unit: str) -> Sections:
    """The sections that all recipes begin with."""
    lora = {"lora": [Line("rank", 32), Line("alpha", 64)]}
    return {
        "run": [Line("output_dir", f"outputs/{args.out.stem}"), Line("steps", steps, unit)],
        "model": [Line("path", model.path)],
        **({} if args.full else lora),
        "optimizer": [Line("lr", 1e-5 if args.full else 1e-4, "of all weights" if args.full else "of adapters")],
    }


def training_size(model: Pipeline, sizes: Sequence[tuple[int, int]]) -> tuple[int, int, str]:
    """The pipeline's size, or one of its shape that the middle medium can fill."""
    across = statistics.median(min(h / model.height, w / model.width) for h, w in sizes)
    if across * MAX_UPSCALE >= 1:
        return model.height, model.width, "the pipeline's own"
    height, width = (max(MULTIPLE, int(side * across) // MULTIPLE * MULTIPLE) for side in (model.height, model.width))
    return height, width, f"most media are too small for the pipeline's {model.width} x {model.height}"


def is_far(size: tuple[int, int], wanted: tuple[int, int]) -> bool:
    ours, theirs = size[0] / size[1], wanted[0] / wanted[1]
    return max(ours / theirs, theirs / ours) > OTHER_SHAPE


def text_of(sections: Sections, out: Path) -> str:
    """The recipe as YAML."""
    import yaml

    rows = [f"# Written by wfm init. All keys: docs/recipes.md.\n#   wfm train {out} --gpus 1"]
    for name, lines in sections.items():
        rows.append(f"{name}:")
        for line in lines:
            value = yaml.safe_dump(line.value, allow_unicode=True, default_flow_style=True, width=10**6)
            shown = value.split("\n...")[0].strip()
            rows.append(f"  {line.key}: {shown}" + (f"  # {line.why}" if line.why else ""))
    return "\n".join(rows) + "\n"


def write(out: Path, text: str) -> None:
    """Write a recipe that is valid, whole or not at all. Raises RecipeError for one that is not."""
    from wfm_ds.recipe import file as recipe_file

    new = out.with_name(f".{out.stem}.new.yaml")
    try:
        new.write_text(text, encoding="utf-8")
        recipe_file.load(new)
        os.replace(new, out)
    finally:
        new.unlink(missing_ok=True)
