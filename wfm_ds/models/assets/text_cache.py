"""Formats and encodes texts, and caches their embeddings in device memory, in host memory and, optionally, on disk."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from wfm_ds.errors import DataError, ModelError
from wfm_ds.models.base import DiffusionModel, NegativeText, TextWithImages
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.shared_defaults import user_cache_folder
from wfm_ds.storage.tensor_store import TensorStore, canonical_json
from wfm_ds.tensor_memory import TensorLru, TensorRow, copy_to_device, num_bytes
from wfm_ds.types import Prompt


@dataclass(frozen=True, slots=True)
class ViewpointText:
    """A prompt with the position of the camera (data.viewpoint)."""

    text: str
    viewpoint: str


FormattedText: TypeAlias = str | NegativeText
Text: TypeAlias = FormattedText | TextWithImages
PromptText: TypeAlias = FormattedText | ViewpointText
log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 2 << 30
MAX_DEVICE_BYTES = 512 << 20  # fits the texts of an RL step: 190 texts for SD3, 120 for Wan

TEXT_FOLDER = "text"  # folder name in the user's cache and in data.cache_dir
LAST_USE_FILE = "opened"  # file in the folder; its mtime is when a run last opened the folder
UNUSED_S = 90 * 24 * 3600.0


def prompt_text(prompt: Prompt) -> PromptText:
    return prompt.text if prompt.viewpoint is None else ViewpointText(prompt.text, prompt.viewpoint)


def format_prompts(
    model: DiffusionModel, texts: Sequence[PromptText], size: tuple[int, int], num_frames: int
) -> list[FormattedText]:
    """Format prompts and negative prompts for this size (height, width) in pixels, as the diffusers pipeline does."""

    def format_text(text: PromptText) -> FormattedText:
        if isinstance(text, NegativeText):
            return NegativeText(model.format_prompt(text.text, *size, num_frames, negative=True))
        if isinstance(text, ViewpointText):
            return model.format_prompt(text.text, *size, num_frames, viewpoint=text.viewpoint)
        return model.format_prompt(text, *size, num_frames)

    return [format_text(text) for text in texts]


def require_viewpoints(model: DiffusionModel, size: SamplingRecipe, key: str) -> None:
    """Raise ModelError if the model's prompts cannot contain a viewpoint.

    key: recipe key or command-line option for the error message.
    """
    shape = (size.height, size.width, size.num_frames)
    if model.format_prompt("", *shape, viewpoint="wrist_view") == model.format_prompt("", *shape):
        raise ModelError(f"{key}: captions of {model.family} ({model.path}) do not mention the view: remove it")


class PrecomputedEmbedding(Protocol):
    """A text embedding that is stored with the training data."""

    def identity(self) -> Sequence[str | int]:
        """Return a key that changes when the embedding changes. Raises OSError if its file cannot be read."""

    def load(self) -> Tensor:
        """Load the embedding [tokens, channels], which may not fit the model. Raises DataError on failure."""


def identify_text(text: Text) -> Hashable:
    """Return a key that is equal for texts with equal embeddings, and does not keep their images in memory."""
    return (text.text, text.negative, text.digest) if isinstance(text, TextWithImages) else text


class EmbeddingLru:
    """A cache of text embeddings with a limited size. Images of texts are not kept."""

    def __init__(self, max_bytes: int) -> None:
        self._rows = TensorLru(max_bytes)

    def get(self, text: Text) -> TensorRow | None:
        return self._rows.get(identify_text(text))

    def put(self, rows: Mapping[Text, TensorRow]) -> None:
        self._rows.put({identify_text(text): row for text, row in rows.items()})

    def __contains__(self, text: Text) -> bool:
        return identify_text(text) in self._rows


class TextCache:
    """A cache of text embeddings in memory and, optionally, on disk.

    Each text is encoded separately, by `model.encode_negative_text` if it is a NegativeText, by
    `model.encode_text_with_images` if it has images, otherwise by `model.encode_text`.
    """

    def __init__(
        self,
        model: DiffusionModel,
        max_bytes: int = MAX_CACHE_BYTES,
        *,
        max_device_bytes: int = MAX_DEVICE_BYTES,
        store: TensorStore | None = None,
        precomputed: Mapping[str, PrecomputedEmbedding] | None = None,
    ) -> None:
        """precomputed: {text: embedding}. A text is encoded if its embedding is unreadable or does not fit."""
        self._model = model
        self._store, self._max_bytes = store, max_bytes
        self._precomputed = precomputed or {}
        self._identity: dict[str, Any] = {} if store is None else model.text_cache_key()
        self._warned = False
        self._on_host, self._on_device = EmbeddingLru(max_bytes), EmbeddingLru(max_device_bytes)

    def encode(self, texts: Sequence[Text]) -> dict[str, Tensor]:
        """Return {conditioning key: tensor [number of texts, ...]} on the model's device."""
        rows = self._device_rows(dict.fromkeys(texts))
        return self._model.stack_conditioning([rows[text] for text in texts])

    def prepare(self, texts: Iterable[Text]) -> None:
        """Encode texts that are not cached yet, so that `encode` rarely makes the host wait for the device.

        Stops when the new embeddings fill half of the host cache.
        """
        if not self._model.text_encoders():
            return
        free_bytes = self._max_bytes / 2  # the other half is for texts that are already cached
        for text in dict.fromkeys(texts):
            if text in self._on_host or text in self._on_device or self.is_stored(text):
                continue
            free_bytes -= num_bytes(self._host_rows([text])[text])
            if free_bytes <= 0:
                return

    def _device_rows(self, texts: Iterable[Text]) -> dict[Text, TensorRow]:
        device = self._model.device
        if device.type == "cpu":
            return self._host_rows(texts)
        cached = {text: self._on_device.get(text) for text in texts}
        rows = self._host_rows([text for text, row in cached.items() if row is None])
        new = {
            text: {name: copy_to_device(tensor, device) for name, tensor in row.items()} for text, row in rows.items()
        }
        self._on_device.put(new)
        return {text: row or new[text] for text, row in cached.items()}

    def _host_rows(self, texts: Iterable[Text]) -> dict[Text, TensorRow]:
        cached = {text: self._on_host.get(text) for text in texts}
        # Encode texts one by one. In a batch, the last bits of an embedding depend on the batch size, and thus on which
        # texts are cached already. A resumed run would then differ from an uninterrupted one.
        new = {text: self._load_or_encode(text) for text, row in cached.items() if row is None}
        self._on_host.put(new)
        return {text: row or new[text] for text, row in cached.items()}

    @property
    def folder(self) -> Path | None:
        return None if self._store is None else self._store.folder

    def open_folder(self, *, required: bool) -> bool:
        assert self._store is not None
        return open_store_folder(self._store, required=required)

    def is_stored(self, text: Text) -> bool:
        return self._store is not None and self._cache_key(text) in self._store

    def _load_or_encode(self, text: Text) -> TensorRow:
        if self._store is None:
            return self._encode_row(text)
        row = self._store.read(self._cache_key(text))
        if row is None:
            row = self._encode_row(text)
            self._store.write(self._cache_key(text), row)
        return row

    def _cache_key(self, text: Text) -> dict[str, Any]:
        if isinstance(text, NegativeText):
            return {**self._identity, "negative": True, "text": text.text}
        if isinstance(text, TextWithImages):
            return {**self._identity, "negative": text.negative, "text": text.text, "images": text.digest}
        key = {**self._identity, "negative": False, "text": text}
        if text in self._precomputed:
            key["embedding"] = list(self._precomputed[text].identity())
        return key

    def _encode_row(self, text: Text) -> TensorRow:
        if not self._model.text_encoders():
            raise ModelError(f"the embedding of {text!r} was removed from the disk cache: restart the run")
        self._model.move_text_encoders(self._model.device)  # rollout workers keep them on the host until needed
        if isinstance(text, TextWithImages):
            row = self._model.encode_text_with_images(text)
        elif isinstance(text, NegativeText):
            row = self._model.encode_negative_text([text.text])
        else:
            row = self._convert_precomputed(text) or self._model.encode_text([text])
        return {name: tensor.cpu() for name, tensor in row.items()}

    def _convert_precomputed(self, text: str) -> TensorRow | None:
        if text not in self._precomputed:
            return None
        try:
            embedding = self._precomputed[text].load()
        except DataError as error:
            log.warning("%s; encoding the caption instead", error)
            return None
        row = self._model.conditioning_from_embedding(embedding)
        if row is None and not self._warned:
            self._warned = True
            log.warning(
                "text embeddings of shape %s in the data do not fit this model: the captions are encoded instead",
                list(embedding.shape),
            )
        return row


