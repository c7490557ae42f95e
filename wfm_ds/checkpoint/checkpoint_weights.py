"""Reads the weights of checkpoints for `wfm convert`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

from wfm_ds.checkpoint.sharded_states import ShardedStates
from wfm_ds.engine.shards import OPTIMIZER_PREFIX, persistent_buffers
from wfm_ds.errors import ModelError, UserError, is_out_of_memory
from wfm_ds.export.lora_layers import LoraLayer, LoraLayers
from wfm_ds.export.lora_settings import layer_alpha
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weights import LORA_KEY, WHOLE_LAYER_KEY, TensorSource, adapter_shapes

ADAPTER_INFIX = ".default."  # part of parameter names: the name of the trained adapter
UNSUPPORTED_OPTIONS = ("lora_bias", "use_qalora", "layer_replication")  # PEFT options that change the formula of LoRA
WRAPPERS = ("module.", "transformer.")  # prefixes that training frameworks add to the denoiser's parameter names
# Raised when a pickle is damaged or needs classes that are not installed.
PICKLE_ERRORS = (OSError, ValueError, RuntimeError, KeyError, EOFError, ImportError, AttributeError, TypeError)


class CheckpointWeights:
    """Tensor source for exports from a checkpoint of a run, for all policies, any number of ranks and any ZeRO stage.

    Buffers are not trained and come from the base model's folder.
    """

    def __init__(self, sharded_states: ShardedStates, target: ExportTarget, settings: Mapping[str, Any] | None) -> None:
        """settings: the peft.LoraConfig as JSON values, or None after full training."""
        self.sharded_states, self.target, self.settings = sharded_states, target, settings
        self.uses_lora = settings is not None

    def policy_names(self) -> list[str]:
        return [name for name in self.sharded_states.state_names() if not name.startswith(OPTIMIZER_PREFIX)]

    def lora_config(self) -> Any:
        return None if self.settings is None else peft.LoraConfig(**self.settings)

    def iter_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, float32 tensor) for each weight of a policy, with the same names and order as the engine.

        Raises UserError if the weights in the checkpoint are not exactly those of the target model.
        """
        names = self.sharded_states.read_layout(0).keys()
        for part in self.target.parts:
            prefix = self.target.tensor_prefix(part)
            shapes = self._adapter_shapes(part) if self.uses_lora else self._parameter_shapes(part)
            if {prefix + name for name in shapes} != {name for name in names if name.startswith(prefix)}:
                raise UserError(f"{self.sharded_states.folder} has other weights than {part} of {self.target.base}")
            for name, shape in shapes.items():
                exported_name = (prefix + name).replace(ADAPTER_INFIX, ".") if self.uses_lora else prefix + name
                yield exported_name, self.sharded_states.read_parameter(policy, prefix + name, shape)
            if not self.uses_lora:
                yield from self._read_buffers(part)

    def _parameter_shapes(self, part: str) -> dict[str, torch.Size]:
        target = self.target
        parameters = target.meta_network(part).named_parameters()
        return {name: parameter.shape for name, parameter in parameters if not target.is_frozen(name)}

    def _adapter_shapes(self, part: str) -> dict[str, list[int]]:
        assert self.settings is not None
        prefix, weights = self.target.tensor_prefix(part), self.target.tensor_shapes(part)
        shapes = {}
        for name in self.sharded_states.read_layout(0):
            if not name.startswith(prefix):
                continue
            own_name = name.removeprefix(prefix)
            plain_name = own_name.replace(ADAPTER_INFIX, ".")
            match, saved_match = LORA_KEY.fullmatch(plain_name), WHOLE_LAYER_KEY.fullmatch(plain_name)
            weight = weights.get(f"{match['module']}.weight") if match else None
            saved_shape = weights.get(f"{saved_match['module']}.{saved_match['kind']}") if saved_match else None
            if match and weight is not None:
                matrices = adapter_shapes(weight, int(self.settings["r"]), dora=True)
                shapes[own_name] = matrices[match["matrix"]]
            elif saved_shape is not None:
                shapes[own_name] = list(saved_shape)
        return shapes

    def _read_buffers(self, part: str) -> Iterator[tuple[str, Tensor]]:
        base_weights = self.target.base_weights(part)
        for name, _ in persistent_buffers(self.target.meta_network(part)):
            yield self.target.tensor_prefix(part) + name, base_weights.read_tensor(name)


