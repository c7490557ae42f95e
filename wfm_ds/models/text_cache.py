"""Text embeddings, computed once per distinct text and kept on the host, and on disk if there is a store."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from wfm_ds.errors import DataError, ModelError
from wfm_ds.models.base import DiffusionModel, NegativeText
from wfm_ds.storage.tensor_store import TensorStore

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 2 << 30
Text: TypeAlias = str | NegativeText


class Precomputed(Protocol):
    """A text's embedding that came with the data."""

    def identity(self) -> Sequence[str | int]:
        """Changes when the embedding does. Raises OSError."""

    def load(self) -> Tensor:
        """[n, D], of some text encoder. Raises DataError."""


class TextCache:
    """Equals `model.encode_text` (`encode_negative` of a NegativeText) of each text alone, without encoding one twice
    while it is in the store, or among the most recently used."""

    def __init__(
        self,
        model: DiffusionModel,
        max_bytes: int = MAX_CACHE_BYTES,
        *,
        store: TensorStore | None = None,
        precomputed: Mapping[str, Precomputed] | None = None,
    ) -> None:
        """`precomputed`: embeddings by text, taken instead of encoding it where they are of the model's encoder."""
        self._model = model
        self._max_bytes = max_bytes
        self._store = store
        self._precomputed = precomputed or {}
        self._identity: dict[str, Any] = {} if store is None else model.text_identity()
        self._warned = False
        self._bytes = 0
        self._rows: OrderedDict[Text, dict[str, Tensor]] = OrderedDict()  # tensors [1, ...] on the host

    def encode(self, texts: Sequence[Text]) -> dict[str, Tensor]:
        """Conditioning of these texts in order, batch first, on the model's device."""
        fresh: dict[Text, dict[str, Tensor]] = {}
        for text in dict.fromkeys(texts):
            if text not in self._rows:
                # One by one: in a batch the last bits of a row depend on how many others are encoded with it, that is,
                # on what happens to be in the cache, and a continued run would differ from one that never stopped.
                fresh[text] = self._fetch(text)
        rows = {t: fresh.get(t) or self._rows[t] for t in dict.fromkeys(texts)}
        self._keep(rows)
        return {
            name: torch.cat([rows[t][name] for t in texts]).to(self._model.device) for name in next(iter(rows.values()))
        }

    def stored(self, text: Text) -> bool:
        """Return whether the store has it."""
        return self._store is not None and self._key(text) in self._store

    def _fetch(self, text: Text) -> dict[str, Tensor]:
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

    def _compute(self, text: Text) -> dict[str, Tensor]:
        if not self._model.parts_named("text_encoder"):
            raise ModelError(f"the cache on disk no longer has an embedding of {text!r}: start the run again")
        if isinstance(text, NegativeText):
            row = self._model.encode_negative([text.text])
        else:
            row = self._from_embedding(text) or self._model.encode_text([text])
        return {name: tensor.cpu() for name, tensor in row.items()}

    def _from_embedding(self, text: str) -> dict[str, Tensor] | None:
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

    def _keep(self, rows: dict[Text, dict[str, Tensor]]) -> None:
        """Mark these as the most recently used; drop the oldest when the memory does not hold all."""
        for text, row in rows.items():
            if self._rows.pop(text, None) is None:
                self._bytes += num_bytes(row)
            self._rows[text] = row
        while self._bytes > self._max_bytes and len(self._rows) > 1:
            _, oldest = self._rows.popitem(last=False)
            self._bytes -= num_bytes(oldest)


def num_bytes(row: dict[str, Tensor]) -> int:
    return sum(t.nbytes for t in row.values())
