"""Read the stored inputs of samples: .npy files, numbers in caption files, actions of episodes, images and videos."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import PurePosixPath

import numpy as np

from wfm_ds.data.action_space import ActionSpace
from wfm_ds.data.samples import IMAGE_SUFFIXES, MEDIA_SUFFIXES, LocalFile, Media, RemoteFile, Sample
from wfm_ds.data.trajectories import ACTIONS, Floats, read_npy, to_float32
from wfm_ds.recipe.actions import ActionsRecipe
from wfm_ds.types import VIDEO_INPUTS

READ_ERRORS = (OSError, ValueError, KeyError)
CAMERA_KEY = "camera"


def read_actions(sample: Sample, actions: ActionsRecipe) -> Floats:
    """Return a sample's actions [F-1, numbers per action] between the neighbouring frames of its F frames.

    If the sample is a recorded episode, they are computed from its features as `actions` specifies. Otherwise, they are
    read from the caption file or an .npy file. Raises KeyError, OSError or ValueError if this is not possible.
    """
    if sample.rows is None:
        return read_raw_input(sample, ACTIONS)
    rows, space = sample.rows, ActionSpace.from_recipe(actions)
    return space(rows, range(space.count_frames(rows)))


def read_raw_input(sample: Sample, name: str) -> Floats:
    """Return the input `name` for all frames of the file, as float32. Raises KeyError, OSError or ValueError."""
    camera = sample.prompt.metadata.get(CAMERA_KEY)
    mappings = [sample.prompt.metadata, *([camera] if isinstance(camera, dict) else [])]
    value = next((mapping[name] for mapping in mappings if name in mapping), None)
    if value is None:
        raise ValueError("missing in the caption file")
    if isinstance(value, str):
        with find_sibling_file(sample, value, {".npy"}).open() as file:
            return read_npy(file)
    return to_float32(np.asarray(value))


def input_suffixes(name: str) -> frozenset[str]:
    """Return the allowed file suffixes of an input image or video. An input video may be an image, for one frame."""
    return MEDIA_SUFFIXES if name in VIDEO_INPUTS else IMAGE_SUFFIXES


def find_input_media(sample: Sample, name: str) -> Media:
    """Return the file of the input image or video `name`, which the data set or the caption file names.

    Raises ValueError or FileNotFoundError if there is none.
    """
    if name in sample.images:
        return sample.images[name]
    value = sample.prompt.metadata.get(name)
    if not isinstance(value, str):
        raise ValueError("missing in the caption file")
    return find_sibling_file(sample, value, input_suffixes(name))


def find_sibling_file(sample: Sample, name: str, suffixes: Collection[str]) -> Media:
    """Return the file `name` in the sample's folder or tar. Raises ValueError or FileNotFoundError.

    suffixes: allowed file suffixes in lower case.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix.lower() not in suffixes:
        kinds = {IMAGE_SUFFIXES: "an image", MEDIA_SUFFIXES: "an image or video"}
        kind = kinds.get(frozenset(suffixes)) or f"an {' or '.join(suffixes)}"
        raise ValueError(f"{name} is not {kind} file below the folder of the image or video")
    if name in sample.files:
        return sample.files[name]
    media = sample.media
    if isinstance(media, LocalFile):
        return LocalFile(os.path.normpath(os.path.join(os.path.dirname(media.file), name)))
    if isinstance(media, RemoteFile):
        return RemoteFile(f"{media.address.rpartition('/')[0]}/{name}")
    raise FileNotFoundError(f"{name} not found next to {media.name}")
