"""Diversity: the mean distance between the embeddings of samples with the same prompt and different seeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from wfm_ds.errors import ModelError
from wfm_ds.evaluation.paired_statistics import Array

if TYPE_CHECKING:
    import torch

DINO_MODEL = "facebook/dinov2-base"
SIDE = 32  # height and width of downscaled images
NUM_FRAMES = 3  # of a video: first, middle, last

Frames = npt.NDArray[np.uint8]


class PixelEmbedder:
    """Embeds an image or video as the vector of the pixels of its downscaled frames.

    The distance between two vectors is the root mean square difference of the pixels, from 0 to 1.
    """

    name = f"RGB at {SIDE} x {SIDE}"

    def embed(self, frames: Frames) -> Array:
        """Embed an image or video, uint8 [T frames, H, W, 3], as a vector [D numbers]."""
        small = [Image.fromarray(frame).resize((SIDE, SIDE), Image.Resampling.BOX) for frame in select_frames(frames)]
        pixels: Array = np.stack([np.asarray(image, np.float64) / 255 for image in small]).ravel()
        return pixels / float(np.sqrt(len(pixels)))


class DinoEmbedder:
    """Embeds frames as the normalized class tokens of DINOv2 (arXiv 2304.07193)."""

    def __init__(self, address: str, device: torch.device) -> None:
        """address: a model folder, or the Hub id of a cached model. Raises ModelError if the model cannot be loaded."""
        from transformers import AutoModel
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        self.name, self._device = f"features of {Path(address).name}", device
        try:
            self._processor = AutoImageProcessor.from_pretrained(address, local_files_only=True)
            self._model = AutoModel.from_pretrained(address, local_files_only=True).to(device).eval()
        except (OSError, ValueError) as error:
            raise ModelError(
                f"--diversity {address} cannot be loaded ({' '.join(str(error).split())[:200]}): use a folder with an "
                f"image model of transformers, or run: hf download {DINO_MODEL}"
            ) from error

    def embed(self, frames: Frames) -> Array:
        import torch

        inputs = self._processor(
            images=[Image.fromarray(frame) for frame in select_frames(frames)], return_tensors="pt"
        )
        with torch.inference_mode():
            tokens = self._model(**inputs.to(self._device)).last_hidden_state[:, 0]  # [T, D]
        vectors = torch.nn.functional.normalize(tokens.double(), dim=-1) / len(tokens) ** 0.5
        embedding: Array = vectors.flatten().cpu().numpy()
        return embedding


SampleEmbedder: TypeAlias = PixelEmbedder | DinoEmbedder
"""Embeds images and videos as vectors.

The more two samples differ, the larger is the Euclidean distance of their vectors.
"""


def load_embedder(choice: str, device: torch.device) -> SampleEmbedder:
    """Load the embedder that the option `--diversity` names: `rgb`, `auto`, a model folder or a Hub id.

    `auto` selects DINOv2 if it is in the Hub cache, otherwise `rgb`. Raises ModelError if the model cannot be loaded.
    """
    if choice == "auto":
        from huggingface_hub import try_to_load_from_cache

        choice = DINO_MODEL if isinstance(try_to_load_from_cache(DINO_MODEL, "model.safetensors"), str) else "rgb"
    return PixelEmbedder() if choice == "rgb" else DinoEmbedder(choice, device)


def select_frames(frames: Frames) -> list[Frames]:
    indices = sorted({round(k * (len(frames) - 1) / (NUM_FRAMES - 1)) for k in range(NUM_FRAMES)})
    return [frames[index] for index in indices]


def prompt_diversity(vectors: Sequence[Array | None], num_seeds: int) -> Array:
    """Return the mean pairwise distance between the samples of each prompt, [P prompts].

    NaN if fewer than two are valid.

    vectors: embedding [D] of each sample, or None for a failed sample. The samples are ordered by prompt.
    """
    means = []
    for first in range(0, len(vectors), num_seeds):
        valid = [vector for vector in vectors[first : first + num_seeds] if vector is not None]
        distances = [float(np.linalg.norm(one - other)) for one, other in itertools.combinations(valid, 2)]
        means.append(np.mean(distances) if distances else np.nan)
    return np.array(means, np.float64)
