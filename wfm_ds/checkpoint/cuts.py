"""States that were cut over some ranks, put together for others: any world size, any ZeRO stage, or none at all.

Each rank's file holds flat tensors and, as metadata, which elements of which parameter lie where in them. Whoever wants
elements of a parameter reads them from wherever they are.
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

from wfm_ds.engine.policy import Piece
from wfm_ds.errors import UserError

Layout = Mapping[str, Piece]
"""By parameter name."""


def file_name(rank: int) -> str:
    return f"wfm_rank{rank:05d}.safetensors"


def key(state: str, group: int) -> str:
    """The name of a flat in the file of a rank."""
    return f"{state}.{group}"


def layout_to_json(layout: Layout) -> dict[str, list[int]]:
    return {name: list(astuple(piece)) for name, piece in layout.items()}


class CutStates:
    """The files of all ranks of a checkpoint; each is opened when something in it is wanted."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        self._held = contextlib.ExitStack()
        self._files: dict[int, Any] = {}
        self._layouts: dict[int, dict[str, Piece]] = {}

    def __enter__(self) -> CutStates:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def plain(self, rank: int) -> dict[str, Any]:
        """Read what the rank noted besides tensors, as JSON values. Raises UserError as `gather` does."""
        with self._readable(rank):
            return {name: json.loads(text) for name, text in self._file(rank).metadata().items()}

    def layout(self, rank: int) -> Layout:
        """Return the layout of this rank's flats."""
        if rank not in self._layouts:
            self._layouts[rank] = {name: Piece(*numbers) for name, numbers in self.plain(rank)["layout"].items()}
        return self._layouts[rank]

    def sizes(self) -> dict[str, int]:
        """Number of elements of each parameter, over all ranks."""
        sizes: dict[str, int] = {}
        for rank in range(self.num_ranks):
            for name, piece in self.layout(rank).items():
                sizes[name] = sizes.get(name, 0) + piece.numel
        return sizes

    def gather(self, layout: Layout, lengths: Sequence[int], rank: int) -> dict[str, list[Tensor]]:
        """The flats of every state, cut as `layout` says: for each state one float32 tensor per group, on the CPU.

        lengths: of each group's flat; what no parameter fills is 0. rank: the one whose file is likely to be cut like
        that; then the others need not be opened. A state that is one number per group (AdamW's step) is the same in all
        of them. Raises UserError if a file cannot be read, or holds other parameters.
        """
        ranks: Sequence[int] = [rank]
        if self.layout(rank) != layout:
            ranks = range(self.num_ranks)
            if others := sorted(self.sizes().keys() ^ layout.keys()):
                raise UserError(
                    f"{self.folder} holds other trained weights than this run has, e.g. {others[0]}: it is of another "
                    "model, or of a version that trained others"
                )
        flats: dict[str, list[Tensor]] = {}
        for state in self.state_names():
            number = self._number(state)
            if number is not None:
                flats[state] = [number.clone() for _ in lengths]
                continue
            flats[state] = [torch.zeros(length) for length in lengths]
            for name, piece in layout.items():
                out = flats[state][piece.group][piece.low : piece.low + piece.numel]
                self._fill(out, state, name, piece.start, ranks)
        return flats

    def whole(self, state: str, name: str, shape: Sequence[int]) -> Tensor:
        """One parameter's state on the CPU, float32, from wherever its elements lie. Raises UserError as `gather` does,
        and if it has another number of elements."""
        whole = torch.zeros(math.prod(shape))
        try:
            self._fill(whole, state, name, 0, range(self.num_ranks))
        finally:
            self._let_go()
        return whole.view(*shape)

    def state_names(self) -> list[str]:
        """The states that the checkpoint holds: train, other policies, optimizer.NAME."""
        with self._readable(0):
            names = self._file(0).keys()
            return sorted({name.rpartition(".")[0] for name in names})

    def _fill(self, out: Tensor, state: str, name: str, start: int, ranks: Sequence[int]) -> None:
        """out <- the elements from `start` on of a parameter's state."""
        found = 0
        for rank in ranks:
            there = self.layout(rank).get(name)
            if there is None:
                break
            low, high = max(start, there.start), min(start + len(out), there.start + there.numel)
            if low < high:
                offset = there.low - there.start
                with self._readable(rank):
                    flat = self._file(rank).get_slice(key(state, there.group))
                    out[low - start : high - start] = flat[low + offset : high + offset]
                found += high - low
        if found != len(out):
            raise UserError(f"{self.folder} holds {found} of {len(out)} values of {name}: it is of another model")

    def _number(self, state: str) -> Tensor | None:
        with self._readable(0):
            if self._file(0).get_slice(key(state, 0)).get_shape():
                return None
            number: Tensor = self._file(0).get_tensor(key(state, 0))
            return number

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = self._held.enter_context(safe_open(self.folder / file_name(rank), "pt"))
        return self._files[rank]

    def _let_go(self) -> None:
        """Close the files: they are mapped, and what was read of them counts as this process's memory until then."""
        self._files.clear()
        self._held.close()

    @contextlib.contextmanager
    def _readable(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.folder / file_name(rank)} cannot be read ({error}): remove {self.folder}, and the same command "
                "continues an older checkpoint"
            ) from error
