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
from wfm_ds.program import CommandParser

if TYPE_CHECKING:
    from wfm_ds.data.samples import SampleSet

MAX_MEASURED = 200  # number of files to measure
MAX_UPSCALE = 2.0  # default of data.max_upscale: training skips files that need more
SIZE_MULTIPLE = 32  # round sizes down to this; satisfies every model family
MAX_ASPECT_CHANGE, BUCKET_SHARE = 4 / 3, 0.1  # use buckets if the aspect ratio of over 10 % differs by over 4/3


class RecipeLine(NamedTuple):
    key: str
    value: Any
    comment: str = ""


Sections = dict[str, list[RecipeLine]]
IMAGE_TO_VIDEO_LINES = [
    RecipeLine("min_num_conditional_frames", 1, "the pipeline starts each video from its first frame"),
    RecipeLine("max_num_conditional_frames", 1),
]


@dataclass(frozen=True, slots=True)
class PipelineSummary:
    """Default sample size, guidance scale and required inputs of a diffusers pipeline."""

    path: str
    title: str
    video: bool
    height: int
    width: int
    num_frames: int
    guidance_scale: float
    needs_image: bool = False
    inputs: tuple[str, ...] = ()  # required conditioning inputs


@dataclass(frozen=True, slots=True)
class MediaSummary:
    """Number, kind and sizes of the images and videos in a data folder."""

    summary: str
    num_samples: int
    are_videos: bool
    sizes: list[tuple[int, int]]  # height and width


