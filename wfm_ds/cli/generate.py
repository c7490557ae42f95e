"""`wfm generate`: generate images or videos for prompts, from a pipeline or an export of a run.

The noise is the same as in a run's validation if seeds, steps and guidance are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wfm_ds.cli.sampling_options import (
    KEY_OPTIONS,
    add_sampling_options,
    choose_layout,
    iterate_samples,
    load_sampler,
    memory_advice,
    parse_seed,
    require_empty,
    sampling_summary,
)
from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser

if TYPE_CHECKING:
    import torch

    from wfm_ds.data.clip_layout import ClipLayout
    from wfm_ds.models.sampler import Sampler
    from wfm_ds.monitoring.gallery import GalleryEntry
    from wfm_ds.monitoring.samples import GeneratedSample
    from wfm_ds.runs.generation_inputs import ImageFiles
    from wfm_ds.types import ConditioningFrames, Prompt

PAGE_NAME = "index.html"
NOT_FINITE_MESSAGE = "non-finite latents: this sample is invalid"


def parser() -> CommandParser:
    p = CommandParser(
        description="Generate each prompt with each seed; write files, samples.jsonl and index.html.",
        epilog="Example: %(prog)s --model /models/sd35 --lora outputs/run/safetensors/step_30/lora "
        "--prompts prompts.txt --height 512 --width 512 --out samples",
    )
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a pipeline folder, owner/name on the Hugging Face Hub, or tiny:FAMILY")
    which.add_argument(
        "--pipeline", metavar="DIR", help="an export of a full-weight run, safetensors/step_N; or s3://..."
    )
    p.add_argument("--lora", metavar="DIR", help="an export of a LoRA run, safetensors/step_N/lora; or s3://...")
    p.add_argument("--prompts", metavar="FILE", type=Path, required=True, help="one prompt per line (.txt), or .jsonl")
    p.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new or empty folder")
    p.add_argument(
        "--seeds",
        type=parse_seed,
        nargs="+",
        default=[0],
        metavar="SEED",
        help="each prompt is generated with each seed",
    )
    p.add_argument("--revision", help="branch, tag or commit of a --model on the Hub (default main)")
    add_sampling_options(p)
    p.add_argument(
        "--first-frame",
        metavar="FILE",
        type=Path,
        help="an image used as the first frame of every video (image-to-video)",
    )
    p.add_argument(
        "--source",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="the image to edit, for every prompt; repeat the option for further images, source_2 and source_3",
    )
    p.add_argument(
        "--control",
        metavar="FILE",
        type=Path,
        help="the control video of every video, from its first frame on (docs/models/wan_vace.md)",
    )
    p.add_argument(
        "--control-mask", metavar="FILE", type=Path, help="a video that is bright where --control is replaced"
    )
    p.add_argument(
        "--actions",
        metavar="FILE",
        type=Path,
        help="an .npy file [FRAMES-1,D] for every video, normalized as by data.actions.normalize in training; with "
        "--clips, FRAMES is the length of the whole video",
    )
    p.add_argument(
        "--domain", type=parse_domain, help="the robot of --actions: a number or a name such as droid_lerobot"
    )
    p.add_argument(
        "--viewpoint",
        type=parse_viewpoint,
        metavar="VIEW",
        help="the camera of --actions in captions, such as concat_view (data.viewpoint in training; default ego_view)",
    )
    p.add_argument(
        "--camera",
        metavar="FILE|KEYS",
        help="the camera trajectory of every video: .json with c2w [FRAMES,4,4] and intrinsics, .npy with c2w, or keys "
        "such as w-80,jw-40",
    )
    p.add_argument(
        "--intrinsics",
        type=float,
        nargs=4,
        metavar=("FX", "FY", "CX", "CY"),
        help="intrinsics of a --camera without them, in pixels of the first frame's file",
    )
    p.key_options = KEY_OPTIONS
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.distributed.accelerator import choose_accelerator

    if args.pipeline is not None and args.lora is not None:
        raise UserError("--lora: not allowed with --pipeline; to use an export as the base of a LoRA, set --model")
    if args.domain is not None and args.actions is None:
        raise UserError("--domain: needs --actions")
    if args.viewpoint is not None and args.actions is None:
        raise UserError("--viewpoint: needs --actions")
    if args.intrinsics is not None and args.camera is None:
        raise UserError("--intrinsics: needs --camera")
    if args.first_frame is not None and args.frames == 1:
        raise UserError("--first-frame: needs --frames above 1")
    if args.control_mask is not None and args.control is None:
        raise UserError("--control-mask: needs --control")
    if args.control is not None and args.clips > 1:
        raise UserError("--control: does not work with --clips above 1: remove one of them")
    for option, files in (("--first-frame", [args.first_frame] if args.first_frame else []), ("--source", args.source)):
        for file in files:
            check_image(option, file)
    choose_accelerator()
    args.title, export = page_title(args), str(args.lora or args.pipeline or args.model)
    with contextlib.ExitStack() as resources:
        fetch_exports(args, resources)
        generate_samples(args, export)


def parse_domain(text: str) -> int:
    from wfm_ds.recipe.actions import check_domain, find_embodiment

    try:
        return int(text) if text.isascii() and text.isdecimal() else find_embodiment(check_domain(text)).domain
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_viewpoint(text: str) -> str:
    from wfm_ds.recipe.actions import check_viewpoint

    try:
        return check_viewpoint(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_image(option: str, file: Path) -> None:
    from wfm_ds.data.samples import IMAGE_SUFFIXES

    if not file.is_file() or file.suffix.lower() not in IMAGE_SUFFIXES:
        raise UserError(f"{option}: {file} is not an image; use a {', '.join(sorted(IMAGE_SUFFIXES))} file")


def fetch_exports(args: argparse.Namespace, resources: contextlib.ExitStack) -> None:
    """Download a remote --lora or --pipeline, and replace it in `args` by the local folder.

    The folders are removed when `resources` closes. Raises StorageError if a download fails.
    """
    from wfm_ds.checkpoint.remote_store import open_locally

    for name in ("lora", "pipeline"):
        address = getattr(args, name)
        if address is not None:
            setattr(args, name, resources.enter_context(open_locally(address, args.out.parent)))


def generate_samples(args: argparse.Namespace, export: str) -> None:
    """Generate the samples. export: the trained model as the user named it, to find the recipe of its run."""
    from wfm_ds.checkpoint.adapter_loading import find_adapter_file
    from wfm_ds.cli.call_defaults import fill_from_call
    from wfm_ds.cli.evaluation_models import find_run_recipe
    from wfm_ds.data.prompts import load_prompt_file
    from wfm_ds.memory.advice import explain_out_of_memory
    from wfm_ds.models import registry
    from wfm_ds.models.assets.loading import select_device
    from wfm_ds.runs.generation_inputs import (
        check_option_inputs,
        check_source_inputs,
        list_option_inputs,
        load_controls,
    )

    prompts = load_prompt_file(args.prompts)
    if args.lora is not None:
        find_adapter_file(args.lora)
    require_empty(args.out)
    base = args.model or args.pipeline
    pipeline = registry.resolve_pipeline(base, args.family, args.revision, weights=False)
    family, sources = registry.find_family(pipeline, args.family), find_sources(args, prompts)
    origin = "--source" if args.source else str(args.prompts)
    check_source_inputs(family, str(base), sources[0].keys(), origin)
    check_option_inputs(family, str(base), [*list_option_inputs(args), *sources[0]])
    if args.source_size is None and sources[0] and (recipe := find_run_recipe(export)) is not None:
        args.source_size = recipe.data.source_size
    fill_from_call(args, str(base), pipeline, [pipeline] if args.lora is None else [args.lora, pipeline])
    device, controls = select_device(args.device), load_controls(args)
    prompts = [replace(prompt, inputs=controls) for prompt in prompts]
    with explain_out_of_memory(device, lambda phase: memory_advice(args, device), lambda: None):
        load_and_generate(args, prompts, sources)


def find_sources(args: argparse.Namespace, prompts: Sequence[Prompt]) -> list[ImageFiles]:
    """Return each prompt's source images, from --source or the prompt file. All prompts have the same source names."""
    from wfm_ds.runs.generation_inputs import find_prompt_images
    from wfm_ds.types import SOURCES

    in_file = find_prompt_images(prompts, args.prompts, SOURCES)  # masks are only for rewards
    if not args.source:
        if args.source_size is not None and not in_file[0]:
            raise UserError(
                f"--source-size: neither --source nor {args.prompts} names images to edit: remove --source-size"
            )
        return in_file
    if in_file[0]:
        raise UserError(f"--source: {args.prompts} names the images to edit: remove one of the two")
    if len(args.source) > len(SOURCES):
        raise UserError(f"--source: {len(args.source)} images, at most {len(SOURCES)} are possible: remove some")
    files: ImageFiles = dict(zip(SOURCES, args.source, strict=False))
    return [files] * len(prompts)


