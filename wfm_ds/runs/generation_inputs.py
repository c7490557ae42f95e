"""Inputs of `wfm generate` other than texts: source images, control videos, a first frame, actions, a camera path."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
from torch import Tensor

from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.data.inputs import strip_inputs, transform_intrinsics
from wfm_ds.data.media import load_pixels
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre, load_image
from wfm_ds.data.samples import IMAGE_SUFFIXES, LocalFile
from wfm_ds.data.trajectories import ACTIONS, DOMAIN, INTRINSICS, POSES, Floats, read_npy, require_rigid, to_float32
from wfm_ds.errors import UserError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.models.sampler import Sampler
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.storage.filesystem import open_regular, read_regular
from wfm_ds.types import CONTROL, CONTROL_MASK, FIRST_FRAME, MASK, SOURCE, SOURCES, Prompt

KEY_SEQUENCE = re.compile(r"[a-z]+-[0-9]{1,6}(,[a-z]+-[0-9]{1,6})*", re.IGNORECASE)
MAX_KEY_FRAMES = 10_000
INPUT_OPTIONS = {
    **{ACTIONS: "--actions", DOMAIN: "--domain", POSES: "--camera", INTRINSICS: "--camera"},
    **dict.fromkeys(SOURCES, "--source"),
    **{CONTROL: "--control", CONTROL_MASK: "--control-mask"},
}
"""Command-line option of each input."""

InputArrays = dict[str, npt.NDArray[np.float32]]
ImageFiles = Mapping[str, Path]
"""{name of an input: image file} of one prompt."""


def read_camera(camera: str, lens: Sequence[float] | None) -> dict[str, Floats]:
    """Return {c2w: [F,4,4], intrinsics: [4] or [F,4]} of F frames, float32.

    c2w: camera-to-world matrices. intrinsics: fx, fy, cx, cy in pixels of the source image, not rescaled. camera: a
    .json file with `c2w` and optional `intrinsics`, an .npy file with c2w, or a list of pressed keys with frame counts
    such as `w-80,jw-40` (the format of the diffusers SANA-WM pipeline). lens: fx, fy, cx, cy. Required if the camera
    file has no intrinsics, otherwise not allowed. Raises ValueError for invalid content and OSError if a file cannot be
    read.
    """
    arrays = read_camera_file(Path(camera)) if Path(camera).suffix else {POSES: poses_from_keys(camera)}
    if (lens is None) == (INTRINSICS not in arrays):
        raise ValueError(
            "the camera file already has intrinsics" if lens else "the camera has no intrinsics: pass them too"
        )
    arrays |= {} if lens is None else {INTRINSICS: np.asarray(lens, np.float32)}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name} has NaN or infinite numbers")
    if arrays[POSES].ndim != 3 or arrays[POSES].shape[1:] != (4, 4):
        raise ValueError(f"c2w must be [F, 4, 4], got {list(arrays[POSES].shape)}")
    require_rigid(arrays[POSES])
    return arrays


def read_camera_file(file: Path) -> dict[str, Floats]:
    if file.suffix == ".npy":
        with open_regular(file) as stream:
            return {POSES: read_npy(stream)}
    try:
        content: Any = json.loads(read_regular(file))
        names = [POSES, *([INTRINSICS] if INTRINSICS in content else [])]
        return {name: to_float32(np.asarray(content[name])) for name in names}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a JSON object with c2w") from error


def poses_from_keys(keys: str) -> Floats:
    """Return camera-to-world matrices [N+1,4,4] for keys pressed during N frames.

    The keys w, a, s, d move the camera, and i, j, k, l turn it. Raises ValueError for invalid keys.
    """
    if KEY_SEQUENCE.fullmatch(keys) is None:
        raise ValueError("neither a .json or .npy file nor keys with frame counts such as w-80,jw-40")
    if (num_frames := sum(map(int, re.findall("[0-9]+", keys)))) > MAX_KEY_FRAMES:
        raise ValueError(f"{num_frames:,} frames, at most {MAX_KEY_FRAMES:,} are possible")
    from diffusers.pipelines.sana_wm.cam_utils import action_string_to_c2w

    poses: Floats = action_string_to_c2w(keys)
    return poses


def list_option_inputs(args: argparse.Namespace) -> list[str]:
    camera = [POSES, INTRINSICS] if args.camera is not None else []
    return [name for name in (ACTIONS, DOMAIN, CONTROL, CONTROL_MASK) if getattr(args, name) is not None] + camera


def check_option_inputs(family: type[DiffusionModel], model: str, names: Collection[str]) -> None:
    """Raise UserError if the model does not support one of the inputs `names`, or if a required input is not in them.

    model: the model as the user named it.
    """
    for name in names:
        if name not in family.input_specs:
            raise UserError(f"{INPUT_OPTIONS[name]}: {family.family} ({model}) does not support {name}: remove it")
    for name, spec in family.input_specs.items():
        if spec.required and name not in names:
            option = INPUT_OPTIONS.get(name)
            hint = f"pass {option}" if option else "it is only available in a run's validation"
            raise UserError(f"{family.family} ({model}) needs the input {name}: {hint}")


def load_controls(args: argparse.Namespace) -> dict[str, npt.NDArray[np.uint8]]:
    """Load the control videos of the options as {name: uint8 [F,H,W,3]}, resized and cropped at the centre.

    The clips start at the first frame of the file and have args.fps frames per second. Raises UserError if a file
    cannot be decoded, is too short, or has a lower frame rate.
    """
    framing = Framing(height=args.height, width=args.width, num_frames=args.frames, fps=args.fps, max_upscale=math.inf)
    videos: dict[str, npt.NDArray[np.uint8]] = {}
    for name in (CONTROL, CONTROL_MASK):
        if (file := getattr(args, name)) is None:
            continue
        try:
            video = load_pixels(LocalFile(str(file)), framing, lambda purpose: 0.0)
        except BadMedia as error:
            advice = "use another file" if error.reason == "decode" else "use another file, or change --frames or --fps"
            raise UserError(f"{INPUT_OPTIONS[name]}: {error.name}: {error.detail}: {advice}") from error
        videos[name] = video if video.ndim == 4 else video[None]
    return videos


def encode_first_frame(sampler: Sampler, file: Path | None) -> Tensor | None:
    """Encode the first frame to latents [C,T,h,w].

    Returns None if `file` is None, or if the model uses the pixels of the first frame instead of its latents. Raises
    UserError if the model does not support a first frame, if it requires one and `file` is None, or if the file is not
    an image.
    """
    model = sampler.model
    if file is None:
        if min(model.conditioning_frame_counts) > 0:
            raise UserError(f"{model.path} needs a first frame: pass an image with --first-frame")
        return None
    if 1 not in model.conditioning_frame_counts:
        raise UserError(f"--first-frame: {model.family} ({model.path}) does not support it: remove it")
    if not model.uses_clean_frames:
        return None
    return pad_num_frames(model.encode_uint8([load_first_frame(sampler, file)])[0], sampler.latent_shape[1])


def load_first_frame(sampler: Sampler, file: Path) -> npt.NDArray[np.uint8]:
    """Load the first frame as pixels [H,W,3], scaled and centre-cropped to the video's size. Raises UserError."""
    return load_pixels(LocalFile(str(file)), image_framing(sampler.settings), draw_centre)


