"""Conditioning inputs of a sample (`data.inputs`): read them and select the values for the frames of the clip.

An input is a key of NAME.json, or of its object `camera`. Its value is a number, a list of numbers, or the name of an
.npy file in the folder of the image or video. For a file with N frames, row i of `actions` [N-1,D] is the action
between frames i and i + 1, and `c2w` [N,4,4] and `intrinsics` [4] or [N,4] describe the camera in each frame. All other
inputs do not depend on the frames. If the file is an image, its inputs describe a generated sample with N frames. The
input FIRST_FRAME is decoded from the image or video, so data.inputs does not list it.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from wfm_ds.data.media import clip_frames, load_media, media_size
from wfm_ds.data.pixels import BadMedia, Draw, Framing, crop_box
from wfm_ds.data.samples import IMAGE_SUFFIXES, LocalFile, Media, RemoteFile, Sample
from wfm_ds.data.trajectories import (
    ACTIONS,
    INTRINSICS,
    POSES,
    ActionScaling,
    Floats,
    compose_actions,
    crop_intrinsics,
    load_scaling,
    read_npy,
    require_rigid,
    to_float32,
)
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import ActionsRecipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage.filesystem import open_regular
from wfm_ds.types import FIRST_FRAME, Prompt

READ_ERRORS = (OSError, ValueError, KeyError)
CAMERA_KEY = "camera"


class DeclaredInput(Protocol):
    """A conditioning input that a model accepts (models/input_specs.py)."""

    @property
    def rank(self) -> int: ...


class ConditionedModel(Protocol):
    """The attributes and methods of a model (models/base.py) that concern conditioning inputs."""

    @property
    def input_specs(self) -> Mapping[str, DeclaredInput]: ...

    @property
    def uses_clean_frames(self) -> bool: ...

    def encode_inputs(self, inputs: Sequence[Mapping[str, Floats]], num_frames: int, size: tuple[int, int], /) -> Any:
        """Encode the inputs of B samples as conditioning tensors. Raises ValueError if an input is invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReader:
    """Reads the conditioning inputs, other than text, of samples. Thread-safe."""

    input_ndims: Mapping[str, int]  # number of axes of each input in data.inputs
    num_frames: int  # sampling.num_frames
    actions: ActionsRecipe
    width: int | None  # numbers per action; None: no actions
    scaling: ActionScaling | None
    validate: Callable[[Mapping[str, Floats]], object]  # raises ValueError for inputs that the model rejects
    needs_first_frame: bool = False  # the model is also conditioned on the first frame

    @classmethod
    def from_recipe(cls, recipe: Recipe, model: ConditionedModel, actions: ActionData | None) -> InputReader | None:
        """Return a reader, or None if the run has no conditioning inputs."""
        first_frame = recipe.algorithm.conditioning_frame_range[1] > 0 and not model.uses_clean_frames
        if not (recipe.data.inputs or first_frame):
            return None
        size = recipe.sampling
        return cls(
            input_ndims={name: model.input_specs[name].rank for name in recipe.data.inputs},
            num_frames=size.num_frames,
            actions=recipe.data.actions,
            width=None if actions is None else actions.width,
            scaling=None if actions is None else actions.scaling,
            validate=lambda inputs: model.encode_inputs([inputs], size.num_frames, (size.height, size.width)),
            needs_first_frame=first_frame,
        )

    def load_prompt(self, sample: Sample, framing: Framing, draw: Draw) -> Prompt:
        """Return the sample's prompt with the conditioning inputs of the clip that `load_media` would decode.

        Raises BadMedia with reason `bad_actions` or `bad_input`, or with the reason why the image or video is unusable.
        """
        inputs = self._read_inputs(sample, framing, draw) if self.input_ndims else {}
        if self.needs_first_frame:
            inputs[FIRST_FRAME] = load_first_frame(sample.media, framing, draw)
        metadata = strip_inputs(sample.prompt.metadata, list(self.input_ndims))
        return replace(sample.prompt, inputs=inputs, metadata=metadata)

    def _read_inputs(self, sample: Sample, framing: Framing, draw: Draw) -> dict[str, Floats]:
        is_image = sample.media.suffix in IMAGE_SUFFIXES
        frames, total = (range(self.num_frames), None) if is_image else clip_frames(sample.media, framing, draw)
        inputs: dict[str, Floats] = {}
        for name in self.input_ndims:
            with convert_input_errors(name, sample.media):
                raw = read_raw_input(sample, name)
                inputs[name] = self._select_frames(name, raw, frames, self.num_frames if total is None else total)
                if name == INTRINSICS:
                    inputs[name] = transform_intrinsics(inputs[name], sample.media, framing, draw)
        with convert_input_errors(next(iter(inputs)), sample.media):
            self.validate(inputs)
        return inputs

    def _select_frames(self, name: str, raw: Floats, frames: Sequence[int], total: int) -> Floats:
        if not np.isfinite(raw).all():
            raise ValueError("contains NaN or infinite numbers")
        if name == ACTIONS:
            require_shape(raw, (total - 1, self.width))
            selected = compose_actions(raw, frames, self.actions.compose)
            return selected if self.scaling is None else self.scaling(selected)
        if name == POSES:
            require_shape(raw, (total, 4, 4))
            require_rigid(raw)
            return raw[list(frames)]
        if name == INTRINSICS:
            raw = np.broadcast_to(raw, (total, 4)) if raw.shape == (4,) else raw
            require_shape(raw, (total, 4))
            return raw[list(frames)]
        if raw.ndim != self.input_ndims[name]:
            raise ValueError(f"has {raw.ndim} axes, the model needs {self.input_ndims[name]}")
        return raw


