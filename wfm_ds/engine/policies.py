"""The policies (sets of weights) of one denoiser, as sharded fp32 copies and as LoRA adapters.

The policies are theta (the trained weights), old, ref and ema. The module finds this rank's master weights (the fp32
weights that ZeRO updates) in DeepSpeed's optimizer. It keeps copies of the master weights with the same sharding, and
switches adapters. engine.py and the training loops decide when a policy changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from wfm_ds.engine.adapter_layers import find_adapter_layers, peft_targets
from wfm_ds.engine.optimizer import read_states, write_states
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.sections import LoraRecipe
from wfm_ds.seeds import derive_seed

Flats = Sequence[Tensor]  # one flat fp32 tensor per optimizer group: this rank's shard, padding included


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """This rank's slice of one parameter.

    `flats[group][flat_start : flat_start + numel]` holds the parameter's elements from index `parameter_start` on.
    """

    group: int
    flat_start: int
    parameter_start: int
    numel: int


class Shards:
    """This rank's shards of the fp32 master weights in an initialised DeepSpeed engine at ZeRO stage 1, 2 or 3."""

    def __init__(self, ds: Any) -> None:
        self.ds = ds
        self.stage = int(ds.zero_optimization_stage())
        self.slices: dict[nn.Parameter, ShardSlice] = dict(
            self._stage_3_slices() if self.stage == 3 else self._stage_1_2_slices()
        )

    def master_weights(self) -> list[Tensor]:
        """Return views of this rank's fp32 master weights, one flat tensor per optimizer group."""
        return [flat.detach() for flat in self._optimizer_flats()]

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """Return the optimizer states {name: tensor} of each group. Before the first step, the mappings are empty."""
        return [read_states(self.ds.optimizer.optimizer, flat) for flat in self._optimizer_flats()]

    def load_optimizer_states(self, states: Mapping[str, Flats]) -> None:
        """Set the optimizer states. states: {name as in `optimizer_states`: one tensor per optimizer group}."""
        for group, flat in enumerate(self._optimizer_flats()):
            group_states = {name: flats[group] for name, flats in states.items()}
            write_states(self.ds.optimizer.optimizer, flat, group_states)

    def _optimizer_flats(self) -> Sequence[Tensor]:
        optimizer = self.ds.optimizer
        flats: Sequence[Tensor] = (
            optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups
        )
        return flats

    def slices_by_name(self) -> dict[str, ShardSlice]:
        """Return {parameter name: this rank's slice}."""
        names = {parameter: name for name, parameter in self.ds.module.named_parameters()}
        return {names[parameter]: piece for parameter, piece in self.slices.items()}

    def _stage_3_slices(self) -> Iterator[tuple[nn.Parameter, ShardSlice]]:
        rank = dist.get_rank()
        # the attribute has this name in bf16 and fp32 too
        for index, group in enumerate(self.ds.optimizer.fp16_groups):
            low = 0
            for parameter in group:
                shard_numel = parameter.partition_numel()
                start = rank * shard_numel
                # The last shards are padded with uninitialised memory: only numel elements belong to the parameter.
                yield parameter, ShardSlice(index, low, start, max(0, min(shard_numel, parameter.ds_numel - start)))
                low += shard_numel

    def _stage_1_2_slices(self) -> Iterator[tuple[nn.Parameter, ShardSlice]]:
        optimizer = self.ds.optimizer
        for index, group in enumerate(optimizer.round_robin_bit16_groups):
            shard_numel = optimizer.partition_size[index]
            shard_start = dist.get_rank(optimizer.real_dp_process_group[index]) * shard_numel
            for parameter, offset in zip(group, optimizer.round_robin_bit16_offsets[index], strict=True):
                first, last = max(offset, shard_start), min(offset + parameter.numel(), shard_start + shard_numel)
                yield (
                    parameter,
                    ShardSlice(index, max(0, first - shard_start), max(0, first - offset), max(0, last - first)),
                )

    def local_elements(self, parameter: nn.Parameter, flats: Flats) -> Tensor:
        """Return a view [numel] of this rank's elements of a parameter. flats: one flat tensor per optimizer group."""
        piece = self.slices[parameter]
        return flats[piece.group][piece.flat_start : piece.flat_start + piece.numel]

    def gather_parameter(self, parameter: nn.Parameter, flats: Flats, device: torch.device) -> Tensor | None:
        """Return a full parameter in fp32 on the CPU of rank 0. Other ranks get None. Collective.

        device: device on which the parameter is gathered.
        """
        piece, shape = self.slices[parameter], getattr(parameter, "ds_shape", parameter.shape)
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
        whole[piece.parameter_start : piece.parameter_start + piece.numel] = self.local_elements(parameter, flats).to(
            device
        )
        dist.reduce(whole, dst=0)  # every element has one owner and all others add 0, so the sum is exact
        return whole.view(shape).cpu() if dist.get_rank() == 0 else None

    def zero_gradients(self) -> None:
        """Zero the accumulated gradients at ZeRO-3 after an optimizer step.

        ZeRO-3 overwrites old gradients only in the first micro-step, and only for parameters used in that micro-step.
        Without this call, an expert that is used later or not at all would be updated with old gradients.
        """
        if self.stage == 3:
            self.ds.optimizer.grad_partitions_flat_buffer.zero_()

    @torch.no_grad()
    def install_weights(self, flats: Flats) -> None:
        """Set the module's weights to the values in `flats`, rounded to the module's dtype. Collective."""
        optimizer = self.ds.optimizer
        if self.stage == 3:
            shard: Any
            for shard in self.slices:
                values = self.local_elements(shard, flats)
                shard.ds_tensor[: values.numel()].copy_(values)
            refresh_gathered_weights(list(self.slices))
            return
        for parts, flat, group in zip(
            optimizer.parallel_partitioned_bit16_groups, flats, optimizer.real_dp_process_group, strict=True
        ):
            parts[dist.get_rank(group)].copy_(flat)
        all_gather_dp_groups(  # the same gather as at the end of the optimizer's own step
            groups_flat=optimizer.bit16_groups_flat,
            partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
            dp_process_group=optimizer.real_dp_process_group,
            start_alignment_factor=optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=optimizer.allgather_bucket_size,
        )


def refresh_gathered_weights(parameters: Sequence[Any]) -> None:
    """Discard outdated copies of these parameters after their shards changed at ZeRO-3. Collective.

    Small parameters that ZeRO-3 keeps gathered are gathered again. If zero_hpz_partition_size is set, the secondary
    shards of each node are discarded too. Otherwise DeepSpeed would gather old weights from them until the next
    optimizer step.
    """
    persistent = [p for p in parameters if p.ds_status == ZeroParamStatus.AVAILABLE]
    if persistent:
        persistent[0].partition(persistent)  # this may write the old weights to the secondary shards again
    for parameter in parameters:
        parameter.ds_secondary_tensor = None
    if persistent:
        persistent[0].all_gather(persistent)


class ShardedCopy:
    """An fp32 copy of the master weights with the same sharding. Updates need no communication."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.flats = [flat.clone() for flat in shards.master_weights()]

    @torch.no_grad()
    def lerp_(self, decay: float) -> None:
        """Update the copy in fp32: copy <- decay * copy + (1 - decay) * trained weights."""
        masters = self.shards.master_weights()
        if decay == 0:  # lerp with weight 1 would keep a NaN in the copy, and costs a multiplication
            torch._foreach_copy_(self.flats, masters)
        else:
            torch._foreach_lerp_(self.flats, masters, 1 - decay)

    @contextlib.contextmanager
    def use_weights(self) -> Iterator[None]:
        """Use this copy as the module's weights inside the context. Collective at entry and exit.

        The trained weights are restored on exit, even if all ranks raise the same error. They are not restored if only
        this rank raises an error, because restoring is collective.
        """
        self.shards.install_weights(self.flats)
        is_agreed = True
        try:
            yield
        except Exception as error:
            is_agreed = getattr(error, "agreed", False)  # otherwise the other ranks are in another collective
            raise
        finally:
            if is_agreed:  # the trained weights are the rounded masters, so nothing had to be saved
                self.shards.install_weights(self.shards.master_weights())


def set_trainable(denoiser: nn.Module, frozen: AbstractSet[str]) -> None:
    """Freeze the parameters named in `frozen` and train all others (requires_grad)."""
    for name, parameter in denoiser.named_parameters():
        parameter.requires_grad_(name not in frozen)


def add_adapters(
    denoiser: nn.Module,
    recipe: LoraRecipe,
    targets: Sequence[str],
    names: Sequence[str],
    seed: int,
    initial_values: Mapping[str, Tensor] | None = None,
) -> Adapters:
    """Add the trained adapter `default`, and a frozen copy of it for each name in `names`.

    Call it before DeepSpeed starts. seed: seed of the initial A matrices. initial_values: initial adapter tensors;
    their names omit the adapter's name. Raises RecipeError if no layer can be adapted.
    """
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
        for name in ("default", *names):
            with torch.random.fork_rng(list(devices)):
                torch.manual_seed(seed)  # the same for each adapter, so that all start equal on every rank
                module.add_adapter(config, adapter_name=name)
    except ValueError as error:  # raised by PEFT if no name matches, or for a layer type that it does not support
        raise RecipeError(
            f"lora.target_modules: {', '.join(targets)} cannot be adapted in {type(denoiser).__name__}: {error}"
        ) from error
    if initial_values:
        write_initial_values(denoiser, initial_values, ("default", *names))
    return Adapters(denoiser)


@torch.no_grad()
def write_initial_values(denoiser: nn.Module, initial_values: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Write initial values into each adapter in `names`.

    The values are named as in DenoiserEngine.iter_full_tensors.
    """
    parameters = dict(denoiser.named_parameters())
    adapter_names = {name.replace(".default.", "."): name for name in parameters if ".default." in name}
    for name, value in initial_values.items():
        for adapter in names:
            parameters[adapter_names[name].replace(".default.", f".{adapter}.")].copy_(value)


