"""Text embeddings, computed once per distinct text: the last ones kept on the device, more on the host, all on disk if
there is a store."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from wfm_ds.errors import DataError, ModelError
from wfm_ds.models.base import DiffusionModel, NegativeText
from wfm_ds.models.captions import Text
from wfm_ds.models.text_store import opened
from wfm_ds.pinned import on_device
from wfm_ds.storage.tensor_store import TensorStore

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 2 << 30
MAX_DEVICE_BYTES = 512 << 20  # the texts of an RL step: 190 of SD3, 120 of Wan
Row: TypeAlias = dict[str, Tensor]
"""Tensors [1, ...] of one text."""


class Precomputed(Protocol):
    """A text's embedding that came with the data."""

    def identity(self) -> Sequence[str | int]:
        """Changes when the embedding does. Raises OSError."""

    def load(self) -> Tensor:
        """[n, D], of some text encoder. Raises DataError."""


class Rows:
    """The most recently used rows that `max_bytes` hold, and always the last one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._rows: OrderedDict[Text, Row] = OrderedDict()

    def get(self, text: Text) -> Row | None:
        """The row of this text, from now on the most recently used; None if it is not kept."""
        if text in self._rows:
            self._rows.move_to_end(text)
        return self._rows.get(text)

    def keep(self, rows: Mapping[Text, Row]) -> None:
        """Keep these too; drop the least recently used when the memory does not hold all."""
        for text, row in rows.items():
            self._bytes += num_bytes(row)
            self._rows[text] = row
        while self._bytes > self._max_bytes and len(self._rows) > 1:
            _, oldest = self._rows.popitem(last=False)
            self._bytes -= num_bytes(oldest)

    def __contains__(self, text: Text) -> bool:
        return text in self._rows


class TextCache:
    """Equals `model.encode_text` (`encode_negative` of a NegativeText) of each text alone, without encoding one twice
    while it is in the store, or among the most recently used."""

    def __init__(
        self,
        model: DiffusionModel,
        max_bytes: int = MAX_CACHE_BYTES,
        *,
        max_device_bytes: int = MAX_DEVICE_BYTES,
        store: TensorStore | None = None,
        precomputed: Mapping[str, Precomputed] | None = None,
    ) -> None:
        """`precomputed`: embeddings by text, taken instead of encoding it where they are of the model's encoder."""
        self._model = model
        self._store, self._max_bytes = store, max_bytes
        self._precomputed = precomputed or {}
        self._identity: dict[str, Any] = {} if store is None else model.text_identity()
        self._warned = False
        self._on_host, self._on_device = Rows(max_bytes), Rows(max_device_bytes)

    def encode(self, texts: Sequence[Text]) -> dict[str, Tensor]:
        """Conditioning of these texts in order, batch first, on the model's device."""
        rows = self._rows(dict.fromkeys(texts))
        return self._model.stack([rows[text] for text in texts])

    def prepare(self, texts: Iterable[Text]) -> None:
        """Run the text encoders on those of these texts that nobody has encoded, up to half of the memory for texts:
        the encoders wait for the device, and `encode` then need not, where waiting costs more."""
        if not self._model.text_parts():
            return
        room = self._max_bytes / 2  # the other half is for texts that are there already
        for text in dict.fromkeys(texts):
            if text in self._on_host or text in self._on_device or self.stored(text):
                continue
            room -= num_bytes(self._host_rows([text])[text])
            if room <= 0:
                return

    def _rows(self, texts: Iterable[Text]) -> dict[Text, Row]:
        """The rows of distinct texts, on the model's device."""
        device = self._model.device
        if device.type == "cpu":
            return self._host_rows(texts)
        kept = {text: self._on_device.get(text) for text in texts}
        rows = self._host_rows([text for text, row in kept.items() if row is None])
        fresh = {text: {name: on_device(tensor, device) for name, tensor in row.items()} for text, row in rows.items()}
        self._on_device.keep(fresh)
        return {text: row or fresh[text] for text, row in kept.items()}

    def _host_rows(self, texts: Iterable[Text]) -> dict[Text, Row]:
        kept = {text: self._on_host.get(text) for text in texts}
        # One by one: in a batch the last bits of a row depend on how many others are encoded with it, that is, on what
        # happens to be in the cache, and a continued run would differ from one that never stopped.
        fresh = {text: self._fetch(text) for text, row in kept.items() if row is None}
        self._on_host.keep(fresh)
        return {text: row or fresh[text] for text, row in kept.items()}

    @property
    def folder(self) -> Path | None:
        """The folder that embeddings are kept in; None: in memory alone."""
        return None if self._store is None else self._store.folder

    def opened(self, *, required: bool) -> bool:
        """Make that folder, and note that it is in use, as text_store.opened does."""
        assert self._store is not None
        return opened(self._store, required=required)

    def stored(self, text: Text) -> bool:
        """Return whether the store has it."""
        return self._store is not None and self._key(text) in self._store

    def _fetch(self, text: Text) -> Row:
        if self._store is None:
            return self._compute(text)
        row = self._store.read(self._key(text))
        if row is None:
            row = self._compute(text)
            self._store.write(self._key(text), row)
        return row

    def _key(self, text: Text) -> dict[str, Any]:
        if isinstance(text, NegativeText):
            return {**self._identity, "negative": True, "text": text.text}
        key = {**self._identity, "negative": False, "text": text}
        if text in self._precomputed:
            key["embedding"] = list(self._precomputed[text].identity())
        return key

    def _compute(self, text: Text) -> Row:
        if not self._model.text_parts():
            raise ModelError(f"the cache on disk no longer has an embedding of {text!r}: start the run again")
        self._model.move_text_encoders(self._model.device)  # a rollout worker keeps them on the host till then
        if isinstance(text, NegativeText):
            row = self._model.encode_negative([text.text])
        else:
            row = self._from_embedding(text) or self._model.encode_text([text])
        return {name: tensor.cpu() for name, tensor in row.items()}

    def _from_embedding(self, text: str) -> Row | None:
        if text not in self._precomputed:
            return None
        try:
            embedding = self._precomputed[text].load()
        except DataError as error:
            log.warning("%s; the caption is encoded instead", error)
            return None
        row = self._model.from_embedding(embedding)
        if row is None and not self._warned:
            self._warned = True
            log.warning(
                "text embeddings of shape %s, as they come with the data, are not those of this model's text encoder: "
                "captions are encoded instead",
                list(embedding.shape),
            )
        return row


def num_bytes(row: Row) -> int:
    return sum(t.nbytes for t in row.values())
