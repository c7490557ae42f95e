"""Inputs of `wfm generate` besides prompts: a first frame, actions, a camera."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from wfm_ds.data.camera import read_camera
from wfm_ds.data.inputs import transform_intrinsics
from wfm_ds.data.media import load_media
from wfm_ds.data.npy import read_npy
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.samples import LocalFile
from wfm_ds.data.trajectories import ACTIONS, DOMAIN, INTRINSICS, POSES
from wfm_ds.errors import UserError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.models.sampler import Sampler
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.types import FIRST_FRAME

INPUT_OPTIONS = {ACTIONS: "--actions", DOMAIN: "--domain", POSES: "--camera", INTRINSICS: "--camera"}
"""Command-line option of each input."""

InputArrays = dict[str, npt.NDArray[np.float32]]


def list_option_inputs(args: argparse.Namespace) -> list[str]:
    """Return the names of the inputs that are set by command-line options."""
    camera = [POSES, INTRINSICS] if args.camera is not None else []
    return [name for name in (ACTIONS, DOMAIN) if getattr(args, name) is not None] + camera


def encode_first_frame(sampler: Sampler, file: Path | None) -> Tensor | None:
    """Return latents [C,T,h,w] of the first frame; None without a file, or if the model takes the frame as pixels.

    Raises UserError if the model does not support a first frame or requires a missing one, or if the file is not an
    image.
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
    """Load pixels [H,W,3], centre-cropped to the video's size. Raises UserError if the file is not an image."""
    return load_media(LocalFile(str(file)), image_framing(sampler.settings), draw_centre)


def image_framing(settings: SamplingRecipe) -> Framing:
    return Framing(height=settings.height, width=settings.width, max_upscale=math.inf)


def collect_inputs(sampler: Sampler, args: argparse.Namespace) -> InputArrays:
    """Return {name: float32 array} that all videos share: actions, domain, camera, and a first frame taken as pixels.

    Raises UserError for inputs that the model does not support, for missing inputs that it requires, and for files that
    cannot be used.
    """
    model, size, names = sampler.model, sampler.settings, list_option_inputs(args)
    for name in names:
        if name not in model.input_specs:
            raise UserError(f"{INPUT_OPTIONS[name]}: {model.family} ({model.path}) does not support {name}: remove it")
    for name, spec in model.input_specs.items():
        if spec.required and name not in names:
            hint = (
                f"pass {INPUT_OPTIONS[name]}" if name in INPUT_OPTIONS else "it is only available in a run's validation"
            )
            raise UserError(f"{model.family} ({model.path}) needs the input {name}: {hint}")
    inputs: InputArrays = {}
    if args.actions is not None:
        inputs |= read_actions(args)
    if args.camera is not None:
        inputs |= read_camera_inputs(args, size)
    if inputs:
        check_model_inputs(model, inputs, size, args)
    if args.first_frame is not None and not model.uses_clean_frames:
        inputs[FIRST_FRAME] = load_first_frame(sampler, args.first_frame).astype(np.float32)
    return inputs


def read_actions(args: argparse.Namespace) -> InputArrays:
    with explain_read_errors("--actions", args.actions), args.actions.open("rb") as file:
        inputs = {ACTIONS: read_npy(file)}
        if not np.isfinite(inputs[ACTIONS]).all():
            raise ValueError("contains NaN or infinite numbers")
    return inputs if args.domain is None else inputs | {DOMAIN: np.asarray(args.domain, np.float32)}


def read_camera_inputs(args: argparse.Namespace, size: SamplingRecipe) -> InputArrays:
    """Return poses and intrinsics. With a first frame, intrinsics are adapted to its crop and size."""
    with explain_read_errors("--camera", args.camera):
        inputs = read_camera(args.camera, args.intrinsics)
        if args.first_frame is not None:
            image = LocalFile(str(args.first_frame))
            inputs[INTRINSICS] = transform_intrinsics(inputs[INTRINSICS], image, image_framing(size), draw_centre)
    return inputs


def check_model_inputs(
    model: DiffusionModel, inputs: InputArrays, size: SamplingRecipe, args: argparse.Namespace
) -> None:
    """Raise UserError if the model cannot use these inputs."""
    try:
        model.encode_inputs([inputs], size.num_frames, (size.height, size.width))
    except ValueError as error:
        options = dict.fromkeys(INPUT_OPTIONS[name] for name in inputs)
        files = [str(file) for file in (args.actions, args.camera) if file is not None]
        raise UserError(f"{' and '.join(options)}: {model.family} cannot use {' and '.join(files)}: {error}") from error


@contextmanager
def explain_read_errors(option: str, value: object) -> Iterator[None]:
    """Convert OSError and ValueError of the block to a UserError that names the option and its value."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{option}: {value} cannot be read: {error}") from error