class Adapters:
    """The LoRA adapters of a denoiser and the choice of the active one. Only `default` requires gradients.

    The active adapter changes many times per step. PEFT's own switch visits all modules and sets thousands of flags
    each time, so this class finds the adapted layers once and switches only these layers.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        """Find the adapted layers of a denoiser that has all its adapters, and activate `default`."""
        module: Any = denoiser
        module.enable_adapters()
        module.set_adapter("default")
        for name, parameter in denoiser.named_parameters():  # PEFT has just set the flags of the adapters only
            parameter.requires_grad_(".default." in name)
        self.layers = find_adapter_layers(denoiser)
        self._module_copies = [part for part in denoiser.modules() if isinstance(part, ModulesToSaveWrapper)]
        self.activate("default")

    def activate(self, name: str | None) -> None:
        """Activate the adapter of this name; None disables all adapters."""
        for layer in (*self.layers, *self._module_copies):
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = [name]


def write_adapter(denoiser: nn.Module, copy: ShardedCopy, name: str) -> None:
    """Write a policy copy, rounded to the module's dtype, into the frozen adapter `name`. Collective."""
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
    """The dropout layers of the adapter `default`.

    Masks are seeded by run seed, rank, optimizer step and forward pass within the step, so checkpoints store no random
    state. Blocks recomputed in the backward pass use the same masks, because torch's checkpointing restores the random
    state.
    """

    def __init__(self, denoiser: nn.Module, seed: int, rank: int) -> None:
        """Disable dropout in all adapters, because PEFT creates them in train mode.

        `seed_masks` enables it for `default`.
        """
        layers = [dict(layer.lora_dropout) for layer in find_adapter_layers(denoiser)]
        for dropout in (dropout for by_adapter in layers for dropout in by_adapter.values()):
            dropout.training = False
        trained = (by_adapter.get("default") for by_adapter in layers)
        self._layers: list[Any] = [layer for layer in trained if isinstance(layer, nn.Dropout)]
        self._seed, self._rank = seed, rank
        self._step, self._num_forwards = -1, 0

    @contextlib.contextmanager
    def seed_masks(self, step: int, device: torch.device) -> Iterator[None]:
        """Enable dropout for one forward pass, unless gradients are disabled.

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
