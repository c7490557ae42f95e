"""`wfm init`: inspect data and a model, and write a recipe for them with a comment on each value."""

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

NUM_MEASURED = 200  # maximum number of files to measure
MAX_UPSCALE = 2.0  # default of data.max_upscale: smaller files are not used for training
MULTIPLE = 32  # for chosen sizes; a multiple of the requirement of every family
OTHER_SHAPE, MANY = 4 / 3, 0.1  # use buckets if more than 10 % differ in aspect ratio by more than 4/3


class Line(NamedTuple):
    """A key of a recipe, its value and a comment."""

    key: str
    value: Any
    why: str = ""


Sections = dict[str, list[Line]]
FROM_AN_IMAGE = [
    Line("min_num_conditional_frames", 1, "the pipeline starts each video from its first frame"),
    Line("max_num_conditional_frames", 1),
]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Defaults and requirements of a diffusers pipeline."""

    path: str
    title: str
    video: bool
    height: int
    width: int
    num_frames: int
    guidance_scale: float
    needs_image: bool = False
    inputs: tuple[str, ...] = ()  # required inputs


@dataclass(frozen=True, slots=True)
class Media:
    """Summary of a data folder."""

    told: str
    num_samples: int
    are_videos: bool
    sizes: list[tuple[int, int]]  # height and width


def parser() -> Parser:
    p = Parser(
        prog="wfm init",
        description="Write a recipe for your data and a model. The data is a folder of captioned images or videos, "
        "or a file of prompts.",
        epilog="Example: %(prog)s --data my_pictures --model tiny:sd3 --out mine.yaml",
    )
    p.add_argument(
        "--data", type=Path, required=True, help="a folder that wfm data can read; with --rl a file of prompts"
    )
    p.add_argument("--model", required=True, help="a pipeline folder, owner/name on the Hub, or tiny:FAMILY")
    p.add_argument("--rl", metavar="REWARD", help="RL with this reward (see wfm rewards) instead of SFT")
    p.add_argument("--prompt", help="caption for files without one")
    p.add_argument("--full", action="store_true", help="train all weights instead of a LoRA")
    p.add_argument("--out", type=Path, default=Path("mine.yaml"), help="recipe file to write (default mine.yaml)")
    p.add_argument("--force", action="store_true", help="overwrite an existing file")
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.distributed.logs import quieten_libraries

    quieten_libraries()
    out: Path = args.out
    if out.exists() and not args.force:
        raise UserError(f"{out} exists: choose another file with --out, or overwrite it with --force")
    if not out.parent.is_dir():
        raise UserError(f"{out}: folder {out.parent} not found")
    model = described(args.model)
    if args.rl is not None:
        summary, sections = reinforced(args, model)
    else:
        media = measured(args.data, args.prompt)
        summary, sections = media.told, supervised(args, model, media)
    write(out, text_of(sections, out))
    sys.stdout.write(f"data: {summary}\nmodel: {model.title}\nwrote {out}; next: wfm check {out}\n")


def described(path: str) -> Pipeline:
    """Read the configuration of a pipeline. From the Hub, downloads no weights. Raises ModelError."""
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
    if side is None and call.get("height") is None:  # computed as in the pipeline
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
        inputs=tuple(name for name, spec in family.takes.items() if spec.required),
    )


def measured(folder: Path, prompt: str | None) -> Media:
    """Read a folder like `data.kind: folder` and measure some of its files. Raises DataError."""
    from wfm_ds.data.folder import folder_set
    from wfm_ds.data.media import media_size
    from wfm_ds.data.pixels import BadMedia
    from wfm_ds.data.samples import VIDEO_SUFFIXES
    from wfm_ds.errors import DataError
    from wfm_ds.recipe.data import DataRecipe

    sample_set: SampleSet = folder_set(DataRecipe(kind="folder", path=str(folder), prompt=prompt), folder)
    selected = sample_set.samples[:: -(-len(sample_set.samples) // NUM_MEASURED)]
    sizes = []
    for sample in selected:
        try:
            sizes.append(media_size(sample.media))
        except BadMedia:
            continue  # training skips and counts such files too
    if not sizes:
        raise DataError(
            f"{sample_set.source}: none of {len(selected)} files can be decoded, e.g. {selected[0].media.name}"
        )
    num_videos = sum(sample.media.suffix in VIDEO_SUFFIXES for sample in selected)
    (low, high), kind = (min(sizes), max(sizes)), "videos" if num_videos else "images"
    return Media(
        told=f"{len(sample_set.samples)} {kind}, {low[1]} x {low[0]} to {high[1]} x {high[0]}",
        num_samples=len(sample_set.samples),
        are_videos=2 * num_videos > len(selected),
        sizes=sizes,
    )


def supervised(args: argparse.Namespace, model: Pipeline, media: Media) -> Sections:
    """Return the sections of an SFT recipe. Raises UserError if the data does not fit the model (images or videos)."""
    if media.are_videos and not model.video:
        raise UserError(
            f"{args.data} contains videos, but {model.title} generates images: choose a video model, or use images"
        )
    if model.needs_image and not media.are_videos:
        raise UserError(
            f"{args.data} contains images, but {model.title} generates videos that start with an image: use videos"
        )
    height, width, why = training_size(model, media.sizes)
    far = [size for size in media.sizes if is_far(size, (height, width))]
    data = [
        Line("kind", "folder"),
        Line("path", str(args.data)),
        Line("caption_dropout", 0.1, "for classifier-free guidance"),
    ]
    if args.prompt is not None:
        data.insert(2, Line("prompt", args.prompt, "for files without a caption"))
    if len(far) > MANY * len(media.sizes):
        share = round(100 * len(far) / len(media.sizes))
        data.append(
            Line("buckets", "auto", f"{share} % of the files differ much in aspect ratio from {width} x {height}")
        )
    if model.inputs:
        data.append(Line("inputs", list(model.inputs), "one file per sample and input (docs/data.md#inputs)"))
    frames = model.num_frames if media.are_videos else 1
    return {
        **started(args, model, steps=1000, unit=f"one sample per GPU and step; the data has {media.num_samples}"),
        "data": data,
        "sampling": [
            Line("height", height, why),
            Line("width", width),
            *([Line("num_frames", frames)] if model.video else []),
            Line("guidance_scale", model.guidance_scale, "for validation samples; default of the pipeline"),
        ],
        "algorithm": [Line("name", "sft"), *(FROM_AN_IMAGE if model.needs_image else [])],
        "validation": [Line("every", 100, "steps between validations")],
        "checkpoint": [Line("every", 200)],
    }


def reinforced(args: argparse.Namespace, model: Pipeline) -> tuple[str, Sections]:
    """Return a summary of the prompts and the sections of an RL recipe with one reward.

    Raises UserError for a folder, invalid prompts or a reward that does not fit the model.
    """
    from wfm_ds.data.prompts import load_prompts
    from wfm_reward import registry

    file: Path = args.data
    if not file.is_file():
        raise UserError(f"{file} is not a file: with --rl, --data must be a .txt with one prompt per line, or a .jsonl")
    if model.needs_image:
        raise UserError(
            f"{file} has only prompts, but {model.title} generates videos that start with an image: copy a recipe for "
            "image-to-video RL, e.g. wfm recipes copy wan22_i2v_nft or sana_wm_nft"
        )
    reward = registry.describe(args.rl)
    kind = "video" if model.video else "image"
    if kind not in reward.media:
        accepted = ", ".join(f"{media_type}s" for media_type in sorted(reward.media))
        raise UserError(f"the reward {args.rl} scores {accepted}, but {model.title} generates {kind}s")
    prompts = load_prompts(file.parent, file.stem, file.stem)
    prompts_per_step = min(8, len(prompts))
    return f"{len(prompts)} prompts", {
        **started(args, model, steps=200, unit="one rollout per step"),
        "data": [
            Line("kind", "prompts"),
            Line("path", str(file.parent)),
            Line("name", file.stem),
            Line("split", file.stem, f"prompts of {file.name}"),
        ],
        "sampling": [
            Line("height", model.height, "default of the pipeline"),
            Line("width", model.width),
            *([Line("num_frames", model.num_frames)] if model.video else []),
            Line("steps", 10, "denoising steps of a rollout; validation uses eval_steps"),
        ],
        "algorithm": [Line("name", "diffusion_nft", "comparison of algorithms: docs/algorithms.md")],
        "rollout": [
            Line("prompts_per_step", prompts_per_step),
            Line("group_size", 8, "samples per prompt, compared with each other"),
        ],
        "reward": [Line("functions", [{"name": args.rl}])],
        "validation": [Line("every", 20), Line("num_prompts", prompts_per_step)],
        "checkpoint": [Line("every", 40)],
    }


def started(args: argparse.Namespace, model: Pipeline, *, steps: int, unit: str) -> Sections:
    """Return the sections that SFT and RL recipes share."""
    lora = {"lora": [Line("rank", 32), Line("alpha", 64)]}
    return {
        "run": [Line("output_dir", f"outputs/{args.out.stem}"), Line("steps", steps, unit)],
        "model": [Line("path", model.path)],
        **({} if args.full else lora),
        "optimizer": [Line("lr", 1e-5 if args.full else 1e-4, "for all weights" if args.full else "for LoRA")],
    }


def training_size(model: Pipeline, sizes: Sequence[tuple[int, int]]) -> tuple[int, int, str]:
    """Return (height, width, comment): the size of the pipeline, scaled down if the median file is too small."""
    scale = statistics.median(min(h / model.height, w / model.width) for h, w in sizes)
    if scale * MAX_UPSCALE >= 1:
        return model.height, model.width, "default of the pipeline"
    height, width = (max(MULTIPLE, int(side * scale) // MULTIPLE * MULTIPLE) for side in (model.height, model.width))
    return height, width, f"most files are too small for the pipeline's {model.width} x {model.height}"


def is_far(size: tuple[int, int], wanted: tuple[int, int]) -> bool:
    ratio, target_ratio = size[0] / size[1], wanted[0] / wanted[1]
    return max(ratio / target_ratio, target_ratio / ratio) > OTHER_SHAPE


def text_of(sections: Sections, out: Path) -> str:
    """Format the recipe as YAML with comments."""
    import yaml

    rows = [f"# Written by wfm init. All keys: docs/recipes.md.\n#   wfm train {out} --gpus 1"]
    for name, lines in sections.items():
        rows.append(f"{name}:")
        for line in lines:
            value = yaml.safe_dump(line.value, allow_unicode=True, default_flow_style=True, width=10**6)
            text = value.split("\n...")[0].strip()
            rows.append(f"  {line.key}: {text}" + (f"  # {line.why}" if line.why else ""))
    return "\n".join(rows) + "\n"


def write(out: Path, text: str) -> None:
    """Validate a recipe and write it atomically. Raises RecipeError if it is invalid."""
    from wfm_ds.recipe import file as recipe_file

    new = out.with_name(f".{out.stem}.new.yaml")
    try:
        new.write_text(text, encoding="utf-8")
        recipe_file.load(new)
        os.replace(new, out)
    finally:
        new.unlink(missing_ok=True)