def load_and_generate(args: argparse.Namespace, prompts: Sequence[Prompt], sources: Sequence[ImageFiles]) -> None:
    """prompts: with control videos as inputs. sources: source images of each prompt."""
    from wfm_ds.models.assets.text_cache import require_viewpoints
    from wfm_ds.runs.generation_inputs import (
        collect_inputs,
        encode_first_frame,
        list_option_inputs,
        load_prompt_images,
    )

    sampler = load_sampler(args, [*list_option_inputs(args), *sources[0]])
    sampler.model.check_prompts([prompt.text for prompt in prompts])
    layout = choose_layout(sampler, args.clips)
    frame, inputs = encode_first_frame(sampler, args.first_frame), collect_inputs(sampler, args, layout)
    if args.viewpoint is not None:
        require_viewpoints(sampler.model, sampler.settings, "--viewpoint")
    prompts = [replace(p, inputs={**p.inputs, **inputs}, viewpoint=args.viewpoint) for p in prompts]
    prompts = load_prompt_images(sampler, prompts, sources)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        write_samples(sampler, [(prompt, seed) for prompt in prompts for seed in args.seeds], args, frame, layout)
    except OSError as error:
        raise UserError(f"{args.out} cannot be written ({error}); free space or choose another folder") from error
    sys.stdout.write(f"{args.out / PAGE_NAME}\n")