def parser() -> CommandParser:
    p = CommandParser(
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
    from wfm_ds.distributed.logs import quiet_libraries

    quiet_libraries()
    out: Path = args.out
    if out.exists() and not args.force:
        raise UserError(f"{out} exists: choose another file with --out, or overwrite it with --force")
    if not out.parent.is_dir():
        raise UserError(f"{out}: folder {out.parent} not found")
    model = read_pipeline(args.model)
    if args.rl is not None:
        summary, sections = create_rl_sections(args, model)
    else:
        media = measure_media(args.data, args.prompt)
        summary, sections = media.summary, create_sft_sections(args, model, media)
    write_recipe(out, format_recipe(sections, out))
    sys.stdout.write(f"data: {summary}\nmodel: {model.title}\nwrote {out}; next: wfm check {out}\n")


def read_pipeline(path: str) -> PipelineSummary:
    """Read the configuration of a pipeline, without downloading weights. Raises ModelError if it is not supported."""
    import diffusers

    from wfm_ds.models import registry
    from wfm_ds.models.assets.loading import read_call_json, read_json

    folder = registry.resolve_pipeline(path, weights=False)
    family = registry.find_family(folder)
    index = read_json(folder / "model_index.json")
    name = index["_class_name"]
    stock = inspect.signature(getattr(diffusers, name).__call__).parameters
    call = {key: parameter.default for key, parameter in stock.items()} | read_call_json(folder)
    side = family.default_image_size if call.get("height") is None else None
    if side is None and call.get("height") is None:  # the pipeline computes its default size like this
        side = read_json(folder / "transformer" / "config.json")["sample_size"]
        side *= 2 ** (len(read_json(folder / "vae" / "config.json")["block_out_channels"]) - 1)
    frames = call.get("num_frames", call.get("frames", 1)) if family.is_video else 1
    return PipelineSummary(
        path=path,
        title=f"{path} ({family.family}, {name})",
        video=family.is_video,
        height=side or call["height"],
        width=side or call["width"],
        num_frames=frames,
        guidance_scale=family.default_guidance_scale(index, call),
        needs_image=family.needs_first_frame(folder),
        inputs=tuple(name for name, spec in family.input_specs.items() if spec.required),
    )


def measure_media(folder: Path, prompt: str | None) -> MediaSummary:
    """Read a folder as `data.kind: folder` does, and measure up to MAX_MEASURED files.

    Raises DataError if the folder is invalid or none of the files can be decoded.
    """
    from wfm_ds.data.folder import load_folder
    from wfm_ds.data.media import media_size
    from wfm_ds.data.pixels import BadMedia
    from wfm_ds.data.samples import VIDEO_SUFFIXES
    from wfm_ds.errors import DataError
    from wfm_ds.recipe.data import DataRecipe

    sample_set: SampleSet = load_folder(DataRecipe(kind="folder", path=str(folder), prompt=prompt), folder)
    selected = sample_set.samples[:: -(-len(sample_set.samples) // MAX_MEASURED)]
    sizes = []
    for sample in selected:
        try:
            sizes.append(media_size(sample.media))
        except BadMedia:
            continue  # training skips such files too
    if not sizes:
        raise DataError(
            f"{sample_set.source}: none of {len(selected)} files can be decoded, e.g. {selected[0].media.name}"
        )
    num_videos = sum(sample.media.suffix in VIDEO_SUFFIXES for sample in selected)
    (low, high), kind = (min(sizes), max(sizes)), "videos" if num_videos else "images"
    return MediaSummary(
        summary=f"{len(sample_set.samples)} {kind}, {low[1]} x {low[0]} to {high[1]} x {high[0]}",
        num_samples=len(sample_set.samples),
        are_videos=2 * num_videos > len(selected),
        sizes=sizes,
    )


def create_sft_sections(args: argparse.Namespace, model: PipelineSummary, media: MediaSummary) -> Sections:
    """Return the sections of an SFT recipe.

    Raises UserError for videos with an image model, and for images with an image-to-video model.
    """
    if media.are_videos and not model.video:
        raise UserError(
            f"{args.data} contains videos, but {model.title} generates images: choose a video model, or use images"
        )
    if model.needs_image and not media.are_videos:
        raise UserError(
            f"{args.data} contains images, but {model.title} generates videos that start with an image: use videos"
        )
    height, width, why = training_size(model, media.sizes)
    far = [size for size in media.sizes if has_other_shape(size, (height, width))]
    data = [
        RecipeLine("kind", "folder"),
        RecipeLine("path", str(args.data)),
        RecipeLine("caption_dropout", 0.1, "for classifier-free guidance"),
    ]
    if args.prompt is not None:
        data.insert(2, RecipeLine("prompt", args.prompt, "for files without a caption"))
    if len(far) > BUCKET_SHARE * len(media.sizes):
        share = round(100 * len(far) / len(media.sizes))
        data.append(
            RecipeLine("buckets", "auto", f"{share} % of the files differ much in aspect ratio from {width} x {height}")
        )
    if model.inputs:
        data.append(RecipeLine("inputs", list(model.inputs), "one file per sample and input (docs/inputs.md)"))
    frames = model.num_frames if media.are_videos else 1
    return {
        **common_sections(
            args, model, steps=1000, unit=f"one sample per GPU and step; the data has {media.num_samples}"
        ),
        "data": data,
        "sampling": [
            RecipeLine("height", height, why),
            RecipeLine("width", width),
            *([RecipeLine("num_frames", frames)] if model.video else []),
            RecipeLine("guidance_scale", model.guidance_scale, "for validation samples; default of the pipeline"),
        ],
        "algorithm": [RecipeLine("name", "sft"), *(IMAGE_TO_VIDEO_LINES if model.needs_image else [])],
        "validation": [RecipeLine("every", 100, "steps between validations")],
        "checkpoint": [RecipeLine("every", 200)],
    }


def create_rl_sections(args: argparse.Namespace, model: PipelineSummary) -> tuple[str, Sections]:
    """Return (summary of the prompts, sections of an RL recipe with one reward).

    Raises UserError if --data is not a file, if its prompts are invalid, or if the reward does not fit the model.
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
    reward = registry.get_reward_class(args.rl)
    kind = "video" if model.video else "image"
    if kind not in reward.media_types:
        accepted = ", ".join(f"{media_type}s" for media_type in sorted(reward.media_types))
        raise UserError(f"the reward {args.rl} scores {accepted}, but {model.title} generates {kind}s")
    prompts = load_prompts(file.parent, file.stem, file.stem)
    prompts_per_step = min(8, len(prompts))
    return f"{len(prompts)} prompts", {
        **common_sections(args, model, steps=200, unit="one rollout per step"),
        "data": [
            RecipeLine("kind", "prompts"),
            RecipeLine("path", str(file.parent)),
            RecipeLine("name", file.stem),
            RecipeLine("split", file.stem, f"prompts of {file.name}"),
        ],
        "sampling": [
            RecipeLine("height", model.height, "default of the pipeline"),
            RecipeLine("width", model.width),
            *([RecipeLine("num_frames", model.num_frames)] if model.video else []),
            RecipeLine("steps", 10, "denoising steps of a rollout; validation uses eval_steps"),
        ],
        "algorithm": [RecipeLine("name", "diffusion_nft", "comparison of algorithms: docs/choosing.md")],
        "rollout": [
            RecipeLine("prompts_per_step", prompts_per_step),
            RecipeLine("group_size", 8, "samples per prompt, compared with each other"),
        ],
        "reward": [RecipeLine("functions", [{"name": args.rl}])],
        "validation": [RecipeLine("every", 20), RecipeLine("num_prompts", prompts_per_step)],
        "checkpoint": [RecipeLine("every", 40)],
    }


def common_sections(args: argparse.Namespace, model: PipelineSummary, *, steps: int, unit: str) -> Sections:
    lora = {"lora": [RecipeLine("rank", 32), RecipeLine("alpha", 64)]}
    return {
        "run": [RecipeLine("output_dir", f"outputs/{args.out.stem}"), RecipeLine("steps", steps, unit)],
        "model": [RecipeLine("path", model.path)],
        **({} if args.full else lora),
        "optimizer": [RecipeLine("lr", 1e-5 if args.full else 1e-4, "for all weights" if args.full else "for LoRA")],
    }


def training_size(model: PipelineSummary, sizes: Sequence[tuple[int, int]]) -> tuple[int, int, str]:
    """Return (height, width, comment). The size is the pipeline's default.

    If the median file is much smaller, the default size is scaled down.
    """
    scale = statistics.median(min(h / model.height, w / model.width) for h, w in sizes)
    if scale * MAX_UPSCALE >= 1:
        return model.height, model.width, "default of the pipeline"
    height, width = (
        max(SIZE_MULTIPLE, int(side * scale) // SIZE_MULTIPLE * SIZE_MULTIPLE) for side in (model.height, model.width)
    )
    return height, width, f"most files are too small for the pipeline's {model.width} x {model.height}"


def has_other_shape(size: tuple[int, int], target: tuple[int, int]) -> bool:
    ratio, target_ratio = size[0] / size[1], target[0] / target[1]
    return max(ratio / target_ratio, target_ratio / ratio) > MAX_ASPECT_CHANGE


def format_recipe(sections: Sections, out: Path) -> str:
    import yaml

    rows = [f"# Written by wfm init. All keys: docs/recipes.md.\n#   wfm train {out} --gpus 1"]
    for name, lines in sections.items():
        rows.append(f"{name}:")
        for line in lines:
            value = yaml.safe_dump(line.value, allow_unicode=True, default_flow_style=True, width=10**6)
            text = value.split("\n...")[0].strip()
            rows.append(f"  {line.key}: {text}" + (f"  # {line.comment}" if line.comment else ""))
    return "\n".join(rows) + "\n"


def write_recipe(out: Path, text: str) -> None:
    """Validate the recipe text and write it atomically. Raises RecipeError if it is invalid."""
    from wfm_ds.recipe import file as recipe_file

    new = out.with_name(f".{out.stem}.new.yaml")
    try:
        new.write_text(text, encoding="utf-8")
        recipe_file.load_recipe(new)
        os.replace(new, out)
    finally:
        new.unlink(missing_ok=True)
