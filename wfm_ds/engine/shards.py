"""This rank's shards of the fp32 master weights and of the optimizer states, and copies of these weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from wfm_ds.engine.optimizer import read_states, write_states
from wfm_ds.types import DEFAULT_ADAPTER

Flats = Sequence[Tensor]  # this rank's shards: one flat fp32 tensor per optimizer group, including padding
OPTIMIZER_PREFIX = "optimizer."  # prefix of the names of the optimizer's states


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """This rank's slice of one parameter.

    `flats[group][flat_start : flat_start + numel]` are elements of the parameter, for a list `flats` with one flat
    tensor per optimizer group. The first of these elements has the index `parameter_start` in the flattened parameter.
    """

    group: int
    flat_start: int
    parameter_start: int
    numel: int


def adapter_state_name(adapter: str, state: str) -> str:
    return f"adapter.{adapter}.{state}"


class Shards:
    """This rank's shards of the fp32 master weights in an initialised DeepSpeed engine at ZeRO stage 1, 2 or 3.

    If the engine trains several adapters, an instance contains only the shards of one adapter, and the optimizer groups
    of this adapter are numbered from 0.
    """

    def __init__(self, ds: Any, adapter: str = DEFAULT_ADAPTER) -> None:
        self.ds = ds
        self.stage = int(ds.zero_optimization_stage())
        optimizer = ds.optimizer
        groups = optimizer.param_groups
        if self.stage == 3:  # ZeRO-3 can split a parameter group
            sources = [optimizer.sub_group_to_group_id[i] for i in range(len(optimizer.fp16_groups))]
        else:
            sources = list(range(len(groups)))
        self._groups = [i for i, source in enumerate(sources) if groups[source].get("adapter", adapter) == adapter]
        self.slices: dict[nn.Parameter, ShardSlice] = dict(
            self._stage_3_slices() if self.stage == 3 else self._stage_1_2_slices()
        )

    def master_weights(self) -> list[Tensor]:
        """Return views of this rank's fp32 master weights, one flat tensor per optimizer group."""
        return [flat.detach() for flat in self._optimizer_flats()]

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """Return {state: tensor} for each optimizer group. It is empty before the first step."""
        return [read_states(self.ds.optimizer.optimizer, flat) for flat in self._optimizer_flats()]

    def training_states(self) -> dict[str, list[Tensor]]:
        """Return {state: one tensor per optimizer group}: `train` (the master weights) and the optimizer states.

        The tensors are views that the next step overwrites.
        """
        states, group_states = {"train": self.master_weights()}, self.optimizer_states()
        for name in group_states[0]:
            states[OPTIMIZER_PREFIX + name] = [state[name].detach() for state in group_states]
        return states

    def load_training_states(self, states: Mapping[str, Flats]) -> None:
        """Restore a result of `training_states`, and set the module's weights to match. All ranks must call this."""
        masters = self.master_weights()
        torch._foreach_copy_(masters, list(states["train"]))
        self.install_weights(masters)
        optimizer_states = {
            name.removeprefix(OPTIMIZER_PREFIX): flats
            for name, flats in states.items()
            if name.startswith(OPTIMIZER_PREFIX)
        }
        if optimizer_states:
            for group, flat in enumerate(self._optimizer_flats()):
                group_states = {name: flats[group] for name, flats in optimizer_states.items()}
                write_states(self.ds.optimizer.optimizer, flat, group_states)

    def _optimizer_flats(self) -> list[Tensor]:
        optimizer = self.ds.optimizer
        return self._select_groups(
            optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups
        )

    def _select_groups(self, values: Sequence[Any]) -> list[Any]:
        return [values[group] for group in self._groups]

    def lengths(self) -> list[int]:
        """Return the number of elements of this rank's flat tensor for each optimizer group."""
        return [len(flat) for flat in self._optimizer_flats()]

    def slices_by_name(self) -> dict[str, ShardSlice]:
        names = {parameter: name for name, parameter in self.ds.module.named_parameters()}
        return {names[parameter]: piece for parameter, piece in self.slices.items()}

    def _stage_3_slices(self) -> Iterator[tuple[nn.Parameter, ShardSlice]]:
        rank = dist.get_rank()
        # DeepSpeed uses the name fp16_groups in bf16 and fp32 too
        for index, group in enumerate(self._select_groups(self.ds.optimizer.fp16_groups)):
            low = 0
            for parameter in group:
                shard_numel = parameter.partition_numel()
                start = rank * shard_numel
                # The last shards are padded with uninitialised memory: only numel elements belong to the parameter.
                yield parameter, ShardSlice(index, low, start, max(0, min(shard_numel, parameter.ds_numel - start)))
                low += shard_numel

    def _stage_1_2_slices(self) -> Iterator[tuple[nn.Parameter, ShardSlice]]:
        optimizer = self.ds.optimizer
        for index, group in enumerate(self._groups):
            shard_numel = optimizer.partition_size[group]
            shard_start = dist.get_rank(optimizer.real_dp_process_group[group]) * shard_numel
            parameters, offsets = optimizer.round_robin_bit16_groups[group], optimizer.round_robin_bit16_offsets[group]
            for parameter, offset in zip(parameters, offsets, strict=True):
                first, last = max(offset, shard_start), min(offset + parameter.numel(), shard_start + shard_numel)
                yield (
                    parameter,
                    ShardSlice(index, max(0, first - shard_start), max(0, first - offset), max(0, last - first)),
                )

    def local_elements(self, parameter: nn.Parameter, flats: Flats) -> Tensor:
        """Return a flat view of this rank's elements of a parameter. flats: one flat tensor per optimizer group."""
        piece = self.slices[parameter]
        return flats[piece.group][piece.flat_start : piece.flat_start + piece.numel]

    def gather_parameter(
        self, parameter: nn.Parameter, flats: Flats, device: torch.device, owner: int = 0
    ) -> Tensor | None:
        """Return a full parameter in fp32 on the device of the rank `owner`. Other ranks get None.

        All ranks must call this. flats: one flat tensor per optimizer group. device: device of this rank.
        """
        piece, shape = self.slices[parameter], getattr(parameter, "ds_shape", parameter.shape)
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
        whole[piece.parameter_start : piece.parameter_start + piece.numel] = self.local_elements(parameter, flats).to(
            device
        )
        dist.reduce(whole, dst=owner)  # one rank has each element and all other ranks add 0, so the sum is exact
        return whole.view(shape) if dist.get_rank() == owner else None

    def zero_gradients(self) -> None:
        """Zero the accumulated gradients at ZeRO-3 after an optimizer step.

        Without this call, parameters that the first micro-step does not use would be updated with old gradients.
        """
        if self.stage == 3:
            self.ds.optimizer.grad_partitions_flat_buffer.zero_()

    @torch.no_grad()
    def install_weights(self, flats: Flats) -> None:
        """Set the module's weights to `flats`, rounded to the module's dtype. All ranks must call this.

        flats: this rank's fp32 shards, one flat tensor per optimizer group.
        """
        optimizer = self.ds.optimizer
        if self.stage == 3:
            shard: Any
            for shard in self.slices:
                values = self.local_elements(shard, flats)
                shard.ds_tensor[: values.numel()].copy_(values)
            refresh_gathered_weights(list(self.slices))
            return
        partitions = self._select_groups(optimizer.parallel_partitioned_bit16_groups)
        process_groups = self._select_groups(optimizer.real_dp_process_group)
        for parts, flat, group in zip(partitions, flats, process_groups, strict=True):
            parts[dist.get_rank(group)].copy_(flat)
        all_gather_dp_groups(  # the same gather as at the end of the optimizer's own step
            groups_flat=self._select_groups(optimizer.bit16_groups_flat),
            partitioned_param_groups=partitions,
            dp_process_group=process_groups,
            start_alignment_factor=optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=optimizer.allgather_bucket_size,
        )


def refresh_gathered_weights(parameters: Sequence[Any]) -> None:
    """Discard outdated copies of these parameters after their ZeRO-3 shards have changed. All ranks must call this."""
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
        """Set the copy to decay * copy + (1 - decay) * trained weights, computed in fp32."""
        masters = self.shards.master_weights()
        if decay == 0:  # lerp with weight 1 would keep a NaN in the copy, and costs a multiplication
            torch._foreach_copy_(self.flats, masters)
        else:
            torch._foreach_lerp_(self.flats, masters, 1 - decay)

    @contextlib.contextmanager
    def use_weights(self) -> Iterator[None]:
        """Use this copy as the module's weights inside the context.

        All ranks must enter and leave the context together.

        The trained weights are restored on exit, and after an error only if all ranks raise the same error.
        """
        self.shards.install_weights(self.flats)
        is_agreed = True
        try:
            yield
        except Exception as error:
            is_agreed = getattr(error, "agreed", False)  # True if all ranks raise this error
            raise
        finally:
            if is_agreed:  # the trained weights are the rounded master weights, so they were not saved
                self.shards.install_weights(self.shards.master_weights())


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) of each buffer that model files contain, such as SD3's pos_embed.pos_embed."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
