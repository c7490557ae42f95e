"""The state of a run's engine and training loop in a checkpoint, with one file per rank.

    wfm_rank00000.safetensors, ...     float32 tensors: this rank's shards of the trained weights, the other policies,
                                       the extra adapters and the optimizer states. The metadata contains the engine's
                                       counters, the state of the training loop, the export settings, and the layout:
                                       the slice of each parameter in the file's flat tensors.
    recipe.yaml                        the resolved recipe

Frozen weights and random states are not stored. Nothing is pickled, so loading a checkpoint cannot execute code. The
states can be read for any number of ranks and any ZeRO stage.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wfm_ds.engine.shards import ShardSlice, adapter_state_name
from wfm_ds.errors import UserError
from wfm_ds.export.target import ExportInfo
from wfm_ds.export.weights import adapter_settings
from wfm_ds.recipe import file as recipe_file
from wfm_ds.storage.filesystem import shorten_error, shorten_path
from wfm_ds.types import DEFAULT_ADAPTER

if TYPE_CHECKING:
    from wfm_ds.engine.engine import DenoiserEngine

RECIPE_FILE = "recipe.yaml"

READ_ERRORS = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
Layout = Mapping[str, ShardSlice]
"""{parameter name: position of its slice in a rank's flat tensors}."""


Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
StoredSlice = tuple[Count, Count, Count, Count]


class StoredExport(BaseModel):
    """Export settings in a checkpoint: the fields of ExportTarget, the dtype and the PEFT settings (None: no LoRA)."""

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
            stored = set[str]().union(*(self.read_layout(rank, adapter) for rank in ranks))
            if differing := sorted(stored ^ layout.keys()):
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
        """Return the names of an adapter's states: `train`, the other policies, and `optimizer.NAME`."""
        with self._translate_errors(0):
            names = self._open_file(0).keys()
            stored_names = {name.rpartition(".")[0] for name in names}
        prefixes = {name: adapter_state_name(name, "") for name in self.read_metadata(0).adapter_layouts}
        if adapter in prefixes:
            prefix = prefixes[adapter]
            return sorted(name.removeprefix(prefix) for name in stored_names if name.startswith(prefix))
        return sorted(name for name in stored_names if not name.startswith(tuple(prefixes.values())))

    def _read_elements(
        self, out: Tensor, state: str, name: str, start: int, ranks: Sequence[int], adapter: str = DEFAULT_ADAPTER
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


@dataclass(frozen=True, slots=True)
class RankState:
    """This rank's state between two steps, copied to host memory."""

    rank: int
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    recipe: str | None  # None on ranks other than 0

    def write_files(self, folder: Path) -> list[Path]:
        """Write this rank's files into `folder` and return their paths. Raises OSError if writing fails."""
        files = [folder / rank_file_name(self.rank)]
        try:
            save_file(dict(self.tensors), files[0], metadata=dict(self.metadata))
        except SafetensorError as error:  # disk full
            raise OSError(str(error)) from error
        if self.recipe is not None:
            files.append(folder / RECIPE_FILE)
            files[-1].write_text(self.recipe, encoding="utf-8")
        return files


def capture_state(engine: DenoiserEngine, loop: Mapping[str, Any], target: ExportInfo, dtype: torch.dtype) -> RankState:
    """Copy this rank's state to host memory.

    loop: state of the training loop as JSON values. target, dtype: export settings for `wfm convert`.
    """
    tensors = {
        flat_name(name, group): flat.to("cpu", copy=True)
        for name, flats in engine.shard_states().items()
        for group, flat in enumerate(flats)
    }
    layout = layout_to_json(engine.shards.slices_by_name())
    config = engine.lora_config()
    lora = None if config is None else adapter_settings(config, target.base)
    export_info = target.to_json() | {"dtype": str(dtype).removeprefix("torch."), "lora": lora}
    metadata_values = {"engine": engine.step_counters(), "loop": dict(loop), "layout": layout, "export": export_info}
    extra = {name: layout_to_json(shards.slices_by_name()) for name, shards in engine.extra_shards.items()}
    if extra:
        metadata_values["adapter_layouts"] = extra
    metadata = {name: json.dumps(value) for name, value in metadata_values.items()}
    recipe = recipe_file.dump_recipe(engine.recipe) if engine.world.is_main else None
    return RankState(engine.world.rank, tensors, metadata, recipe)


def restore_state(engine: DenoiserEngine, folder: Path, num_ranks: int) -> dict[str, Any]:
    """Restore the engine from a checkpoint of `num_ranks` ranks. Returns the state of the training loop.

    All ranks must call this before the first step. The current number of ranks may differ from `num_ranks`. Raises
    UserError if a file is damaged or belongs to a different model.
    """
    rank = engine.world.rank if engine.world.rank < num_ranks else 0

    def read() -> tuple[RankMetadata, dict[str, list[Tensor]]]:
        with ShardedStates(folder, num_ranks) as states_file:
            metadata = states_file.read_metadata(rank)
            check_same_adapters(folder, set(metadata.adapter_layouts), set(engine.extra_shards))
            states = states_file.gather_states(engine.shards.slices_by_name(), engine.shards.lengths(), rank)
            for adapter, shards in engine.extra_shards.items():
                own = states_file.gather_states(shards.slices_by_name(), shards.lengths(), rank, adapter)
                states |= {adapter_state_name(adapter, name): flats for name, flats in own.items()}
            return metadata, states

    metadata, states = engine.world.run_checked(read)
    engine.restore_state(metadata.engine, states)
    return dict(metadata.loop)


def check_same_adapters(folder: Path, stored: AbstractSet[str], expected: AbstractSet[str]) -> None:
    """Raise UserError if the extra adapters in a checkpoint are not those that this run trains."""
    if stored != expected:
        stored_names, names = (", ".join(["default", *sorted(adapters)]) for adapters in (stored, expected))
        raise UserError(
            f"{folder} has the trained adapters {stored_names}, but this run trains {names}: resume with the algorithm "
            "of the checkpoint, or start a new run from its LoRA with lora.init_from"
        )
