"""The policies of one denoiser: theta (trained), old, ref and ema, as sharded fp32 copies and as LoRA adapters.

Owns where this rank's masters lie inside DeepSpeed's ZeRO optimizers, copies cut like them, and which adapter is
active. Does not know when policies move: engine.py and the loops decide. "Master": the fp32 value that ZeRO updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from wfm_ds.engine.flops import adapted_layers
from wfm_ds.engine.optimizer import shown_states, take_up_states
from wfm_ds.engine.targets import for_peft
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.sections import LoraRecipe

Flats = Sequence[Tensor]  # one flat fp32 tensor per optimizer group: this rank's share, padding included


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's share of one parameter: flats[group][low : low + numel] holds its elements from `start` on."""

    group: int
    low: int
    start: int
    numel: int


class Shards:
    """Shards of an initialised DeepSpeed engine: where its fp32 masters lie, at ZeRO stages 1, 2 and 3."""

    def __init__(self, ds: Any) -> None:
        self.ds = ds
        self.stage = int(ds.zero_optimization_stage())
        self.pieces: dict[nn.Parameter, Piece] = dict(self._pieces_3() if self.stage == 3 else self._pieces_1_2())

    def masters(self) -> list[Tensor]:
        """This rank's fp32 masters. Views: they change with the next optimizer step."""
        return [flat.detach() for flat in self._flats()]

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """The optimizer's states of each master (optimizer.py); empty before its first step. A tensor as long as the
        master belongs to its elements, a single number (`step`) to all of them."""
        return [shown_states(self.ds.optimizer.optimizer, flat) for flat in self._flats()]

    def take_up(self, states: Mapping[str, Flats]) -> None:
        """Give the optimizer the states of each master by name, as `optimizer_states` told them apart."""
        for group, flat in enumerate(self._flats()):
            own = {name: flats[group] for name, flats in states.items()}
            take_up_states(self.ds.optimizer.optimizer, flat, own)

    def _flats(self) -> Sequence[Tensor]:
        """The very tensors that the optimizer steps."""
        optimizer = self.ds.optimizer
        flats: Sequence[Tensor] = (
            optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups
        )
        return flats

    def layout(self) -> dict[str, Piece]:
        """Return the pieces of each parameter that lie in this rank's flats, by the parameter's name."""
        names = {parameter: name for name, parameter in self.ds.module.named_parameters()}
        return {names[parameter]: piece for parameter, piece in self.pieces.items()}

    def _pieces_3(self) -> Iterator[tuple[nn.Parameter, Piece]]:
        rank = dist.get_rank()
        for index, group in enumerate(self.ds.optimizer.fp16_groups):  # that is its name in bf16 and fp32 too
            low = 0
            for parameter in group:
                share = parameter.partition_numel()
                start = rank * share
                # The last shares are padded with whatever the memory held: only numel of them is the parameter.
                yield parameter, Piece(index, low, start, max(0, min(share, parameter.ds_numel - start)))
                low += share

    def _pieces_1_2(self) -> Iterator[tuple[nn.Parameter, Piece]]:
        optimizer = self.ds.optimizer
        for index, group in enumerate(optimizer.round_robin_bit16_groups):
            share = optimizer.partition_size[index]
            begin = dist.get_rank(optimizer.real_dp_process_group[index]) * share
            for parameter, offset in zip(group, optimizer.round_robin_bit16_offsets[index], strict=True):
                first, last = max(offset, begin), min(offset + parameter.numel(), begin + share)
                yield parameter, Piece(index, max(0, first - begin), max(0, first - offset), max(0, last - first))

    def own(self, parameter: nn.Parameter, flats: Flats) -> Tensor:
        """This rank's elements of a parameter in a set of flats, [numel]; a view."""
        piece = self.pieces[parameter]
        return flats[piece.group][piece.low : piece.low + piece.numel]

    def gather(self, parameter: nn.Parameter, flats: Flats, device: torch.device) -> Tensor | None:
        """One whole parameter in fp32, on rank 0's CPU; None elsewhere. Every rank calls; memory: one parameter."""
        piece, shape = self.pieces[parameter], getattr(parameter, "ds_shape", parameter.shape)
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
        whole[piece.start : piece.start + piece.numel] = self.own(parameter, flats).to(device)
        dist.reduce(whole, dst=0)  # every element has one owner, all others add 0: exact
        return whole.view(shape).cpu() if dist.get_rank() == 0 else None

    def forget_gradients(self) -> None:
        """Make the gradients 0 after an optimizer step, for parameters that no micro-step of the next one uses.

        ZeRO-3 overwrites the sums of the step before in its first micro-step only, and only for what that one uses: an
        expert that comes later, or not at all, would be stepped with old gradients.
        """
        if self.stage == 3:
            self.ds.optimizer.grad_partitions_flat_buffer.zero_()

    @torch.no_grad()
    def install(self, flats: Flats) -> None:
        """Make the module compute with these weights, rounded to its dtype. Every rank calls."""
        optimizer = self.ds.optimizer
        if self.stage == 3:
            shard: Any
            for shard in self.pieces:
                own = self.own(shard, flats)
                shard.ds_tensor[: own.numel()].copy_(own)
            refresh_gathered(list(self.pieces))
            return
        for parts, flat, group in zip(
            optimizer.parallel_partitioned_bit16_groups, flats, optimizer.real_dp_process_group, strict=True
        ):
            parts[dist.get_rank(group)].copy_(flat)
        all_gather_dp_groups(  # the gather with which the optimizer's own step ends
            groups_flat=optimizer.bit16_groups_flat,
            partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
            dp_process_group=optimizer.real_dp_process_group,
            start_alignment_factor=optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=optimizer.allgather_bucket_size,
        )


