"""The weights in a checkpoint, one tensor at a time, without the run that wrote it: what `convert` exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor

from wfm_ds.checkpoint.cuts import CutStates
from wfm_ds.checkpoint.export import LORA_KEY, TensorSource, adapter_shapes
from wfm_ds.checkpoint.target import ExportTarget
from wfm_ds.engine.engine import OPTIMIZER, persistent_buffers
from wfm_ds.errors import ModelError, UserError

ADAPTER = ".default."  # the trained adapter's name within those of its parameters
UNSUPPORTED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "lora_bias")  # they change what is added


class CheckpointWeights:
    """Every policy of a checkpoint, cut over any number of ranks at any ZeRO stage, as an export asks for it.

    Buffers do not train: they are those of the base folder, from which the config makes the same.
    """

    def __init__(self, cuts: CutStates, target: ExportTarget, settings: Mapping[str, Any] | None) -> None:
        """settings: of the LoraConfig, None for a run that trained all weights."""
        self.cuts, self.target, self.settings = cuts, target, settings
        self.lora = settings is not None

    def policies(self) -> list[str]:
        """The weights that can be exported."""
        return [name for name in self.cuts.state_names() if not name.startswith(OPTIMIZER)]

    def lora_config(self) -> Any:
        return None if self.settings is None else peft.LoraConfig(**self.settings)

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """List the parameters as the engine does: same names, same order. Raises UserError unless the checkpoint
        holds just the weights that the target asks for."""
        names = self.cuts.layout(0).keys()
        for part in self.target.parts:
            prefix = self.target.prefix(part)
            shapes = self._adapter_shapes(part) if self.lora else self._parameter_shapes(part)
            if {prefix + name for name in shapes} != {name for name in names if name.startswith(prefix)}:
                raise UserError(f"{self.cuts.folder} holds other weights than the {part} of {self.target.base} has")
            for name, shape in shapes.items():
                exported = (prefix + name).replace(ADAPTER, ".") if self.lora else prefix + name
                yield exported, self.cuts.whole(policy, prefix + name, shape)
            if not self.lora:
                yield from self._buffers(part)

    def _parameter_shapes(self, part: str) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self.target.bare(part).named_parameters()}

    def _adapter_shapes(self, part: str) -> dict[str, list[int]]:
        """Return the shapes of the adapter's matrices that the checkpoint holds, as they lie on the base's layers."""
        assert self.settings is not None
        prefix, weights = self.target.prefix(part), self.target.shapes(part)
        shapes = {}
        for name in self.cuts.layout(0):
            match = LORA_KEY.fullmatch(name.removeprefix(prefix).replace(ADAPTER, "."))
            weight = weights.get(f"{match['module']}.weight") if match and name.startswith(prefix) else None
            if match and weight is not None:
                matrices = adapter_shapes(weight, int(self.settings["r"]))
                shapes[name.removeprefix(prefix)] = matrices[match["matrix"]]
        return shapes

    def _buffers(self, part: str) -> Iterator[tuple[str, Tensor]]:
        stored = self.target.stored(part)
        for name, _ in persistent_buffers(self.target.bare(part)):
            yield self.target.prefix(part) + name, stored.tensor(name)


class Pair(NamedTuple):
    """The two matrices that a LoRA puts on a layer."""

    A: Tensor  # [rank, in], of a convolution [rank, in, kh, kw]
    B: Tensor  # [out, rank], of a convolution [out, rank, 1, 1]


class MergedAdapter:
    """The base folder's weights with a LoRA added to them: W + alpha / rank * B A in float32, tensor by tensor."""

    lora = False

    def __init__(self, adapter: TensorSource, settings: Mapping[str, Any], target: ExportTarget) -> None:
        """Raises ModelError for a LoRA that adds something else."""
        if set_ones := [name for name in UNSUPPORTED if settings.get(name)]:
            raise ModelError(f"a LoRA with {', '.join(set_ones)} cannot be merged; leave --merge-lora out")
        self.adapter, self.target = adapter, target
        self.scale = settings["lora_alpha"] / settings["r"]

    def lora_config(self) -> None:
        return None

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """All parts' state dicts. Raises ModelError if the LoRA does not fit them."""
        pairs = self._pairs(policy)
        for part in self.target.parts:
            prefix, stored = self.target.prefix(part), self.target.stored(part)
            for name in self.target.shapes(part):
                weight = stored.tensor(name)
                pair = pairs.pop(prefix + name.removesuffix(".weight"), None) if name.endswith(".weight") else None
                yield prefix + name, weight if pair is None else self._merged(weight, pair)
        if pairs:
            raise ModelError(f"{self.target.base} has no layer {next(iter(pairs))}, which the LoRA is for")

    def _pairs(self, policy: str) -> dict[str, Pair]:
        matrices: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.adapter.named_full_tensors(policy):
            match = LORA_KEY.fullmatch(name)
            if match is None or tensor is None:
                raise ModelError(f"{name} is not the name of a LoRA tensor (MODULE.lora_A.weight)")
            matrices.setdefault(match["module"], {})[match["matrix"]] = tensor
        if halves := [module for module, pair in matrices.items() if len(pair) < 2]:
            raise ModelError(f"{halves[0]}: the LoRA has one of its two matrices only")
        return {module: Pair(**pair) for module, pair in matrices.items()}

    def _merged(self, weight: Tensor, pair: Pair) -> Tensor:
        added: Tensor = pair.B.float().flatten(1) @ pair.A.float().flatten(1)
        return weight.float().add(added.view(weight.shape), alpha=self.scale)
