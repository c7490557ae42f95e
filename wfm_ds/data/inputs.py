"""Conditioning data beside a medium, as `data.inputs` names it: found, read, and cut as the clip is.

A value is a key of NAME.json, or one of its map `camera`: a number, a list of numbers, or the name of an .npy file
below the folder of the medium. `actions` [N-1,D] move frame i to i + 1, `c2w` [N,4,4] and `intrinsics` [4] or [N,4] are
of the frames of the file, anything else is taken whole. A start that is an image has a trajectory of exactly a sample's
length. FIRST_FRAME is named by no recipe: models that are told the frame that a video begins with get it of the medium
itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Protocol

import numpy as np

from wfm_ds.data.media import clip_frames, load_media, media_size
from wfm_ds.data.npy import floats_of, read_npy
from wfm_ds.data.pixels import BadMedia, Draw, Framing, crop_box
from wfm_ds.data.samples import IMAGE_SUFFIXES, LocalFile, Media, Sample, StoredFile
from wfm_ds.data.trajectories import (
    ACTIONS,
    INTRINSICS,
    POSES,
    Floats,
    Scaling,
    composed,
    cropped_intrinsics,
    require_rigid,
)
from wfm_ds.recipe.data import ActionsRecipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.types import FIRST_FRAME, Prompt

READ_ERRORS = (OSError, ValueError, KeyError)
CAMERA = "camera"


class TakenInput(Protocol):
    """An input as a family states it (models/inputs.py)."""

    @property
    def rank(self) -> int: ...


class TellableModel(Protocol):
    """A model as far as it takes inputs (models/base.py)."""

    @property
    def takes(self) -> Mapping[str, TakenInput]: ...

    @property
    def pins_frames(self) -> bool: ...

    def encode_inputs(self, inputs: Sequence[Mapping[str, Floats]], num_frames: int, size: tuple[int, int], /) -> Any:
        """Raises ValueError for inputs that the family cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReader:
    """Reads what samples are told besides their text. Its methods may be called from any thread."""

    ranks: Mapping[str, int]  # of the inputs that data.inputs names
    num_frames: int  # of a sample
    actions: ActionsRecipe
    width: int | None  # numbers of an action; None: there are no actions
    scaling: Scaling | None
    check: Callable[[Mapping[str, Floats]], object]  # raises ValueError for inputs that the model cannot use
    first_frame: bool = False  # the model is told that too

    @classmethod
    def of(
        cls, recipe: Recipe, model: TellableModel, *, width: int | None, scaling: Scaling | None
    ) -> InputReader | None:
        """Return the reader of a recipe's inputs, which the model takes; None if it is told none. width, scaling: see
        actions.py."""
        first_frame = recipe.algorithm.num_conditional_frames[1] > 0 and not model.pins_frames
        if not (recipe.data.inputs or first_frame):
            return None
        size = recipe.sampling
        return cls(
            ranks={name: model.takes[name].rank for name in recipe.data.inputs},
            num_frames=size.num_frames,
            actions=recipe.data.actions,
            width=width,
            scaling=scaling,
            check=lambda told: model.encode_inputs([told], size.num_frames, (size.height, size.width)),
            first_frame=first_frame,
        )

    def prompt(self, sample: Sample, framing: Framing, draw: Draw) -> Prompt:
        """Return the sample's prompt with the inputs of the clip that `load_media` cuts of its medium with the same
        framing and draw. Raises BadMedia: `bad_actions`, `bad_input`, and what the medium is refused for."""
        found = self._named(sample, framing, draw) if self.ranks else {}
        if self.first_frame:
            found[FIRST_FRAME] = first_frame(sample.media, framing, draw)
        metadata = without_inputs(sample.prompt.metadata, list(self.ranks))
        return replace(sample.prompt, inputs=found, metadata=metadata)

    def _named(self, sample: Sample, framing: Framing, draw: Draw) -> dict[str, Floats]:
        """The inputs that data.inputs names."""
        is_image = sample.media.suffix in IMAGE_SUFFIXES
        frames, total = (range(self.num_frames), None) if is_image else clip_frames(sample.media, framing, draw)
        found: dict[str, Floats] = {}
        for name in self.ranks:
            with refusing(name, sample.media):
                raw = raw_input(sample, name)
                found[name] = self._cut(name, raw, frames, self.num_frames if total is None else total)
                if name == INTRINSICS:
                    found[name] = framed_intrinsics(found[name], sample.media, framing, draw)
        with refusing(next(iter(found)), sample.media):
            self.check(found)
        return found

    def _cut(self, name: str, raw: Floats, frames: Sequence[int], total: int) -> Floats:
        """Raises ValueError for an array of another size, or that is not finite."""
        if not np.isfinite(raw).all():
            raise ValueError("it has NaN or infinite numbers")
        if name == ACTIONS:
            require(raw, (total - 1, self.width))
            cut = composed(raw, frames, self.actions.compose)
            return cut if self.scaling is None else self.scaling(cut)
        if name == POSES:
            require(raw, (total, 4, 4))
            require_rigid(raw)
            return raw[list(frames)]
        if name == INTRINSICS:
            raw = np.broadcast_to(raw, (total, 4)) if raw.shape == (4,) else raw
            require(raw, (total, 4))
            return raw[list(frames)]
        if raw.ndim != self.ranks[name]:
            raise ValueError(f"it has {raw.ndim} axes, and the model takes {self.ranks[name]}")
        return raw


