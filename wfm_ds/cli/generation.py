"""The work of `wfm generate`, which imports torch."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from wfm_ds.checkpoint.adapter_loading import find_adapter_file
from wfm_ds.checkpoint.remote_store import open_locally
from wfm_ds.cli.call_defaults import fill_from_call
from wfm_ds.cli.evaluation_models import find_run_recipe
from wfm_ds.cli.samplers import choose_layout, iterate_samples, load_sampler, memory_advice, sampling_summary
from wfm_ds.cli.sampling_options import require_empty
from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.data.prompts import load_prompt_file
from wfm_ds.distributed.progress import track_progress
from wfm_ds.errors import UserError
from wfm_ds.memory.advice import explain_out_of_memory
from wfm_ds.models import registry
from wfm_ds.models.assets.loading import select_device
from wfm_ds.models.assets.text_cache import require_viewpoints
from wfm_ds.models.sampler import Sampler
from wfm_ds.monitoring.gallery import GalleryEntry, gallery_page
from wfm_ds.monitoring.media_files import save_mp4
from wfm_ds.monitoring.samples import write_sample_file, write_table
from wfm_ds.runs.generation_inputs import (
    ImageFiles,
    check_option_inputs,
    check_source_inputs,
    collect_inputs,
    encode_first_frame,
    find_prompt_images,
    list_option_inputs,
    load_controls,
    load_prompt_images,
)
from wfm_ds.types import SOURCES, VIDEO_INPUTS, ConditioningFrames, Prompt

PAGE_NAME = "index.html"
NOT_FINITE_MESSAGE = "non-finite latents: this sample is invalid"


def run_generation(args: argparse.Namespace) -> None:
    base, export = str(args.model or args.pipeline), str(args.lora or args.pipeline or args.model)
    args.title = base if args.lora is None else f"{base} with {args.lora}"
    with contextlib.ExitStack() as resources:
        for name in ("lora", "pipeline"):
            if (address := getattr(args, name)) is not None:  # remote exports are downloaded, and removed at the end
                setattr(args, name, resources.enter_context(open_locally(address, args.out.parent)))
        generate_samples(args, export)


def generate_samples(args: argparse.Namespace, export: str) -> None:
    """Generate the samples. export: the trained model as the user named it, to find the recipe of its run."""
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
    rows: list[dict[str, Any]] = []
    entries: list[GalleryEntry] = []
    controls = write_controls(args, items[0][0])
    load_frames = None if frame is None else lambda prompts: repeat_first_frame(frame, len(prompts))
    generated = iterate_samples(sampler, items, args.batch, load_frames, layout, args.clips)
    with track_progress(generated, "generating samples", total=len(items)) as tracked:
        for number, (sample, clips) in enumerate(tracked):
            failure = "" if clips[-1].is_finite else NOT_FINITE_MESSAGE
            row = write_sample_file(args.out, number, sample)
            rows.append({**row, "failure": failure} if failure else row)
            if number % len(args.seeds) == 0:  # before the first sample of a prompt
                entries += [replace(entry, prompt=sample.prompt) for entry in controls]
                images = sample.images.items()
                entries += [gallery_entry(row["images"][name], image, sample.prompt, name) for name, image in images]
            caption = f"seed {sample.seed}, {sampling_summary(sampler.settings)}"
            entries.append(gallery_entry(row["file"], sample.pixels, sample.prompt, caption, failure))
            sys.stderr.write(f"{len(rows)} of {len(items)}: {row['file']}{f' ({failure})' if failure else ''}\n")
    write_table(args.out, rows)
    page = gallery_page(args.title, page_settings(sampler, args), entries)
    (args.out / PAGE_NAME).write_text(page, encoding="utf-8")


def gallery_entry(file: str, pixels: npt.NDArray[Any], prompt: str, caption: str, failure: str = "") -> GalleryEntry:
    """Return the page's entry for a file. pixels: image [H,W,3] or video [F,H,W,3]."""
    height, width = pixels.shape[-3:-1]
    return GalleryEntry(file=file, width=width, height=height, prompt=prompt, caption=caption, failure=failure)


def write_controls(args: argparse.Namespace, prompt: Prompt) -> list[GalleryEntry]:
    """Write the control videos, which all prompts share, and return the page's entries for them."""
    names = sorted(VIDEO_INPUTS & prompt.inputs.keys())
    for name in names:
        save_mp4(args.out / f"{name}.mp4", prompt.inputs[name], args.fps)
    return [gallery_entry(f"{name}.mp4", prompt.inputs[name], prompt.text, name) for name in names]


def repeat_first_frame(frame: torch.Tensor, count: int) -> ConditioningFrames:
    return ConditioningFrames(torch.stack([frame] * count), torch.ones(count, dtype=torch.int64))


def page_settings(sampler: Sampler, args: argparse.Namespace) -> dict[str, str]:
    settings = {
        "pipeline": type(sampler.model.pipeline).__name__,
        "sampling": sampling_summary(sampler.settings),
        "solver": sampler.eval_solver,
        "negative prompt": args.negative_prompt,
        "clips": args.clips if args.clips > 1 else None,
        "first frame": args.first_frame,
        "control": args.control,
        "control mask": args.control_mask,
        "sources": None if sampler.model.input_names.isdisjoint(SOURCES) else describe_sources(sampler, args),
        "actions": args.actions,
        "domain": args.domain,
        "viewpoint": args.viewpoint,
        "camera": args.camera,
        "prompts": args.prompts,
        "seeds": ", ".join(map(str, args.seeds)),
        "dtype": str(sampler.model.dtype).removeprefix("torch."),
    }
    used = {name: value for name, value in settings.items() if value is not None}
    return {name: value.name if isinstance(value, Path) else str(value) for name, value in used.items()}


def describe_sources(sampler: Sampler, args: argparse.Namespace) -> str:
    height, width = sampler.model.source_image_size(args.height, args.width)
    files = ", ".join(file.name for file in args.source)
    return f"{files or args.prompts.name}, {width} x {height}"
