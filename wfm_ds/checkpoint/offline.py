"""The weights in a checkpoint, one tensor at a time, without the run that wrote it: what `convert` exports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import peft
import torch
from torch import Tensor

from wfm_ds.checkpoint.cuts import CutStates
from wfm_ds.checkpoint.export import LORA_KEY, SAVED_KEY, TensorSource, adapter_shapes
from wfm_ds.checkpoint.lora_layers import LoraLayer, LoraLayers, alpha_of
from wfm_ds.checkpoint.target import ExportTarget
from wfm_ds.engine.engine import OPTIMIZER, persistent_buffers
from wfm_ds.errors import ModelError, UserError

ADAPTER = ".default."  # the trained adapter's name within those of its parameters
UNSUPPORTED = ("lora_bias", "use_qalora", "layer_replication")  # they change what is added


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
        target = self.target
        parameters = target.bare(part).named_parameters()
        return {name: parameter.shape for name, parameter in parameters if not target.is_frozen(name)}

    def _adapter_shapes(self, part: str) -> dict[str, list[int]]:
        """Return the shapes of the adapter's tensors that the checkpoint holds, as they lie on the base's layers."""
        assert self.settings is not None
        prefix, weights = self.target.prefix(part), self.target.shapes(part)
        shapes = {}
        for name in self.cuts.layout(0):
            if not name.startswith(prefix):
                continue
            own = name.removeprefix(prefix)
            match, saved = (key.fullmatch(own.replace(ADAPTER, ".")) for key in (LORA_KEY, SAVED_KEY))
            weight = weights.get(f"{match['module']}.weight") if match else None
            if match and weight is not None:
                matrices = adapter_shapes(weight, int(self.settings["r"]), dora=True)
                shapes[own] = matrices[match["matrix"]]
            elif saved and (whole := weights.get(f"{saved['module']}.{saved['kind']}")) is not None:
                shapes[own] = list(whole)
        return shapes

    def _buffers(self, part: str) -> Iterator[tuple[str, Tensor]]:
        stored = self.target.stored(part)
        for name, _ in persistent_buffers(self.target.bare(part)):
            yield self.target.prefix(part) + name, stored.tensor(name)


class MergedAdapter:
    """The base folder's weights with a LoRA in them, computed in float32, tensor by tensor: W + alpha / rank * B A,
    with DoRA scaled to its magnitudes; layers that trained whole in the place of the base's."""

    lora = False

    def __init__(self, adapter: TensorSource, settings: Mapping[str, Any], target: ExportTarget) -> None:
        """Raises ModelError for a LoRA that adds something else."""
        if set_ones := [name for name in UNSUPPORTED if settings.get(name)]:
            raise ModelError(f"a LoRA with {', '.join(set_ones)} cannot be merged; leave --merge out")
        self.adapter, self.target, self.settings = adapter, target, settings

    def lora_config(self) -> None:
        return None

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """All parts' state dicts. Raises ModelError if the LoRA does not fit them."""
        layers, saved = adapter_layers(self.adapter.named_full_tensors(policy), self.settings)
        for part in self.target.parts:
            prefix, stored = self.target.prefix(part), self.target.stored(part)
            for name in self.target.shapes(part):
                weight = stored.tensor(name)
                layer = layers.pop(prefix + name.removesuffix(".weight"), None) if name.endswith(".weight") else None
                if layer is not None and layer.weight_shape != weight.shape:
                    raise ModelError(f"{name} is {list(weight.shape)}, the LoRA is for {list(layer.weight_shape)}")
                own = saved.pop(prefix + name, weight)
                yield prefix + name, own if layer is None else layer.merged(own)
        if left := [*layers, *saved]:
            raise ModelError(f"{self.target.base} has no layer {left[0]}, which the LoRA is for")


def adapter_layers(
    tensors: Iterable[tuple[str, Tensor | None]], settings: Mapping[str, Any]
) -> tuple[LoraLayers, dict[str, Tensor]]:
    """The layers of a LoRA as a source names its tensors, and the tensors of layers that trained whole. Raises
    ModelError."""
    found: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    for name, tensor in tensors:
        match, whole = LORA_KEY.fullmatch(name), SAVED_KEY.fullmatch(name)
        if tensor is None or not (match or whole):
            raise ModelError(f"{name} is not the name of a LoRA tensor (MODULE.lora_A.weight)")
        if match:
            found.setdefault(match["module"], {})[match["matrix"]] = tensor
        elif whole:
            saved[f"{whole['module']}.{whole['kind']}"] = tensor
    if halves := [module for module, group in found.items() if not {"A", "B"} <= group.keys()]:
        raise ModelError(f"{halves[0]}: the LoRA has one of its two matrices only")
    layers = {
        module: LoraLayer(g["A"], g["B"], alpha_of(settings, module, len(g["A"])), g.get("magnitude_vector"))
        for module, g in found.items()
    }
    return layers, saved
