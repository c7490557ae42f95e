"""The LoRA adapters of a denoiser. The denoiser switches between policies (sets of weights) by activating adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

import peft
import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from wfm_ds.engine.adapter_layers import find_adapter_layers, peft_targets
from wfm_ds.engine.shards import ShardedCopy, refresh_gathered_weights
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.sections import LoraRecipe
from wfm_ds.seeds import derive_seed
from wfm_ds.types import DEFAULT_ADAPTER

AdapterTensors = Mapping[str, Tensor]  # {name as in DenoiserEngine.iter_full_tensors: tensor}
NO_ADAPTERS: Mapping[str, AdapterTensors] = MappingProxyType({})
RESERVED_NAMES = frozenset({DEFAULT_ADAPTER, "train", "old", "ref", "ema", "merged"})


def check_adapter_names(names: Sequence[str], *, lora: bool) -> None:
    """Raise ValueError if PEFT or the engine cannot use these names for extra and frozen adapters.

    lora: whether the run uses LoRA. If not, every name is an error.
    """
    if names and not lora:
        raise ValueError(f"extra and frozen adapters need LoRA training: {', '.join(names)}")
    for name in names:
        if not name.isidentifier() or name in RESERVED_NAMES or names.count(name) > 1:
            raise ValueError(f"{name} cannot be the name of an extra or frozen adapter")


def set_trainable(denoiser: nn.Module, frozen: AbstractSet[str]) -> None:
    """Set requires_grad: False for the parameters named in `frozen`, True for all others."""
    for name, parameter in denoiser.named_parameters():
        parameter.requires_grad_(name not in frozen)


def add_adapters(
    denoiser: nn.Module,
    recipe: LoraRecipe,
    targets: Sequence[str],
    names: Sequence[str],
    seed: int,
    initial_values: AdapterTensors | None = None,
    *,
    extra: Iterable[str] = (),
    frozen: Mapping[str, AdapterTensors] = NO_ADAPTERS,
) -> Adapters:
    """Add the trained adapter `default`, and a frozen copy of it for each name in `names`.

    Call it before DeepSpeed starts.

    seed: seed of the initial A matrices. initial_values: initial tensors of all adapters except `frozen`; None for
    random A matrices. extra: names of more trained adapters, which start equal to `default`. frozen: {name: tensors} of
    more frozen adapters. Raises RecipeError if no layer can be adapted, and ValueError if a tensor does not fit.
    """
    copies = (DEFAULT_ADAPTER, *names, *extra)
    denoiser.requires_grad_(False)
    config = peft.LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=peft_targets(denoiser, targets),
        init_lora_weights="gaussian" if recipe.init == "gaussian" else True,
        lora_dropout=recipe.dropout,
        use_rslora=recipe.rslora,
        use_dora=recipe.dora,
        modules_to_save=list(recipe.modules_to_save) or None,
    )
    module: Any = denoiser
    devices = {parameter.device for parameter in denoiser.parameters() if parameter.is_cuda}
    try:
        for name in (*copies, *frozen):
            with torch.random.fork_rng(list(devices)):
                torch.manual_seed(seed)  # one seed for all adapters and ranks, so that they start equal
                module.add_adapter(config, adapter_name=name)
    except ValueError as error:  # raised by PEFT if no name matches, or for a layer type that it does not support
        raise RecipeError(f"lora.target_modules: {', '.join(targets)} cannot be adapted: {error}") from error
    for adapters, values in ((copies, initial_values or {}), *(((name,), frozen[name]) for name in frozen)):
        write_initial_values(denoiser, values, adapters)
    return Adapters(denoiser, (DEFAULT_ADAPTER, *extra))


@torch.no_grad()
def write_initial_values(denoiser: nn.Module, initial_values: AdapterTensors, names: Sequence[str]) -> None:
    """Write initial values into each adapter in `names`. Raises ValueError if a tensor does not fit."""
    parameters = dict(denoiser.named_parameters())
    adapter_names = {name.replace(".default.", "."): name for name in parameters if ".default." in name}
    for name, value in initial_values.items():
        for adapter in names:
            parameter = parameters.get(adapter_names.get(name, "").replace(".default.", f".{adapter}."))
            if parameter is None or parameter.shape != value.shape:
                raise ValueError(f"the adapter {adapter} has no tensor {name} of shape {list(value.shape)}")
            parameter.copy_(value)


class Adapters:
    """The LoRA adapters of a denoiser and the choice of the active one. Only trained adapters require gradients."""

    def __init__(self, denoiser: nn.Module, trained: Sequence[str] = (DEFAULT_ADAPTER,)) -> None:
        """Activate `default`. The denoiser must already have all adapters. trained: names of the trained adapters."""
        module: Any = denoiser
        module.enable_adapters()
        module.set_adapter(DEFAULT_ADAPTER)
        for name, parameter in denoiser.named_parameters():  # PEFT has enabled gradients of `default` only
            parameter.requires_grad_(any(f".{adapter}." in name for adapter in trained))
        self.layers = find_adapter_layers(denoiser)  # PEFT's set_adapter would search them at each switch
        self._module_copies = [part for part in denoiser.modules() if isinstance(part, ModulesToSaveWrapper)]
        self.activate(DEFAULT_ADAPTER)

    def activate(self, name: str | None) -> None:
        """Activate the adapter with this name. None disables all adapters."""
        for layer in (*self.layers, *self._module_copies):
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = [name]


def write_adapter(denoiser: nn.Module, copy: ShardedCopy, name: str) -> None:
    """Write a policy copy, rounded to the module's dtype, into the adapter `name`. All ranks must call this."""
    parameters: dict[str, Any] = dict(denoiser.named_parameters())
    pairs = [(parameters[n.replace(".default.", f".{name}.")], q) for n, q in parameters.items() if ".default." in n]
    with torch.no_grad(), copy.use_weights():
        for target, source in pairs:
            if copy.shards.stage == 3:
                target.ds_tensor.copy_(source.ds_tensor)
            else:
                target.data.copy_(source.data)
    if copy.shards.stage == 3:
        refresh_gathered_weights([target for target, _ in pairs])


class AdapterDropout:
    """Controls the dropout layers of the adapter `default`.

    Dropout masks depend only on the run's seed, the rank, the optimizer step and the index of the forward pass within
    the step. Blocks that are recomputed in the backward pass use the same masks.
    """

    def __init__(self, denoiser: nn.Module, seed: int, rank: int) -> None:
        layers = [dict(layer.lora_dropout) for layer in find_adapter_layers(denoiser)]
        for dropout in (dropout for by_adapter in layers for dropout in by_adapter.values()):
            dropout.training = False
        trained = (by_adapter.get("default") for by_adapter in layers)
        self._layers: list[Any] = [layer for layer in trained if isinstance(layer, nn.Dropout)]
        self._seed, self._rank = seed, rank
        self._step, self._num_forwards = -1, 0

    @contextlib.contextmanager
    def seed_masks(self, step: int, device: torch.device) -> Iterator[None]:
        """Enable dropout for one forward pass inside the context, unless gradients are disabled.

        step: number of optimizer steps so far, including skipped ones.
        """
        with_gradient = torch.is_grad_enabled()
        for layer in self._layers:
            layer.training = with_gradient
        if not with_gradient:
            yield
            return
        self._num_forwards = self._num_forwards + 1 if step == self._step else 0
        self._step = step
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(derive_seed(self._seed, "lora_dropout", step, self._num_forwards, self._rank))
            yield