def first_frame(media: Media, framing: Framing, draw: Draw) -> Floats:
    """Decode the first frame that `load_media` cuts with the same framing and draw: levels [H,W,3], 0 to 255. Raises
    BadMedia as it does."""
    alone = replace(framing, num_frames=1, span=framing.span or framing.num_frames)
    pixels = load_media(media, alone, draw).astype(np.float32)
    return pixels if pixels.ndim == 3 else pixels[0]


@contextlib.contextmanager
def refusing(name: str, media: Media) -> Iterator[None]:
    """Turn what an input that cannot be used raises in the block into BadMedia."""
    try:
        yield
    except READ_ERRORS as error:
        raise BadMedia("bad_actions" if name == ACTIONS else "bad_input", media.name, f"{name}: {error}") from error


def require(array: Floats, shape: tuple[int | None, ...]) -> None:
    """Raises ValueError unless the array has this shape."""
    if array.shape != shape:
        raise ValueError(f"it is {list(array.shape)}, and must be {list(shape)} for this file's number of frames")


def framed_intrinsics(intrinsics: Floats, media: Media, framing: Framing, draw: Draw) -> Floats:
    """Return intrinsics of the file's pixels as those of the framed ones."""
    height, width = media_size(media)
    box = crop_box((height, width), framing, framing.place(draw))
    return cropped_intrinsics(intrinsics, box, (framing.height, framing.width))


def raw_input(sample: Sample, name: str) -> Floats:
    """Read one input as it is stored. Raises KeyError, OSError or ValueError."""
    camera = sample.prompt.metadata.get(CAMERA)
    places = [sample.prompt.metadata, *([camera] if isinstance(camera, dict) else [])]
    value = next((place[name] for place in places if name in place), None)
    if value is None:
        raise ValueError("its caption file does not have it")
    if isinstance(value, str):
        with beside(sample, value).open() as file:
            return read_npy(file)
    return floats_of(np.asarray(value))


def beside(sample: Sample, name: str) -> Media:
    """Return the file of this name below the folder of the medium, or among those of its tar. Raises ValueError for a
    name that leads elsewhere, OSError where there is no such place."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name.endswith(".npy"):
        raise ValueError(f"{name} is not the name of an .npy file beside the medium")
    if name in sample.files:
        return sample.files[name]
    media = sample.media
    if isinstance(media, LocalFile):
        return LocalFile(os.path.join(os.path.dirname(media.file), name))
    if isinstance(media, StoredFile):
        return StoredFile(f"{media.address.rpartition('/')[0]}/{name}")
    raise FileNotFoundError(f"{name} is not beside {media.name}")


def without_inputs(metadata: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the metadata that travels to the rewards: inputs go by their own way, and so does a map `camera` that
    one of them was read from."""
    camera = metadata.get(CAMERA)
    read = (
        [CAMERA] if isinstance(camera, dict) and any(name in camera and name not in metadata for name in names) else []
    )
    return {key: value for key, value in metadata.items() if key not in (*names, *read)}
