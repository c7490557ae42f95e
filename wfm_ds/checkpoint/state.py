"""The state of a run in a checkpoint, and how it returns: the engine's state and the loop's, one file per rank.

    wfm_rank00000.safetensors, ...     this rank's share of the trained weights, of the other policies and of the
                                       optimizer's states, all fp32, and as metadata: the engine's counters, the loop's
                                       state, how the shares are cut, so that other ranks can cut them anew, and
                                       what they are to be exported as
    recipe.yaml                        the resolved recipe

Frozen weights are not stored: they are those of the base model. Random states neither: every draw has a key (seeds.py).
Nothing is pickled: a checkpoint cannot run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from wfm_ds.checkpoint.cuts import CutStates, file_name, key, layout_to_json
from wfm_ds.checkpoint.export import adapter_settings
from wfm_ds.checkpoint.target import ExportNote
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.recipe import file as recipe_file

RECIPE = "recipe.yaml"
EXPORT = "export"  # what the weights in a rank's file are to be exported as


@dataclass(frozen=True, slots=True)
class RankState:
    """This rank's share of a run between two steps, on the host: what comes after does not change it."""

    rank: int
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    recipe: str | None  # rank 0's

    def write(self, folder: Path) -> list[Path]:
        """This rank's files below `folder`. Raises OSError."""
        files = [folder / file_name(self.rank)]
        try:
            save_file(dict(self.tensors), files[0], metadata=dict(self.metadata))
        except SafetensorError as error:  # of a full disk
            raise OSError(str(error)) from error
        if self.recipe is not None:
            files.append(folder / RECIPE)
            files[-1].write_text(self.recipe, encoding="utf-8")
        return files


def capture(engine: DenoiserEngine, loop: Mapping[str, Any], target: ExportNote, dtype: torch.dtype) -> RankState:
    """Copy this rank's state to the host. `loop`: JSON; target and dtype: of the run's exports, so that `convert` needs
    nothing else."""
    tensors = {
        key(name, group): flat.to("cpu", copy=True)
        for name, flats in engine.states().items()
        for group, flat in enumerate(flats)
    }
    layout = layout_to_json(engine.shards.layout())
    config = engine.lora_config()
    lora = None if config is None else adapter_settings(config, target.base)
    note = target.to_json() | {"dtype": str(dtype).removeprefix("torch."), "lora": lora}
    plain = {"engine": engine.counters(), "loop": dict(loop), "layout": layout, EXPORT: note}
    metadata = {name: json.dumps(value) for name, value in plain.items()}
    recipe = recipe_file.dump(engine.recipe) if engine.world.is_main else None
    return RankState(engine.world.rank, tensors, metadata, recipe)


def read_state(engine: DenoiserEngine, folder: Path, num_ranks: int) -> dict[str, Any]:
    """Collective, before the first step: put back what `capture` took on `num_ranks` ranks, however many there are
    now; returns the loop's state. Raises UserError if a file is damaged, or of another model."""
    rank = engine.world.rank if engine.world.rank < num_ranks else 0
    layout, lengths = engine.shards.layout(), [len(flat) for flat in engine.shards.masters()]

    def read() -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
        with CutStates(folder, num_ranks) as cut:
            return cut.plain(rank), cut.gather(layout, lengths, rank)

    plain, states = engine.world.checked(read)
    engine.restore(plain["engine"], states)
    loop: dict[str, Any] = plain["loop"]
    return loop