def refresh_gathered(parameters: Sequence[Any]) -> None:
    """Forget what still shows old weights of these parameters, after their shards changed at ZeRO-3. Every rank calls.

    That is parameters that stay gathered, and with zero_hpz_partition_size the copies that each node keeps, from which
    DeepSpeed gathers in place of the shards until its own optimizer step.
    """
    persistent = [p for p in parameters if p.ds_status == ZeroParamStatus.AVAILABLE]
    if persistent:
        persistent[0].partition(persistent)  # this may make the node's copy of the old weights once more
    for parameter in parameters:
        parameter.ds_secondary_tensor = None
    if persistent:
        persistent[0].all_gather(persistent)


class ShardedCopy:
    """An fp32 copy of the masters, cut like them: 1/world of the memory, moved without communication."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.flats = [flat.clone() for flat in shards.masters()]

    @torch.no_grad()
    def lerp_(self, decay: float) -> None:
        """Move the copy: copy <- decay * copy + (1 - decay) * theta, in fp32."""
        masters = self.shards.masters()
        if decay == 0:  # a lerp of weight 1 keeps a NaN of the copy, and costs a multiplication
            torch._foreach_copy_(self.flats, masters)
        else:
            torch._foreach_lerp_(self.flats, masters, 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the module compute with this copy inside. Every rank enters and leaves together, by an agreed error too;
        after one of its own a rank keeps this copy."""
        self.shards.install(self.flats)
        together = True
        try:
            yield
        except Exception as error:
            together = getattr(error, "agreed", False)  # else the others are in another exchange
            raise
        finally:
            if together:  # the module's weights are the rounded masters: nothing to stash
                self.shards.install(self.shards.masters())


def add_adapters(
    denoiser: nn.Module,
    recipe: LoraRecipe,
    targets: Sequence[str],
    names: Sequence[str],
    seed: int,
    start: Mapping[str, Tensor] | None = None,
) -> Adapters:
    """Add the adapter `default` and equal ones called `names`; only `default` trains. Before DeepSpeed starts.

    Raises RecipeError if no layer can be adapted. `seed`: of the initial A matrices. start: initial values of tensors
    of the adapter, by their names without the adapter's; all must be there.
    """
    denoiser.requires_grad_(False)
    config = peft.LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=for_peft(denoiser, targets),
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
                torch.manual_seed(seed)  # the same for each: all start as one policy, on every rank
                module.add_adapter(config, adapter_name=name)
    except ValueError as error:  # what PEFT raises for names that match nothing, or a layer that it cannot adapt
        raise RecipeError(
            f"lora.target_modules: {', '.join(targets)} cannot be adapted in {type(denoiser).__name__}: {error}"
        ) from error
    if start:
        take_over(denoiser, start, ("default", *names))
    return Adapters(denoiser)


@torch.no_grad()
def take_over(denoiser: nn.Module, start: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Write these values, by names as `named_full_tensors` gives them, into the adapters of all `names`."""
    places = dict(denoiser.named_parameters())
    own = {name.replace(".default.", "."): name for name in places if ".default." in name}
    for name, value in start.items():
        for adapter in names:
            places[own[name].replace(".default.", f".{adapter}.")].copy_(value)


class Adapters:
    """The adapters of a denoiser, and which of them computes. Only `default` ever requires gradients.

    PEFT's own switch visits all modules and sets what requires gradients anew, for each of thousands of parameters. A
    policy is entered many times a step: here the adapted layers are found once, and what differs is flipped.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        """Find the adapted layers of a denoiser whose adapters are all there, and compute with `default`."""
        module: Any = denoiser
        module.enable_adapters()
        module.set_adapter("default")
        for name, parameter in denoiser.named_parameters():  # PEFT has just set the flags of the adapters alone
            parameter.requires_grad_(".default." in name)
        self.layers = adapted_layers(denoiser)
        self._copied = [part for part in denoiser.modules() if isinstance(part, ModulesToSaveWrapper)]
        self.use("default")

    def use(self, name: str | None) -> None:
        """Compute with the adapter of this name, None: with none."""
        for layer in (*self.layers, *self._copied):
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = [name]


def publish_to_adapter(denoiser: nn.Module, copy: ShardedCopy, name: str) -> None:
    """Write a copy of the masters, rounded, into the frozen adapter of that name. Every rank calls."""
    parameters: dict[str, Any] = dict(denoiser.named_parameters())
    pairs = [(parameters[n.replace(".default.", f".{name}.")], q) for n, q in parameters.items() if ".default." in n]
    with torch.no_grad(), copy.applied():
        for target, source in pairs:
            if copy.shards.stage == 3:
                target.ds_tensor.copy_(source.ds_tensor)
            else:
                target.data.copy_(source.data)
    if copy.shards.stage == 3:
        refresh_gathered([target for target, _ in pairs])
