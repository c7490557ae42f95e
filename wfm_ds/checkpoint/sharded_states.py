"""Reads the training states in a checkpoint, for any number of ranks and any ZeRO stage. Does not need DeepSpeed.

The metadata of each rank's file lists the slice of each parameter in the file's flat tensors.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wfm_ds.engine.shards import ShardSlice, adapter_state_name
from wfm_ds.errors import UserError
from wfm_ds.storage.filesystem import shorten_error, shorten_path
from wfm_ds.types import DEFAULT_ADAPTER

READ_ERRORS = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
Layout = Mapping[str, ShardSlice]
"""{parameter name: position of its slice in a rank's flat tensors}."""


Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
StoredSlice = tuple[Count, Count, Count, Count]


class StoredExport(BaseModel):
    """The export settings in a checkpoint: the fields of ExportTarget, the dtype, and the PEFT settings in `lora`.

    `lora` is None after full training.
    """

    base: str = ""
    parts: list[str] = []
    call: dict[str, Any] = {}
    frozen: list[str] = []
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    lora: dict[str, Any] | None = None


class RankMetadata(BaseModel):
    engine: dict[str, Annotated[int, Field(strict=True)]]
    loop: dict[str, Any]
    layout: dict[str, StoredSlice]
    adapter_layouts: dict[str, dict[str, StoredSlice]] = {}  # {extra adapter: layout of its parameters}
    export: StoredExport = StoredExport()


def rank_file_name(rank: int) -> str:
    return f"wfm_rank{rank:05d}.safetensors"


def flat_name(state: str, group: int) -> str:
    return f"{state}.{group}"


def full_state_name(adapter: str, state: str) -> str:
    return state if adapter == DEFAULT_ADAPTER else adapter_state_name(adapter, state)


def layout_to_json(layout: Layout) -> dict[str, list[int]]:
    return {name: list(astuple(piece)) for name, piece in layout.items()}


class ShardedStates:
    """The files of all ranks of a checkpoint. In full training, pass `default` for the argument `adapter`."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        self._exit_stack = contextlib.ExitStack()
        self._files: dict[int, Any] = {}
        self._metadata: dict[int, RankMetadata] = {}
        self._layouts: dict[tuple[int, str], dict[str, ShardSlice]] = {}

    def __enter__(self) -> ShardedStates:
        return self

    def __exit__(self, *error: object) -> None:
        self._exit_stack.close()

    def read_metadata(self, rank: int) -> RankMetadata:
        """Return the metadata of a rank's file.

        Raises UserError if the file cannot be read, or if its step differs from the step of rank 0's file.
        """
        if rank in self._metadata:
            return self._metadata[rank]
        with self._translate_errors(rank):
            values = {name: json.loads(text) for name, text in self._open_file(rank).metadata().items()}
            metadata = RankMetadata.model_validate(values)
        first = metadata if rank == 0 else self.read_metadata(0)
        if (metadata.engine, metadata.loop.get("step")) != (first.engine, first.loop.get("step")):
            raise UserError(
                f"{self.folder}: {rank_file_name(rank)} is from step {metadata.loop.get('step')}, but "
                f"{rank_file_name(0)} is from step {first.loop.get('step')}: copy the checkpoint again, or use another"
            )
        self._metadata[rank] = metadata
        return metadata

    def read_layout(self, rank: int, adapter: str = DEFAULT_ADAPTER) -> Layout:
        if (rank, adapter) not in self._layouts:
            metadata = self.read_metadata(rank)
            with self._translate_errors(rank):
                layout = metadata.layout if adapter == DEFAULT_ADAPTER else metadata.adapter_layouts[adapter]
            self._layouts[rank, adapter] = {name: ShardSlice(*numbers) for name, numbers in layout.items()}
        return self._layouts[rank, adapter]

    def parameter_sizes(self, adapter: str = DEFAULT_ADAPTER) -> dict[str, int]:
        """Return {parameter: number of elements in the files of all ranks}."""
        sizes: dict[str, int] = {}
        for rank in range(self.num_ranks):
            for name, piece in self.read_layout(rank, adapter).items():
                sizes[name] = sizes.get(name, 0) + piece.numel
        return sizes

    def gather_states(
        self, layout: Layout, lengths: Sequence[int], rank: int, adapter: str = DEFAULT_ADAPTER
    ) -> dict[str, list[Tensor]]:
        """Read the ranks' files and return {state: [flat float32 CPU tensor of each optimizer group]}.

        layout: position of each parameter in the returned tensors. lengths: number of elements of each returned tensor.
        Elements that belong to no parameter are 0. rank: rank of the file to read first, because it may have the
        requested layout. A state that is a single number, such as AdamW's step, is returned as this number for each
        group. Raises UserError if a file cannot be read or contains different parameters.
        """
        ranks: Sequence[int] = [rank]
        if self.read_layout(rank, adapter) != layout:
            ranks = range(self.num_ranks)
            if differing := sorted(self.parameter_sizes(adapter).keys() ^ layout.keys()):
                raise UserError(
                    f"{self.folder} has other trained weights than this run, e.g. {differing[0]}: it is from another "
                    "model, or from a version that trained other weights"
                )
        flats: dict[str, list[Tensor]] = {}
        for state in self.state_names(adapter):
            number = self._read_number(full_state_name(adapter, state))
            if number is not None:
                flats[state] = [number.clone() for _ in lengths]
                continue
            flats[state] = [torch.zeros(length) for length in lengths]
            for name, piece in layout.items():
                out = flats[state][piece.group][piece.flat_start : piece.flat_start + piece.numel]
                self._read_elements(out, state, name, piece.parameter_start, ranks, adapter)
        return flats

    def read_parameter(self, state: str, name: str, shape: Sequence[int]) -> Tensor:
        """Return one state of a parameter as a float32 CPU tensor, assembled from the files of all ranks.

        Raises UserError if a file cannot be read, or if the number of elements does not match `shape`.
        """
        tensor = torch.zeros(math.prod(shape))
        try:
            self._read_elements(tensor, state, name, 0, range(self.num_ranks))
        finally:
            self._close_files()
        return tensor.view(*shape)

    def state_names(self, adapter: str = DEFAULT_ADAPTER) -> list[str]:
        """Return the names of an adapter's states: `train`, the other policies, and `optimizer.NAME` for each optimizer
        state.
        """
        with self._translate_errors(0):
            names = self._open_file(0).keys()
            stored_names = {name.rpartition(".")[0] for name in names}
        prefixes = {name: adapter_state_name(name, "") for name in self.read_metadata(0).adapter_layouts}
        if adapter in prefixes:
            prefix = prefixes[adapter]
            return sorted(name.removeprefix(prefix) for name in stored_names if name.startswith(prefix))
        return sorted(name for name in stored_names if not name.startswith(tuple(prefixes.values())))

    def _read_elements(
        self,
        out: Tensor,
        state: str,
        name: str,
        start: int,
        ranks: Sequence[int],
        adapter: str = DEFAULT_ADAPTER,
    ) -> None:
        count = 0
        for rank in ranks:
            piece = self.read_layout(rank, adapter).get(name)
            if piece is None:
                break
            low, high = max(start, piece.parameter_start), min(start + len(out), piece.parameter_start + piece.numel)
            if low < high:
                offset = piece.flat_start - piece.parameter_start
                with self._translate_errors(rank):
                    flat = self._open_file(rank).get_slice(flat_name(full_state_name(adapter, state), piece.group))
                    out[low - start : high - start] = flat[low + offset : high + offset]
                count += high - low
        if count != len(out):
            raise UserError(f"{self.folder} has {count} of {len(out)} values of {name}: it is from another model")

    def _read_number(self, state: str) -> Tensor | None:
        with self._translate_errors(0):
            if self._open_file(0).get_slice(flat_name(state, 0)).get_shape():
                return None
            number: Tensor = self._open_file(0).get_tensor(flat_name(state, 0))
            return number

    def _open_file(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = self._exit_stack.enter_context(safe_open(self.folder / rank_file_name(rank), "pt"))
        return self._files[rank]

    def _close_files(self) -> None:
        self._files.clear()
        self._exit_stack.close()

    @contextlib.contextmanager
    def _translate_errors(self, rank: int) -> Iterator[None]:
        try:
            yield
        except READ_ERRORS as error:
            path, reason = self.folder / rank_file_name(rank), shorten_error(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                reason = shorten_path(f"{'.'.join(map(str, first['loc']))} in its metadata: {first['msg']}")
            raise UserError(
                f"{path} cannot be read ({reason}): remove {self.folder}, and the same command resumes "
                "from an older checkpoint"
            ) from error