def write_samples(
    sampler: Sampler,
    items: Sequence[tuple[Prompt, int]],
    args: argparse.Namespace,
    frame: torch.Tensor | None,
    layout: ClipLayout,
) -> None:
    """Generate samples and write each one to a file. At the end, write samples.jsonl and the HTML page.

    items: (prompt, seed) of each sample. frame: latents [C,T,h,w] of the first frame. layout: positions of the clips.
    """
    from wfm_ds.distributed.progress import track_progress
    from wfm_ds.monitoring import gallery
    from wfm_ds.monitoring.samples import write_sample_file, write_table

    rows: list[dict[str, Any]] = []
    entries: list[gallery.GalleryEntry] = []
    controls = write_controls(args, items[0][0])
    load_frames = None if frame is None else lambda prompts: repeat_first_frame(frame, len(prompts))
    generated = iterate_samples(sampler, items, args.batch, load_frames, layout, args.clips)
    with track_progress(generated, "generating samples", total=len(items)) as tracked:
        for sample, clips in tracked:
            failure = "" if clips[-1].is_finite else NOT_FINITE_MESSAGE
            row = write_sample_file(args.out, len(rows), sample)
            rows.append({**row, "failure": failure} if failure else row)
            height, width = sample.frames.shape[1:3]
            if (len(rows) - 1) % len(args.seeds) == 0:  # before the first sample of a prompt
                entries += [replace(entry, prompt=sample.prompt) for entry in controls]
                entries += input_entries(sample, row)
            entries.append(
                gallery.GalleryEntry(
                    file=row["file"],
                    width=width,
                    height=height,
                    prompt=sample.prompt,
                    caption=f"seed {sample.seed}, {sampling_summary(sampler.settings)}",
                    failure=failure,
                )
            )
            sys.stderr.write(f"{len(rows)} of {len(items)}: {row['file']}{f' ({failure})' if failure else ''}\n")
    write_table(args.out, rows)
    (args.out / PAGE_NAME).write_text(
        gallery.gallery_page(args.title, page_settings(sampler, args), entries), encoding="utf-8"
    )


