"""Conditioning inputs of a sample (`data.inputs`): read them and select the values for the frames of the clip.

An input is a key of the caption file NAME.json, or of its object `camera`. Its value is a number, a list of numbers, or
the name of an .npy file in the folder of the image or video. The value of an input image, such as `source`, is the name
of an image file; it is resized and cropped like the target image. The value of an input video, such as `control`, is
the name of a video file with the same frame times as the target; it is cut, resized and cropped like the target. For N
frames and D numbers per action, row i of `actions` [N-1,D] is the action between frames i and i + 1. `c2w` [N,4,4] and
`intrinsics` [4] or [N,4] describe the camera. All other inputs do not depend on the frames. The inputs of an image
describe a generated video.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wfm_ds.data.action_data import ActionData
from wfm_ds.data.action_space import ActionSpace
from wfm_ds.data.episode import EpisodeVideo
from wfm_ds.data.input_files import CAMERA_KEY, READ_ERRORS, find_input_media, read_raw_input
from wfm_ds.data.media import choose_frames, clip_frames, frame_seconds, load_clip, load_pixels, media_size
from wfm_ds.data.media_inputs import find_original
from wfm_ds.data.pixels import BadMedia, Draw, Framing, crop_box, load_image
from wfm_ds.data.samples import IMAGE_SUFFIXES, REASONS, Media, Sample, dataset_name
from wfm_ds.data.trajectories import (
    ACTIONS,
    DOMAIN,
    INTRINSICS,
    POSES,
    ActionScaling,
    Floats,
    compose_actions,
    crop_intrinsics,
    require_rigid,
)
from wfm_ds.recipe.actions import ActionsRecipe, find_embodiment
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.types import FIRST_FRAME, MASK, Prompt


class DeclaredInput(Protocol):
    """A conditioning input that a model accepts."""

    @property
    def rank(self) -> int: ...


class ConditionedModel(Protocol):
    """The attributes and methods of a model that concern conditioning inputs."""

    @property
    def input_specs(self) -> Mapping[str, DeclaredInput]: ...

    @property
    def uses_clean_frames(self) -> bool: ...

    def source_image_size(self, height: int, width: int, /) -> tuple[int, int]:
        """Return the size of the source images of a sample with this size."""

    def encode_inputs(self, inputs: Sequence[Mapping[str, Floats]], num_frames: int, size: tuple[int, int], /) -> Any:
        """Encode the inputs of B samples as conditioning tensors. Raises ValueError if an input is invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReader:
    """Reads the conditioning inputs of samples, except the text. Thread-safe."""

    input_ndims: Mapping[str, int]  # number of axes of each input in data.inputs without images and videos
    num_frames: int  # sampling.num_frames
    actions: ActionsRecipe
    validate: Callable[[Mapping[str, Floats]], object]  # raises ValueError for inputs that the model rejects
    width: int | None = None  # numbers per action; None: no actions
    scaling: ActionScaling | None = None
    space: ActionSpace | None = None  # makes the actions of recorded episodes
    needs_first_frame: bool = False  # the model is also conditioned on the first frame
    domain: int | None = None  # input `domain` of all samples; None: the value of each sample
    images: Sequence[str] = ()  # input images
    videos: Sequence[str] = ()  # input videos
    source_size: Callable[[int, int], tuple[int, int]] = lambda *size: size  # size of sources for the size of a sample
    has_target: bool = True  # whether the image of a sample is the target; otherwise it is the source or control
    sets: Mapping[str, InputReader] = field(default_factory=dict)  # readers of the data sets of a mixture

    @classmethod
    def from_recipe(cls, recipe: Recipe, model: ConditionedModel, actions: ActionData | None) -> InputReader | None:
        """Return a reader, or None if the run has no conditioning inputs."""
        first_frame = recipe.algorithm.conditioning_frame_range[1] > 0 and not model.uses_clean_frames
        if not (recipe.data.inputs or first_frame):
            return None
        size, media = recipe.sampling, recipe.data.media_inputs
        reader = cls(
            input_ndims={name: model.input_specs[name].rank for name in recipe.data.inputs if name not in media},
            images=recipe.data.image_inputs,
            videos=recipe.data.video_inputs,
            source_size=lambda height, width: model.source_image_size(height, width),
            has_target=recipe.data.target,
            num_frames=size.num_frames,
            actions=recipe.data.actions,
            validate=lambda inputs: model.encode_inputs([inputs], size.num_frames, (size.height, size.width)),
            needs_first_frame=first_frame,
        )
        if actions is None:
            return reader
        parts = {name: part for name, (part, _) in recipe.data.set_recipes().items() if name in actions.sets}
        sets = {name: reader.for_data(part, actions.sets[name]) for name, part in parts.items()}
        return replace(reader.for_data(recipe.data, actions), sets=sets)

    def for_data(self, data: DataRecipe, actions: ActionData) -> InputReader:
        """Return a copy of this reader with the action space, scaling and domain of a data set."""
        return replace(
            self,
            actions=data.actions,
            width=actions.width,
            scaling=actions.scaling,
            space=ActionSpace.from_recipe(data.actions),
            domain=None if data.domain is None else find_embodiment(data.domain).domain,
        )

    def load_prompt(self, sample: Sample, framing: Framing, draw: Draw) -> Prompt:
        """Return the sample's prompt with the conditioning inputs of the clip that `load_pixels` would decode.

        Raises BadMedia. Its reason is `bad_actions` or `bad_input` unless the image or video is unusable.
        """
        reader = self.sets.get(dataset_name(sample), self)
        inputs: dict[str, npt.NDArray[Any]] = {}
        if self.input_ndims:
            inputs |= reader._read_inputs(sample, framing, draw)
        for name in self.images:
            inputs[name] = self._load_image(sample, name, framing, draw)
        for name in self.videos:
            inputs[name] = self._load_video(sample, name, framing, draw)
        if self.needs_first_frame:
            inputs[FIRST_FRAME] = load_first_frame(sample.media, framing, draw)
        metadata = strip_inputs(sample.prompt.metadata, [*self.input_ndims, *self.images, *self.videos])
        return replace(sample.prompt, inputs=inputs, metadata=metadata)

    def _read_inputs(self, sample: Sample, framing: Framing, draw: Draw) -> dict[str, Floats]:
        is_image = sample.media.suffix in IMAGE_SUFFIXES
        frames, total = (range(self.num_frames), None) if is_image else clip_frames(sample.media, framing, draw)
        inputs: dict[str, Floats] = {}
        for name in self.input_ndims:
            with convert_input_errors(name, sample.media):
                if name == DOMAIN and self.domain is not None:
                    inputs[name] = self._read_domain(sample)
                elif name == ACTIONS and sample.rows is not None:
                    inputs[name] = self._read_episode_actions(sample, frames)
                else:
                    raw = read_raw_input(sample, name)
                    inputs[name] = self._select_frames(name, raw, frames, self.num_frames if total is None else total)
                if name == INTRINSICS:
                    inputs[name] = transform_intrinsics(inputs[name], sample.media, framing, draw)
        with convert_input_errors(next(iter(inputs)), sample.media):
            self.validate(inputs)
        return inputs

    def _load_image(self, sample: Sample, name: str, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
        """Return an input image, resized and cropped like the target, as uint8 [h,w,3].

        Raises BadMedia if the image is missing, damaged or the target itself.
        """
        file = self._find_media(sample, name)
        size = (framing.height, framing.width) if name == MASK else self.source_size(framing.height, framing.width)
        with convert_file_errors(name, sample.media):
            return load_image(file, replace(framing, height=size[0], width=size[1], num_frames=1, span=None), draw)

    def _load_video(self, sample: Sample, name: str, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
        """Return an input video, cut, resized and cropped like the target, as uint8 [F,H,W,3].

        Raises BadMedia if the video is missing, damaged or the target itself, or if its frames have other times than
        those of the target.
        """
        file, frames = self._find_media(sample, name), None
        framing = replace(framing, num_frames=framing.span or framing.num_frames, span=None)
        if sample.media.suffix not in IMAGE_SUFFIXES:
            seconds = frame_seconds(sample.media)
            frames = choose_frames(sample.media, seconds, framing, draw)
        with convert_file_errors(name, sample.media):
            if file.suffix in IMAGE_SUFFIXES:
                return load_pixels(file, framing, draw)[None]
            if frames is not None:
                require_equal_times(frame_seconds(file), seconds)
            return load_clip(file, framing, draw, frames)

    def _find_media(self, sample: Sample, name: str) -> Media:
        if not self.has_target and name == find_original([*self.images, *self.videos]):
            return sample.media
        with convert_input_errors(name, sample.media):
            file = find_input_media(sample, name)
            # MediaInputs.assign rejects such samples while scanning, but user kinds are not scanned by it.
            if self.has_target and sample.rejected is None and file == sample.media:
                raise ValueError(REASONS["same_file"])
        return file

    def _read_domain(self, sample: Sample) -> Floats:
        stored = sample.prompt.metadata.get(DOMAIN, self.domain)
        if stored != self.domain:
            raise ValueError(f"{stored} in the caption file, but data.domain is {self.domain}: remove one of them")
        return np.asarray(self.domain, np.float32)

    def _read_episode_actions(self, sample: Sample, frames: Sequence[int]) -> Floats:
        assert sample.rows is not None
        assert self.space is not None, "data.inputs has actions"
        assert isinstance(sample.media, EpisodeVideo)
        actions = self.space(sample.rows, [sample.media.first + frame for frame in frames])
        if not np.isfinite(actions).all():
            raise ValueError("contains NaN or infinite numbers")
        require_shape(actions, (len(frames) - 1, self.width))
        return actions if self.scaling is None else self.scaling(actions)

    def _select_frames(self, name: str, raw: Floats, frames: Sequence[int], total: int) -> Floats:
        if not np.isfinite(raw).all():
            raise ValueError("contains NaN or infinite numbers")
        if name == ACTIONS:
            require_shape(raw, (total - 1, self.width))
            selected = compose_actions(raw, frames, self.actions.compose, self.actions.rest)
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
    """Return the first frame of the clip that `load_pixels` decodes: float32 [H,W,3], 0 to 255. Raises BadMedia."""
    single = replace(framing, num_frames=1, span=framing.span or framing.num_frames)
    pixels = load_pixels(media, single, draw).astype(np.float32)
    return pixels if pixels.ndim == 3 else pixels[0]


@contextlib.contextmanager
def convert_input_errors(name: str, media: Media) -> Iterator[None]:
    try:
        yield
    except READ_ERRORS as error:
        raise BadMedia("bad_actions" if name == ACTIONS else "bad_input", media.name, f"{name}: {error}") from error


@contextlib.contextmanager
def convert_file_errors(name: str, media: Media) -> Iterator[None]:
    """Convert BadMedia of an input file, and ValueError, to BadMedia of the sample's image or video `media`."""
    try:
        yield
    except BadMedia as error:
        raise BadMedia("bad_input", media.name, f"{name}: {error.name}: {error.detail}") from error
    except ValueError as error:
        raise BadMedia("bad_input", media.name, f"{name}: {error}") from error


def require_equal_times(seconds: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> None:
    """Raise ValueError unless two videos have equal numbers of frames and, up to half a frame, equal frame times.

    seconds, expected: times of all frames of the input video and of the target.
    """
    if len(seconds) != len(expected):
        raise ValueError(f"has {len(seconds)} frames, the target has {len(expected)}")
    length = expected[-1] - expected[0]
    gap = np.abs((seconds - seconds[0]) - (expected - expected[0])).max()
    if 2 * gap * (len(expected) - 1) > length:
        raise ValueError(f"its frame times differ from the target's by up to {gap:.2f} s: use the same frame rate")


def require_shape(array: Floats, shape: tuple[int | None, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"shape {list(array.shape)}, expected {list(shape)} for the number of frames in this file")


def transform_intrinsics(intrinsics: Floats, media: Media, framing: Framing, draw: Draw) -> Floats:
    """Convert intrinsics [frames, 4] from pixels of the file to pixels of the cropped and resized frames."""
    box = crop_box(media_size(media), framing, framing.crop_position(draw))
    return crop_intrinsics(intrinsics, box, (framing.height, framing.width))


def strip_inputs(metadata: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the metadata without the inputs `names`.

    The object `camera` is removed as a whole if it contains one of the inputs.
    """
    camera = metadata.get(CAMERA_KEY)
    if isinstance(camera, dict) and any(name in camera and name not in metadata for name in names):
        names = [*names, CAMERA_KEY]
    return {key: value for key, value in metadata.items() if key not in names}
