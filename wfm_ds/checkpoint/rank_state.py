"""The state of a run's engine and training loop in a checkpoint, with one file per rank.

    wfm_rank00000.safetensors, ...     float32 tensors: this rank's shards of the trained weights, the other policies,
                                       the extra adapters and the optimizer states. The metadata contains the engine's
                                       counters, the state of the training loop, the export settings, and the layout
                                       of the shards.
    recipe.yaml                        the resolved recipe

Frozen weights and random states are not stored. Nothing is pickled, so loading a checkpoint cannot execute code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from wfm_ds.checkpoint.sharded_states import RankMetadata, ShardedStates, flat_name, layout_to_json, rank_file_name
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.engine.shards import adapter_state_name
from wfm_ds.errors import UserError
from wfm_ds.export.target import ExportInfo
from wfm_ds.export.weights import adapter_settings
from wfm_ds.recipe import file as recipe_file

RECIPE_FILE = "recipe.yaml"


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
    if engine.extra_shards:
        metadata_values["adapter_layouts"] = {
            name: layout_to_json(shards.slices_by_name()) for name, shards in engine.extra_shards.items()
        }
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