class MergedAdapter:
    """Tensor source for exports: the weights of the base model with a LoRA merged into them.

    The merged weight is W + alpha / rank * (B @ A), computed in float32, with the base weight W and the LoRA matrices A
    and B. For DoRA, each row of this sum is then scaled to its stored magnitude. Fully trained layers replace the
    layers of the base model.
    """

    uses_lora = False

    def __init__(self, adapter: TensorSource, settings: Mapping[str, Any], target: ExportTarget) -> None:
        """settings: the peft.LoraConfig as JSON values. Raises ModelError if they contain UNSUPPORTED_OPTIONS."""
        if unsupported := [name for name in UNSUPPORTED_OPTIONS if settings.get(name)]:
            raise ModelError(f"a LoRA with {', '.join(unsupported)} cannot be merged; remove --merge")
        self.adapter, self.target, self.settings = adapter, target, settings

    def lora_config(self) -> None:
        return None

    def iter_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, merged tensor) of the denoiser. Raises ModelError if the LoRA does not fit the base model."""
        layers, saved = collect_lora_layers(self.adapter.iter_full_tensors(policy), self.settings)
        for part in self.target.parts:
            prefix, base_weights = self.target.tensor_prefix(part), self.target.base_weights(part)
            for name in self.target.tensor_shapes(part):
                weight = base_weights.read_tensor(name)
                layer = layers.pop(prefix + name.removesuffix(".weight"), None) if name.endswith(".weight") else None
                if layer is not None and layer.weight_shape != weight.shape:
                    raise ModelError(f"{name} is {list(weight.shape)}, but the LoRA is for {list(layer.weight_shape)}")
                base_tensor = saved.pop(prefix + name, weight)
                yield prefix + name, base_tensor if layer is None else layer.merge_weight(base_tensor)
        if unused := [*layers, *saved]:
            raise ModelError(f"{self.target.base} has no layer {unused[0]}, which the LoRA adapts")


def collect_lora_layers(
    tensors: Iterable[tuple[str, Tensor | None]], settings: Mapping[str, Any]
) -> tuple[LoraLayers, dict[str, Tensor]]:
    """Return ({name: LoRA layer}, {name: tensor of a fully trained layer}) from the tensors of a source.

    Raises ModelError for incomplete layers, and for tensors that do not belong to a LoRA or a fully trained layer.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    for name, tensor in tensors:
        match, whole_match = LORA_KEY.fullmatch(name), WHOLE_LAYER_KEY.fullmatch(name)
        if tensor is None or not (match or whole_match):
            raise ModelError(f"{name} is not the name of a LoRA tensor (MODULE.lora_A.weight)")
        if match:
            groups.setdefault(match["module"], {})[match["matrix"]] = tensor
        elif whole_match:
            saved[f"{whole_match['module']}.{whole_match['kind']}"] = tensor
    if incomplete := [module for module, group in groups.items() if not {"A", "B"} <= group.keys()]:
        raise ModelError(f"{incomplete[0]}: the LoRA has only one of its two matrices")
    layers = {
        module: LoraLayer(g["A"], g["B"], layer_alpha(settings, module, len(g["A"])), g.get("magnitude_vector"))
        for module, g in groups.items()
    }
    return layers, saved


def is_deepspeed_checkpoint(folder: Path) -> bool:
    """Return whether DeepSpeed's save_checkpoint wrote this folder.

    The folder may be a single checkpoint, or a folder of checkpoints whose file `latest` names the newest one.
    """
    return (folder / "latest").is_file() or any(folder.glob("*_optim_states.pt"))


class DeepSpeedWeights:
    """The float32 weights in a checkpoint of any ZeRO stage that DeepSpeed's save_checkpoint wrote."""

    uses_lora = False

    def __init__(self, folder: Path, target: ExportTarget) -> None:
        """Read the checkpoint into memory. Raises UserError if the checkpoint cannot be read.

        Use only trusted checkpoints, because they contain pickles, which can execute code.
        """
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        root, tag = (folder, None) if (folder / "latest").is_file() else (folder.parent, folder.name)
        try:
            states = get_fp32_state_dict_from_zero_checkpoint(str(root), tag=tag)
        except PICKLE_ERRORS as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{folder} cannot be read as a DeepSpeed checkpoint ({reason})") from error
        self.target, self.states = target, strip_wrapper_prefixes(states)

    def lora_config(self) -> None:
        return None

    def iter_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the checkpoint, then buffers that it lacks, from the base model's folder."""
        (part,) = self.target.parts
        yield from self.states.items()
        stored = self.target.base_weights(part)
        for name, _ in persistent_buffers(self.target.meta_network(part)):
            if name not in self.states:
                yield name, stored.read_tensor(name)


def strip_wrapper_prefixes(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove each prefix in WRAPPERS with which all names start. Returns {name: tensor}."""
    tensors = dict(states)
    for prefix in WRAPPERS:
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors
