"""Diversity: how far apart the samples of one prompt are, seed from seed, as an eye sees them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from wfm_ds.errors import ModelError
from wfm_ds.evaluation.paired import Array

if TYPE_CHECKING:
    import torch

DINO = "facebook/dinov2-base"
SIDE = 32  # pixels of a reduced picture
NUM_FRAMES = 3  # of a video: first, middle, last

Frames = npt.NDArray[np.uint8]


class Eye(Protocol):
    """A view of media as vectors whose Euclidean distance tells how much they differ."""

    name: str

    def vector(self, frames: Frames) -> Array:
        """Vector [D] of an image or video [T,H,W,3]."""
        ...


class SmallPictures:
    """Pixels of the reduced picture: a distance is the root mean square of what they differ by, 0 to 1."""

    name = f"RGB at {SIDE} x {SIDE}"

    def vector(self, frames: Frames) -> Array:
        small = [Image.fromarray(frame).resize((SIDE, SIDE), Image.Resampling.BOX) for frame in shown(frames)]
        pixels: Array = np.stack([np.asarray(picture, np.float64) / 255 for picture in small]).ravel()
        return pixels / float(np.sqrt(len(pixels)))


class Dino:
    """Features of a DINOv2 (arXiv 2304.07193): the class token, of length 1."""

    def __init__(self, address: str, device: torch.device) -> None:
        """`address`: a folder, or a name on the hub that is in its cache. Raises ModelError."""
        from transformers import AutoImageProcessor, AutoModel

        self.name, self._device = f"features of {Path(address).name}", device
        try:
            self._processor = AutoImageProcessor.from_pretrained(address, local_files_only=True)
            self._model = AutoModel.from_pretrained(address, local_files_only=True).to(device).eval()
        except (OSError, ValueError) as error:
            raise ModelError(
                f"--diversity {address} cannot be loaded ({' '.join(str(error).split())[:200]}): name a folder with an "
                f"image model of transformers, or run: hf download {DINO}"
            ) from error

    def vector(self, frames: Frames) -> Array:
        import torch

        inputs = self._processor(images=[Image.fromarray(frame) for frame in shown(frames)], return_tensors="pt")
        with torch.inference_mode():
            tokens = self._model(**inputs.to(self._device)).last_hidden_state[:, 0]  # [T, D]
        vectors = torch.nn.functional.normalize(tokens.double(), dim=-1) / len(tokens) ** 0.5
        found: Array = vectors.flatten().cpu().numpy()
        return found


def open_eye(choice: str, device: torch.device) -> Eye:
    """Return what `--diversity` names: `rgb`, `auto` (DINOv2 if the hub's cache has it, else rgb), or an address of an
    image model. Raises ModelError."""
    if choice == "auto":
        from huggingface_hub import try_to_load_from_cache

        choice = DINO if isinstance(try_to_load_from_cache(DINO, "model.safetensors"), str) else "rgb"
    return SmallPictures() if choice == "rgb" else Dino(choice, device)


def shown(frames: Frames) -> list[Frames]:
    """The frames that are looked at."""
    places = sorted({round(k * (len(frames) - 1) / (NUM_FRAMES - 1)) for k in range(NUM_FRAMES)})
    return [frames[place] for place in places]


def diversity(vectors: Sequence[Array | None], num_seeds: int) -> Array:
    """Mean distance of two samples of each prompt, [P]; NaN with fewer than two. None: a sample that is none."""
    found = []
    for first in range(0, len(vectors), num_seeds):
        known = [vector for vector in vectors[first : first + num_seeds] if vector is not None]
        distances = [float(np.linalg.norm(one - other)) for one, other in itertools.combinations(known, 2)]
        found.append(np.mean(distances) if distances else np.nan)
    return np.array(found, np.float64)
