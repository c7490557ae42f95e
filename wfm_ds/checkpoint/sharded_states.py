"""Reads the training states in a checkpoint, for any number of ranks and any ZeRO stage. Does not need DeepSpeed.

Each rank's file contains flat tensors. Its metadata lists the parameter slices that they contain. A parameter is
assembled from all files that have some of its elements.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wfm_ds.engine.policies import ShardSlice
from wfm_ds.errors import UserError

Layout = Mapping[str, ShardSlice]
"""{parameter name: position of its slice in a rank's flat tensors}."""


def rank_file_name(rank: int) -> str:
    return f"wfm_rank{rank:05d}.safetensors"


def flat_name(state: str, group: int) -> str:
    """Return the name of a flat tensor in a rank's file, for a state and a parameter group."""
    return f"{state}.{group}"


def layout_to_json(layout: Layout) -> dict[str, list[int]]:
    return {name: list(astuple(piece)) for name, piece in layout.items()}


class ShardedStates:
    """The files of all ranks of a checkpoint. Each file is opened at first use."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        self._exit_stack = contextlib.ExitStack()
        self._files: dict[int, Any] = {}
        self._layouts: dict[int, dict[str, ShardSlice]] = {}

    def __enter__(self) -> ShardedStates:
        return self

    def __exit__(self, *error: object) -> None:
        self._exit_stack.close()

    def read_metadata(self, rank: int) -> dict[str, Any]:
        """Return the metadata of a rank's file as JSON values. Raises UserError if the file cannot be read."""
        with self._translate_errors(rank):
            return {name: json.loads(text) for name, text in self._open_file(rank).metadata().items()}

    def read_layout(self, rank: int) -> Layout:
        if rank not in self._layouts:
            self._layouts[rank] = {
                name: ShardSlice(*numbers) for name, numbers in self.read_metadata(rank)["layout"].items()
            }
        return self._layouts[rank]

    def parameter_sizes(self) -> dict[str, int]:
        """Return {parameter: number of elements}, summed over the files of all ranks."""
        sizes: dict[str, int] = {}
        for rank in range(self.num_ranks):
            for name, piece in self.read_layout(rank).items():
                sizes[name] = sizes.get(name, 0) + piece.numel
        return sizes

    def gather_states(self, layout: Layout, lengths: Sequence[int], rank: int) -> dict[str, list[Tensor]]:
        """Return {state: [flat float32 CPU tensor of each optimizer group]}, with slices positioned as in `layout`.

        lengths: length of each group's flat tensor. Elements that belong to no parameter are 0.
        rank: rank of the file to read first. If its layout equals `layout`, no other file is opened.
        A state with one number per group (AdamW's step) has equal values in all groups. Raises UserError if a file
        cannot be read or has different parameters.
        """
        ranks: Sequence[int] = [rank]
        if self.read_layout(rank) != layout:
            ranks = range(self.num_ranks)
            if differing := sorted(self.parameter_sizes().keys() ^ layout.keys()):
                raise UserError(
                    f"{self.folder} has other trained weights than this run, e.g. {differing[0]}: it is from another "
                    "model, or from a version that trained other weights"
                )
        flats: dict[str, list[Tensor]] = {}
        for state in self.state_names():
            number = self._read_number(state)
            if number is not None:
                flats[state] = [number.clone() for _ in lengths]
                continue
            flats[state] = [torch.zeros(length) for length in lengths]
            for name, piece in layout.items():
                out = flats[state][piece.group][piece.flat_start : piece.flat_start + piece.numel]
                self._read_elements(out, state, name, piece.parameter_start, ranks)
        return flats

    def read_parameter(self, state: str, name: str, shape: Sequence[int]) -> Tensor:
        """Return one state of a parameter as a float32 CPU tensor. It is assembled from the files of all ranks.

        Raises UserError if a file cannot be read, or if the number of elements does not match `shape`.
        """
        tensor = torch.zeros(math.prod(shape))
        try:
            self._read_elements(tensor, state, name, 0, range(self.num_ranks))
        finally:
            self._close_files()
        return tensor.view(*shape)

    def state_names(self) -> list[str]:
        """Return the names of the states in the checkpoint.

        These are `train`, the names of the other policies, and `optimizer.NAME` for each optimizer state.
        """
        with self._translate_errors(0):
            names = self._open_file(0).keys()
            return sorted({name.rpartition(".")[0] for name in names})

    def _read_elements(self, out: Tensor, state: str, name: str, start: int, ranks: Sequence[int]) -> None:
        """Fill `out` with elements of a parameter's state. start: index of the first element to read.

        ranks: ranks of the files to read.
        """
        count = 0
        for rank in ranks:
            piece = self.read_layout(rank).get(name)
            if piece is None:
                break
            low, high = max(start, piece.parameter_start), min(start + len(out), piece.parameter_start + piece.numel)
            if low < high:
                offset = piece.flat_start - piece.parameter_start
                with self._translate_errors(rank):
                    flat = self._open_file(rank).get_slice(flat_name(state, piece.group))
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
        """Close the files. Their memory-mapped pages would otherwise count as memory of this process."""
        self._files.clear()
        self._exit_stack.close()

    @contextlib.contextmanager
    def _translate_errors(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.folder / rank_file_name(rank)} cannot be read ({error}): remove {self.folder}, and the same "
                "command resumes from an older checkpoint"
            ) from error