def input_entries(sample: GeneratedSample, row: Mapping[str, Any]) -> list[GalleryEntry]:
    """Return the page's entries for the input images of a sample. row: its line of samples.jsonl."""
    from wfm_ds.monitoring.gallery import GalleryEntry

    return [
        GalleryEntry(
            file=row["images"][name],
            width=image.shape[1],
            height=image.shape[0],
            prompt=sample.prompt,
            caption=name,
        )
        for name, image in sample.images.items()
    ]


def write_controls(args: argparse.Namespace, prompt: Prompt) -> list[GalleryEntry]:
    """Write the control videos, which all prompts share, and return the page's entries for them."""
    from wfm_ds.monitoring.gallery import GalleryEntry
    from wfm_ds.monitoring.media_files import save_mp4
    from wfm_ds.types import VIDEO_INPUTS

    entries = []
    for name in sorted(VIDEO_INPUTS & prompt.inputs.keys()):
        file, video = f"{name}.mp4", prompt.inputs[name]
        save_mp4(args.out / file, video, args.fps)
        height, width = video.shape[1:3]
        entries.append(GalleryEntry(file=file, width=width, height=height, prompt=prompt.text, caption=name))
    return entries


def repeat_first_frame(frame: torch.Tensor, count: int) -> ConditioningFrames:
    import torch

    from wfm_ds.types import ConditioningFrames

    return ConditioningFrames(torch.stack([frame] * count), torch.ones(count, dtype=torch.int64))


def page_title(args: argparse.Namespace) -> str:
    base = str(args.model or args.pipeline)
    return f"{base} with {args.lora}" if args.lora is not None else base


def describe_sources(sampler: Sampler, args: argparse.Namespace) -> dict[str, str]:
    from wfm_ds.types import SOURCES

    if sampler.model.input_names.isdisjoint(SOURCES):
        return {}
    height, width = sampler.model.source_image_size(args.height, args.width)
    files = ", ".join(file.name for file in args.source)
    return {"sources": f"{files or args.prompts.name}, {width} x {height}"}


def page_settings(sampler: Sampler, args: argparse.Namespace) -> dict[str, str]:
    negative = {"negative prompt": args.negative_prompt} if args.negative_prompt is not None else {}
    return {
        "pipeline": type(sampler.model.pipeline).__name__,
        "sampling": sampling_summary(sampler.settings),
        "solver": sampler.eval_solver,
        **negative,
        **({"clips": str(args.clips)} if args.clips > 1 else {}),
        **{
            name.replace("_", " "): getattr(args, name).name
            for name in ("first_frame", "control", "control_mask")
            if getattr(args, name) is not None
        },
        **describe_sources(sampler, args),
        **({"actions": args.actions.name} if args.actions is not None else {}),
        **({"domain": str(args.domain)} if args.domain is not None else {}),
        **({"viewpoint": args.viewpoint} if args.viewpoint is not None else {}),
        **({"camera": args.camera} if args.camera is not None else {}),
        "prompts": args.prompts.name,
        "seeds": ", ".join(map(str, args.seeds)),
        "dtype": str(sampler.model.dtype).removeprefix("torch."),
    }
