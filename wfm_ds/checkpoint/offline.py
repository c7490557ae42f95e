"""The weights in a checkpoint, read one tensor at a time without the run that wrote it, for `convert`."""

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

ADAPTER = ".default."  # the trained adapter's name within its parameter names
UNSUPPORTED = ("lora_bias", "use_qalora", "layer_replication")  # options that change the update


class CheckpointWeights:
    """Every policy of a checkpoint, sharded over any number of ranks at any ZeRO stage, as a tensor source for an
    export.

    Buffers do not train and come from the base folder.
    """

    def __init__(self, cuts: CutStates, target: ExportTarget, settings: Mapping[str, Any] | None) -> None:
        """settings: the LoraConfig as JSON, None for a run with full training."""
        self.cuts, self.target, self.settings = cuts, target, settings
        self.lora = settings is not None

    def policies(self) -> list[str]:
        """Return the policies that can be exported."""
        return [name for name in self.cuts.state_names() if not name.startswith(OPTIMIZER)]

    def lora_config(self) -> Any:
        return None if self.settings is None else peft.LoraConfig(**self.settings)

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters with the same names and in the same order as the engine.

        Raises UserError unless the checkpoint has exactly the weights of the target.
        """
        names = self.cuts.layout(0).keys()
        for part in self.target.parts:
            prefix = self.target.prefix(part)
            shapes = self._adapter_shapes(part) if self.lora else self._parameter_shapes(part)
            if {prefix + name for name in shapes} != {name for name in names if name.startswith(prefix)}:
                raise UserError(f"{self.cuts.folder} has other weights than {part} of {self.target.base}")
            for name, shape in shapes.items():
                exported_name = (prefix + name).replace(ADAPTER, ".") if self.lora else prefix + name
                yield exported_name, self.cuts.whole(policy, prefix + name, shape)
            if not self.lora:
                yield from self._buffers(part)

    def _parameter_shapes(self, part: str) -> dict[str, torch.Size]:
        target = self.target
        parameters = target.bare(part).named_parameters()
        return {name: parameter.shape for name, parameter in parameters if not target.is_frozen(name)}

    def _adapter_shapes(self, part: str) -> dict[str, list[int]]:
        """Return the shapes of the adapter's tensors in the checkpoint, derived from the base's layers."""
        assert self.settings is not None
        prefix, weights = self.target.prefix(part), self.target.shapes(part)
        shapes = {}
        for name in self.cuts.layout(0):
            if not name.startswith(prefix):
                continue
            own_name = name.removeprefix(prefix)
            match, saved_match = (key.fullmatch(own_name.replace(ADAPTER, ".")) for key in (LORA_KEY, SAVED_KEY))
            weight = weights.get(f"{match['module']}.weight") if match else None
            if match and weight is not None:
                matrices = adapter_shapes(weight, int(self.settings["r"]), dora=True)
                shapes[own_name] = matrices[match["matrix"]]
            elif (
                saved_match
                and (whole_shape := weights.get(f"{saved_match['module']}.{saved_match['kind']}")) is not None
            ):
                shapes[own_name] = list(whole_shape)
        return shapes

    def _buffers(self, part: str) -> Iterator[tuple[str, Tensor]]:
        base_weights = self.target.stored(part)
        for name, _ in persistent_buffers(self.target.bare(part)):
            yield self.target.prefix(part) + name, base_weights.tensor(name)


class MergedAdapter:
    """The base folder's weights with a LoRA merged into them in float32, tensor by tensor: W + alpha / rank * B A.

    DoRA weights are scaled to their magnitudes. Fully trained layers replace the base's.
    """

    lora = False

    def __init__(self, adapter: TensorSource, settings: Mapping[str, Any], target: ExportTarget) -> None:
        """Raises ModelError for a LoRA variant that cannot be merged."""
        if unsupported := [name for name in UNSUPPORTED if settings.get(name)]:
            raise ModelError(f"a LoRA with {', '.join(unsupported)} cannot be merged; remove --merge")
        self.adapter, self.target, self.settings = adapter, target, settings

    def lora_config(self) -> None:
        return None

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the state dicts of all parts. Raises ModelError if the LoRA does not fit them."""
        layers, saved = adapter_layers(self.adapter.named_full_tensors(policy), self.settings)
        for part in self.target.parts:
            prefix, base_weights = self.target.prefix(part), self.target.stored(part)
            for name in self.target.shapes(part):
                weight = base_weights.tensor(name)
                layer = layers.pop(prefix + name.removesuffix(".weight"), None) if name.endswith(".weight") else None
                if layer is not None and layer.weight_shape != weight.shape:
                    raise ModelError(f"{name} is {list(weight.shape)}, but the LoRA is for {list(layer.weight_shape)}")
                base_tensor = saved.pop(prefix + name, weight)
                yield prefix + name, base_tensor if layer is None else layer.merged(base_tensor)
        if unused := [*layers, *saved]:
            raise ModelError(f"{self.target.base} has no layer {unused[0]}, which the LoRA adapts")


def adapter_layers(
    tensors: Iterable[tuple[str, Tensor | None]], settings: Mapping[str, Any]
) -> tuple[LoraLayers, dict[str, Tensor]]:
    """Return a LoRA's layers from the tensors of a source, and the tensors of fully trained layers.

    Raises ModelError for other names or incomplete layers.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    for name, tensor in tensors:
        match, whole_match = LORA_KEY.fullmatch(name), SAVED_KEY.fullmatch(name)
        if tensor is None or not (match or whole_match):
            raise ModelError(f"{name} is not the name of a LoRA tensor (MODULE.lora_A.weight)")
        if match:
            groups.setdefault(match["module"], {})[match["matrix"]] = tensor
        elif whole_match:
            saved[f"{whole_match['module']}.{whole_match['kind']}"] = tensor
    if incomplete := [module for module, group in groups.items() if not {"A", "B"} <= group.keys()]:
        raise ModelError(f"{incomplete[0]}: the LoRA has only one of its two matrices")
    layers = {
        module: LoraLayer(g["A"], g["B"], alpha_of(settings, module, len(g["A"])), g.get("magnitude_vector"))
        for module, g in groups.items()
    }
    return layers, saved