def image_framing(settings: SamplingRecipe) -> Framing:
    return Framing(height=settings.height, width=settings.width, max_upscale=math.inf)


def collect_inputs(sampler: Sampler, args: argparse.Namespace, layout: ClipLayout) -> InputArrays:
    """Return the model inputs that all videos share, as {name: float32 array}.

    The inputs are actions, domain and camera path of all args.clips clips, and also the pixels of the first frame if
    the model does not use its latents. Raises UserError if a file cannot be used.
    """
    model, size = sampler.model, sampler.settings
    inputs: InputArrays = {}
    if args.actions is not None:
        inputs |= read_actions(args)
    if args.camera is not None:
        inputs |= read_camera_inputs(args, size)
    if args.clips > 1:
        check_total_frames(inputs, layout, args)
    for clip in range(args.clips if inputs else 0):
        check_model_inputs(model, layout.slice_inputs(inputs, clip) if args.clips > 1 else inputs, size, args)
    if args.first_frame is not None and not model.uses_clean_frames:
        inputs[FIRST_FRAME] = load_first_frame(sampler, args.first_frame).astype(np.float32)
    return inputs


def find_prompt_images(
    prompts: Sequence[Prompt], file: Path, accepted: Sequence[str] = (*SOURCES, MASK)
) -> list[ImageFiles]:
    """Return the input images that a prompt file names for each prompt. accepted: names of the images to find.

    An input image is a key such as `source` whose value is the path of an image file, relative to the folder of the
    prompt file. Other values are metadata. Raises UserError if an image is missing, or if the prompts have different
    numbers of images.
    """
    images: list[ImageFiles] = []
    for prompt in prompts:
        values = {name: prompt.metadata.get(name) for name in accepted}
        images.append({name: file.parent / path for name, path in values.items() if is_image_path(path)})
        for path in images[-1].values():
            if not path.is_file():
                raise UserError(f"{file}: {path}, named by prompt {prompt.id}, not found")
    names = set[str]().union(*images)
    for prompt, found in zip(prompts, images, strict=True):
        if missing := [name for name in accepted if name in names and name not in found]:
            raise UserError(f"{file}: prompt {prompt.id} has no {missing[0]}, but other prompts have one: add it")
    for name, following in (*pairwise(SOURCES), (SOURCE, MASK)):
        if following in names and name not in names:
            raise UserError(f"{file} has {following}, but no {name}: add the image to edit as {name}")
    return images