def create_text_store(recipe: Recipe, model: DiffusionModel) -> TensorStore | None:
    """Return the disk store for this model's text embeddings, or None if the recipe disables it or streams data.

    Embeddings that depend on images are stored only in data.cache_dir: they are large, and no other run needs them.
    """
    if recipe.data.cache_dir is not None:
        return TensorStore(recipe.data.cache_dir / TEXT_FOLDER)
    if recipe.data.cache_text == "off" or recipe.data.streaming or model.text_inputs:
        return None  # the number of texts in a stream is unknown
    # A hash of everything that text embeddings depend on, except the text.
    settings = {**model.text_cache_key(), "device": model.device.type, "torch": torch.__version__}
    key = hashlib.sha256(canonical_json(settings).encode()).hexdigest()[:24]
    return TensorStore(user_cache_folder() / TEXT_FOLDER / key)


def open_store_folder(store: TensorStore, *, required: bool) -> bool:
    """Create the store's folder and record its use. Return whether this succeeded.

    If the folder cannot be written, raises DataError if `required` is set, and otherwise logs a warning.
    """
    try:
        store.folder.mkdir(parents=True, exist_ok=True)
        (store.folder / LAST_USE_FILE).touch()
    except OSError as error:
        reason = f"{store.folder} cannot be written ({error.strerror})"
        if required:
            raise DataError(f"{reason}: set data.cache_dir to a writable folder") from error
        log.warning("%s: embeddings and text encoders stay in memory; set WFM_CACHE or data.cache_dir", reason)
        return False
    return True


def remove_unused_folders(now_s: float) -> None:
    """Remove the embedding folders in the user's cache that no run has opened for UNUSED_S seconds.

    now_s: current Unix time in seconds.
    """
    for last_use in (user_cache_folder() / TEXT_FOLDER).glob(f"*/{LAST_USE_FILE}"):
        try:
            if now_s - last_use.stat().st_mtime > UNUSED_S:
                log.info("%s: unused for %d days, removed", last_use.parent, UNUSED_S // 86400)
                shutil.rmtree(last_use.parent)
        except FileNotFoundError:  # another run removed it at the same time
            continue
        except OSError as error:
            log.warning("%s is unused but cannot be removed (%s)", last_use.parent, error.strerror)