def load_first_frame(media: Media, framing: Framing, draw: Draw) -> Floats:
    """Return the first frame of the clip that `load_media` would decode: float32 [H,W,3], from 0 to 255.

    Raises BadMedia if the image or video is unusable.
    """
    single = replace(framing, num_frames=1, span=framing.span or framing.num_frames)
    pixels = load_media(media, single, draw).astype(np.float32)
    return pixels if pixels.ndim == 3 else pixels[0]


@contextlib.contextmanager
def convert_input_errors(name: str, media: Media) -> Iterator[None]:
    """Convert READ_ERRORS in the `with` block to BadMedia with reason `bad_actions` or `bad_input`."""
    try:
        yield
    except READ_ERRORS as error:
        raise BadMedia("bad_actions" if name == ACTIONS else "bad_input", media.name, f"{name}: {error}") from error


def require_shape(array: Floats, shape: tuple[int | None, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"shape {list(array.shape)}, expected {list(shape)} for the number of frames in this file")


def transform_intrinsics(intrinsics: Floats, media: Media, framing: Framing, draw: Draw) -> Floats:
    """Convert intrinsics [F,4] from the pixels of the file to the pixels of the cropped and resized frames."""
    height, width = media_size(media)
    box = crop_box((height, width), framing, framing.crop_position(draw))
    return crop_intrinsics(intrinsics, box, (framing.height, framing.width))


def read_raw_input(sample: Sample, name: str) -> Floats:
    """Return the input `name` for all frames of the file, as float32. Raises KeyError, OSError or ValueError."""
    camera = sample.prompt.metadata.get(CAMERA_KEY)
    mappings = [sample.prompt.metadata, *([camera] if isinstance(camera, dict) else [])]
    value = next((mapping[name] for mapping in mappings if name in mapping), None)
    if value is None:
        raise ValueError("missing in the caption file")
    if isinstance(value, str):
        with find_sibling_file(sample, value).open() as file:
            return read_npy(file)
    return to_float32(np.asarray(value))


def find_sibling_file(sample: Sample, name: str) -> Media:
    """Return the .npy file `name` next to the sample, in its folder or tar. Raises ValueError or FileNotFoundError."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name.endswith(".npy"):
        raise ValueError(f"{name} is not an .npy file below the folder of the image or video")
    if name in sample.files:
        return sample.files[name]
    media = sample.media
    if isinstance(media, LocalFile):
        return LocalFile(os.path.join(os.path.dirname(media.file), name))
    if isinstance(media, RemoteFile):
        return RemoteFile(f"{media.address.rpartition('/')[0]}/{name}")
    raise FileNotFoundError(f"{name} not found next to {media.name}")


def strip_inputs(metadata: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the metadata without the inputs `names`, for rewards.

    The object `camera` is removed as a whole if it contains one of the inputs.
    """
    camera = metadata.get(CAMERA_KEY)
    if isinstance(camera, dict) and any(name in camera and name not in metadata for name in names):
        names = [*names, CAMERA_KEY]
    return {key: value for key, value in metadata.items() if key not in names}


NUM_PROBED = 16  # number of samples read to find the width of the actions


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionData:
    """Width and scaling of the actions in the training data, and optional additional action trajectories for RL."""

    width: int  # numbers per action
    scaling: ActionScaling | None = None
    library: Floats | None = None  # [N,F-1,D], scaled; from rollout.trajectory_library


def load_action_data(recipe: Recipe, samples: Sequence[Sample]) -> ActionData | None:
    """Return the ActionData of a recipe. Returns None if data.inputs does not contain actions.

    Raises DataError if a file with actions cannot be used.
    """
    if ACTIONS not in recipe.data.inputs:
        return None
    scaling = load_scaling(recipe.data.actions)
    width = recipe.data.actions.width or (len(scaling.low) if scaling else None) or probe_action_width(samples)
    if scaling is not None and width != len(scaling.low):
        raise DataError(f"data.actions.width {width} does not match data.actions.stats with {len(scaling.low)} numbers")
    trajectories = None
    if recipe.is_rl and recipe.rl.rollout.trajectory_library is not None:
        path = Path(recipe.rl.rollout.trajectory_library)
        trajectories = load_trajectory_library(path, (recipe.sampling.num_frames - 1, width), scaling)
    return ActionData(width=width, scaling=scaling, library=trajectories)


def probe_action_width(samples: Sequence[Sample]) -> int:
    """Return the most common action width D in the first samples of the dataset.

    Raises DataError if none of these samples has actions [N-1 steps, D].
    """
    widths: Counter[int] = Counter()
    for sample in samples[:NUM_PROBED]:
        try:
            raw = read_raw_input(sample, ACTIONS)
        except READ_ERRORS:
            continue
        if raw.ndim == 2:
            widths[raw.shape[1]] += 1
    if not widths:
        raise DataError(
            f"data.inputs: none of the first {min(len(samples), NUM_PROBED)} samples has readable actions [N-1,D]. "
            "Set `actions` in each NAME.json to an .npy file"
        )
    return widths.most_common(1)[0][0]


def load_trajectory_library(path: Path, shape: tuple[int, int], scaling: ActionScaling | None) -> Floats:
    """Load action trajectories, float32 [N trajectories, F-1 steps, D], from an .npy file.

    The trajectories are scaled like the training actions. shape: the required shape (F-1, D) of a trajectory, for clips
    of F frames. Raises DataError if the file is unreadable, has a different shape or contains non-finite numbers.
    """
    try:
        with open_regular(path) as file:
            trajectories = read_npy(file)
    except (OSError, ValueError) as error:
        raise DataError(f"rollout.trajectory_library: {path} cannot be read: {error}") from error
    if trajectories.ndim != 3 or not len(trajectories) or not np.isfinite(trajectories).all():
        raise DataError(f"rollout.trajectory_library: {path} must contain finite numbers [N,F-1,D]")
    if trajectories.shape[1:] != shape:
        raise DataError(
            f"rollout.trajectory_library: {path} has trajectories of shape {list(trajectories.shape[1:])}, this recipe "
            f"needs {list(shape)}"
        )
    return trajectories if scaling is None else scaling(trajectories)