def is_image_path(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and Path(value).suffix.lower() in IMAGE_SUFFIXES


def check_source_inputs(family: type[DiffusionModel], model: str, names: Collection[str], origin: str) -> None:
    """Raise UserError if the model does not accept the input images `names`, or needs a source that is not given.

    model: the model as the user named it. origin: option or file that names the images.
    """
    accepted = [name for name in SOURCES if name in family.input_specs]
    sources = [name for name in SOURCES if name in names]
    missing = [name for name in accepted if family.input_specs[name].required and name not in sources]
    if missing:
        raise UserError(
            f"{model}: {family.family} needs the input {missing[0]}, an image to edit: name it in a .jsonl file of "
            "prompts (docs/generate.md) or with wfm generate --source"
        )
    if sources and not accepted:
        raise UserError(f"{origin}: {family.family} ({model}) does not edit images: use another model, or remove them")
    if len(sources) > len(accepted):
        raise UserError(
            f"{origin}: {len(sources)} source images, but {family.family} ({model}) accepts at most {len(accepted)}: "
            "remove some"
        )


def load_prompt_images(sampler: Sampler, prompts: Sequence[Prompt], images: Sequence[ImageFiles]) -> list[Prompt]:
    """Return the prompts with their input images, resized and cropped as in training (InputReader).

    images: image files of each prompt. Raises BadMedia if a file cannot be decoded.
    """
    settings = sampler.settings
    sizes = dict.fromkeys(SOURCES, sampler.model.source_image_size(settings.height, settings.width))
    sizes[MASK] = settings.height, settings.width
    loaded: dict[tuple[str, Path], npt.NDArray[np.uint8]] = {}
    for name, file in dict.fromkeys(item for files in images for item in files.items()):
        framing = Framing(height=sizes[name][0], width=sizes[name][1], max_upscale=math.inf)
        loaded[name, file] = load_image(LocalFile(str(file)), framing, draw_centre)
    return [
        replace(
            prompt,
            inputs={**prompt.inputs, **{item[0]: loaded[item] for item in files.items()}},
            metadata=strip_inputs(prompt.metadata, list(files)),
        )
        for prompt, files in zip(prompts, images, strict=True)
    ]


def read_actions(args: argparse.Namespace) -> InputArrays:
    with explain_read_errors("--actions", args.actions), open_regular(args.actions) as file:
        inputs = {ACTIONS: read_npy(file)}
        if not np.isfinite(inputs[ACTIONS]).all():
            raise ValueError("contains NaN or infinite numbers")
    return inputs if args.domain is None else inputs | {DOMAIN: np.asarray(args.domain, np.float32)}


def read_camera_inputs(args: argparse.Namespace, size: SamplingRecipe) -> InputArrays:
    """Return camera poses and intrinsics. With a first frame, the intrinsics are adapted to its scaling and crop."""
    with explain_read_errors("--camera", args.camera):
        inputs = read_camera(args.camera, args.intrinsics)
        if args.first_frame is not None:
            image = LocalFile(str(args.first_frame))
            inputs[INTRINSICS] = transform_intrinsics(inputs[INTRINSICS], image, image_framing(size), draw_centre)
    return inputs


def check_total_frames(inputs: InputArrays, layout: ClipLayout, args: argparse.Namespace) -> None:
    """Raise UserError unless the actions and the camera path are exactly as long as all clips of a video together."""
    total = layout.total_frames(args.clips)
    for name, rows in ((ACTIONS, total - 1), (POSES, total), (INTRINSICS, total)):
        if name in inputs and (name != INTRINSICS or inputs[name].ndim > 1) and len(inputs[name]) != rows:
            raise UserError(
                f"{INPUT_OPTIONS[name]}: {name} has {len(inputs[name])} rows, but {args.clips} clips of "
                f"{layout.num_frames} frames that overlap by {layout.overlap} need {rows}"
            )


def check_model_inputs(
    model: DiffusionModel, inputs: InputArrays, size: SamplingRecipe, args: argparse.Namespace
) -> None:
    try:
        model.encode_inputs([inputs], size.num_frames, (size.height, size.width))
    except ValueError as error:
        options = dict.fromkeys(INPUT_OPTIONS[name] for name in inputs)
        files = [str(file) for file in (args.actions, args.camera) if file is not None]
        raise UserError(f"{' and '.join(options)}: {model.family} cannot use {' and '.join(files)}: {error}") from error


@contextmanager
def explain_read_errors(option: str, value: object) -> Iterator[None]:
    """Convert OSError and ValueError in the block to a UserError that names the option and its value."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{option}: {value} cannot be read: {error}") from error
