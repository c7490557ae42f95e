"""DenoiserEngine, which trains the denoiser with DeepSpeed.

A policy is a set of weights: `train` (the trained weights), `old`, `ref`, `ema`, and the extra and frozen adapters of a
LoRA run. In this module, an update is an optimizer step that was not skipped.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, cast

import deepspeed
import peft
import torch
from torch import Tensor, nn

from wfm_ds.distributed.accelerator import ranks_per_node
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.world import World
from wfm_ds.engine.adapter_layers import use_merged_weights
from wfm_ds.engine.cuda_graphs import GraphReplayer
from wfm_ds.engine.flop_counter import FlopCount, FlopCounter
from wfm_ds.engine.optimizer import ExtraAdapter, accumulate_in_float32, build_optimizer
from wfm_ds.engine.optimizer_steps import OptimizerSteps, ema_decay
from wfm_ds.engine.policies import (
    NO_ADAPTERS,
    AdapterDropout,
    Adapters,
    AdapterTensors,
    check_adapter_names,
    write_adapter,
)
from wfm_ds.engine.preparation import DTYPES, TokenSharding, prepare_denoiser
from wfm_ds.engine.shards import Flats, ShardedCopy, adapter_state_name, persistent_buffers
from wfm_ds.engine.step_checks import GradientWatch, PartLookup, RankGuard, single_part
from wfm_ds.errors import GatherError, describe_error
from wfm_ds.recipe.deepspeed import build_deepspeed_config, policy_copies
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import OptimizerRecipe
from wfm_ds.tensor_memory import copy_to_host
from wfm_ds.types import DEFAULT_ADAPTER
from wfm_ds.ulysses.install import install_ulysses

MERGED_POLICY = "merged"  # name of the active policy while an adapter is merged into the weights
NO_EXTRA_ADAPTERS: Mapping[str, ExtraAdapter] = MappingProxyType({})


class EngineForward:
    """The denoiser that model families call. It runs the active policy and has the attributes of the module."""

    # Model families do not get the DeepSpeed engine itself, because its `config` would hide diffusers' `config`.
    def __init__(self, engine: DenoiserEngine) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the denoiser with the active policy. All ranks must make the same calls in the same order."""
        LIVENESS.start_operation("a forward pass of the denoiser")
        engine = self._engine
        if engine.flop_counter is not None:
            is_base = engine.uses_lora and engine.active_policy in ("ref", MERGED_POLICY)
            engine.flop_counter.record_forward(
                args, kwargs, with_gradient=torch.is_grad_enabled(), with_adapters=not is_base
            )
        if engine.graphs is not None and engine.is_replaying:
            return engine.graphs(engine.active_policy, args, kwargs)
        if engine.dropout is not None and engine.active_policy == "train":
            with engine.dropout.seed_masks(engine.num_updates + engine.num_skipped, engine.world.device):
                return engine.ds(*args, **kwargs)
        return engine.ds(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.module, name)


class DenoiserEngine(OptimizerSteps):
    """A denoiser with its DeepSpeed engine and its policies."""

    def __init__(
        self,
        ds: Any,
        module: nn.Module,
        recipe: Recipe,
        world: World,
        policies: frozenset[str],
        total_updates: int,
        flop_counter: FlopCounter | None,
        adapters: Adapters | None,
        gradient_watches: Mapping[str, GradientWatch],
        optimizer_options: Mapping[str, OptimizerRecipe],
        frozen_adapters: Sequence[str],
    ) -> None:
        """Do not call the constructor. Use `build` instead.

        ds: result of deepspeed.initialize for `module`. adapters: None in full training. gradient_watches,
        optimizer_options: one entry per trained adapter; in full training, only `default`.
        """
        super().__init__(ds, recipe, world, total_updates, adapters, gradient_watches, optimizer_options)
        self.module = module
        self.policies = policies
        self.uses_lora = adapters is not None
        self.flop_counter = flop_counter
        self.forward_module = cast(nn.Module, EngineForward(self))
        self.copies = {name: ShardedCopy(self.shards) for name in sorted(policy_copies(policies, lora=self.uses_lora))}
        self._adapter_policies = (*self.adapter_updates, *frozen_adapters)  # policies with an adapter but no copy
        # Policies with a copy that is newer than the adapter of the same name.
        self._stale_adapters: set[str] = set()
        uses_graphs = recipe.rollout is not None and recipe.rollout.cuda_graph
        self.graphs = GraphReplayer(ds, module.parameters) if uses_graphs else None
        self.is_replaying = False
        uses_dropout = recipe.lora is not None and recipe.lora.dropout > 0
        self.dropout = AdapterDropout(module, recipe.run.seed, world.rank) if uses_dropout else None
        self._guard = RankGuard(world) if recipe.engine.guard else None
        self._last_ema_update = 0  # value of num_updates at the last call of update_ema

    @classmethod
    def build(
        cls,
        denoiser: nn.Module,
        recipe: Recipe,
        world: World,
        *,
        lora_targets: Sequence[str],
        policies: frozenset[str],
        accumulation: int,
        total_updates: int,
        block_classes: Sequence[type[nn.Module]] = (),
        frozen: AbstractSet[str] = frozenset(),
        initial_adapter: AdapterTensors | None = None,
        extra_adapters: Mapping[str, ExtraAdapter] = NO_EXTRA_ADAPTERS,
        frozen_adapters: Mapping[str, AdapterTensors] = NO_ADAPTERS,
        count_flops: bool = True,
        shard_tokens: TokenSharding = install_ulysses,
        find_part: PartLookup = single_part,
    ) -> DenoiserEngine:
        """Prepare the denoiser and create its DeepSpeed engine and policy copies. All ranks must call this.

        denoiser: a diffusers model with the same weights on every rank, which is changed in place.
        lora_targets: name suffixes of the layers to adapt; `lora.target_modules` in the recipe overrides them.
        policies: the policies that the run needs besides `train`: a subset of old, ref and ema.
        accumulation: number of backward passes per optimizer step. total_updates: number of optimizer steps of the run.
        block_classes: classes of the denoiser's repeated blocks. frozen: names of parameters that full training does
        not train.
        initial_adapter: initial adapter tensors, named as in `iter_full_tensors`.
        extra_adapters: {name: options} of adapters to train in addition to `default`. They start equal to `default`.
        frozen_adapters: {name: tensors} of adapters that are never trained.
        count_flops: whether to count FLOPs. If so, tensor arguments of the denoiser must have one row per sample.
        shard_tokens: function that installs sequence parallelism over the ranks of a replica. find_part: see
        GradientWatch.

        Raises RecipeError if the DeepSpeed JSON or the LoRA targets are invalid, and UserError if the denoiser does not
        support sequence parallelism or the attention kernel. Raises ValueError for extra or frozen adapters if LoRA is
        disabled, a name is invalid or a tensor does not fit.
        """
        unknown = policies - {"old", "ref", "ema"}
        if unknown:
            raise ValueError(f"policies must be old, ref or ema, not {', '.join(sorted(unknown))}")
        check_adapter_names((*extra_adapters, *frozen_adapters), lora=recipe.lora is not None)
        config = build_deepspeed_config(
            recipe,
            accumulation=accumulation,
            policies=policies,
            world_size=world.size,
            ranks_per_node=ranks_per_node(world.size),
        )
        dtype = DTYPES[recipe.model.dtype]
        targets = (recipe.lora and recipe.lora.target_modules) or list(lora_targets)
        # The counter copies the denoiser, so create it before the weights are partitioned.
        work = FlopCounter.from_denoiser(denoiser, recipe, targets, frozen) if world.is_main and count_flops else None
        names = sorted(policy_copies(policies, lora=True))
        adapters = prepare_denoiser(
            denoiser,
            recipe,
            world,
            config,
            targets=targets,
            names=names,
            block_classes=block_classes,
            frozen=frozen,
            initial_adapter=initial_adapter,
            extra_adapters=tuple(extra_adapters),
            frozen_adapters=frozen_adapters,
            shard_tokens=shard_tokens,
        )
        extra_options = {name: extra.optimizer_options(recipe.optimizer) for name, extra in extra_adapters.items()}
        options = {DEFAULT_ADAPTER: recipe.optimizer, **extra_options}
        watches = {
            name: GradientWatch(denoiser, frozen=frozen, find_part=find_part, adapter=name if extra_options else None)
            for name in options
        }
        optimizer = build_optimizer(denoiser, recipe.optimizer, world.device, extra_options)
        ds = deepspeed.initialize(model=denoiser, optimizer=optimizer, config=config, dist_init_required=False)[0]
        if ds.zero_optimization_stage() == 1 and dtype != torch.float32:
            accumulate_in_float32(ds)
        frozen_names = tuple(frozen_adapters)
        return cls(ds, denoiser, recipe, world, policies, total_updates, work, adapters, watches, options, frozen_names)

    # Forward passes

    @contextlib.contextmanager
    def replay_graphs(self) -> Iterator[None]:
        """Use CUDA graphs for forward passes without gradient inside the context, if the recipe enables them."""
        self.is_replaying = True
        if self.graphs is not None:
            self.graphs.drop_stale_recordings()
        try:
            yield
        finally:
            self.is_replaying = False

    def pop_flop_count(self) -> FlopCount | None:
        """Return the FLOPs of rank 0's forward and backward passes since the last call. Other ranks get None."""
        return None if self.flop_counter is None else self.flop_counter.pop_count()

    def discard_flop_count(self) -> None:
        if self.flop_counter is not None:
            self.flop_counter.discard()

    def check_ranks_agree(self, *what: object, inputs: Sequence[Tensor] = ()) -> None:
        """Raise an error on all ranks if their next forward passes differ. Does nothing with `engine.guard: false`.

        The arguments are those of `RankGuard.compare_ranks`.
        """
        if self._guard is not None:
            self._guard.compare_ranks(*what, inputs=inputs)

    @contextlib.contextmanager
    def use_policy(self, name: str, *, merge: bool = False) -> Iterator[None]:
        """Make forward passes inside the context use the weights of a policy.

        name: `train`, a policy copy, an extra adapter or a frozen adapter.
        merge: whether to merge the policy's adapter into the weights, which LoRA at ZeRO-3 does not support.

        All ranks must enter and leave the context together. Contexts cannot be nested. Gradients are disabled inside
        the context, unless `train` is already active and `merge` is false. Switching policies takes time, so group
        forward passes by policy.
        """
        self._require_trained_policy(f"use_policy({name!r})")
        if name == self.active_policy == "train" and not merge:
            yield
            return
        if name != "train" and name not in self._adapter_policies:
            self._require_policy(name)
        if name in self._stale_adapters:
            write_adapter(self.module, self.copies[name], name)
            self._stale_adapters.remove(name)
        trained_policy, self._is_using_policy = self.active_policy, True
        self.active_policy = MERGED_POLICY if merge else name
        try:
            with torch.no_grad(), self._switch_weights(name, merge):
                yield
        finally:
            self.active_policy, self._is_using_policy = trained_policy, False

    @contextlib.contextmanager
    def _switch_weights(self, name: str, merge: bool) -> Iterator[None]:
        if self._adapters is None:
            with self.copies[name].use_weights():
                yield
            return
        adapter = {"train": DEFAULT_ADAPTER, "ref": None}.get(name, name)
        self._adapters.activate(None if merge else adapter)
        try:
            with use_merged_weights(self._adapters.layers, adapter) if merge and adapter else contextlib.nullcontext():
                yield
        finally:
            self._adapters.activate(self.trained_adapter)

    # Policies

    def update_policy(self, name: str, decay: float) -> None:
        """Set the copy `old` or `ema` to decay * copy + (1 - decay) * trained weights. All ranks must call this."""
        self._require_trained_policy("update_policy")
        if name == "ref":
            raise ValueError("ref is frozen: only old and ema follow the trained weights")
        self._require_policy(name)
        self.copies[name].lerp_(decay)
        if self.uses_lora:
            self._stale_adapters.add(name)  # its adapter is written at the next forward pass that needs it

    def update_ema(self) -> None:
        """Update `ema` with the recipe's decay, unless the last step was skipped.

        All ranks must call this after each step.
        """
        options, update = self.recipe.ema, self.num_updates
        if options is None or update == self._last_ema_update:
            return
        self._last_ema_update = update
        if update % options.every == 0:
            self.update_policy("ema", ema_decay(options.decay, update))

    def policy_distance(self, policy: str) -> float:
        """Return norm(trained weights - policy) / norm(policy) over the trained tensors. All ranks must call this."""
        masters, flats = self.shards.master_weights(), self._policy_flats(policy)
        sums = torch.zeros(2, dtype=torch.float64, device=masters[0].device)
        for parameter in self.shards.slices:
            theta, other = self.shards.local_elements(parameter, masters), self.shards.local_elements(parameter, flats)
            sums += torch.stack([(theta - other).double().square().sum(), other.double().square().sum()])
        difference, norm = sums.tolist()
        total = self.world.sum_over_ranks({"difference": difference, "norm": norm})
        return math.sqrt(total["difference"] / total["norm"])

    def iter_full_tensors(
        self, policy: str, *, dtype: torch.dtype = torch.float32, owners: Mapping[str, int] | None = None
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, full tensor) for each tensor of a policy. All ranks must iterate to the end.

        Rank 0 gets CPU tensors, and other ranks get None instead of a tensor. Trained tensors are the policy's fp32
        master weights. In full training, yields all parameters and persistent buffers with their diffusers names. In
        LoRA training, yields the adapter's tensors with names such as `transformer_blocks.0.attn.to_k.lora_A.weight`.

        dtype: dtype to which trained tensors are rounded, on the device. owners: {name: rank that gets this tensor}, in
        pinned memory on GPUs; rank 0 gets tensors that are not listed. None: rank 0 gets all.
        """
        flats = self._policy_flats(policy)
        for name, parameter in self.module.named_parameters():
            if parameter in self.shards.slices:
                LIVENESS.record_progress()
                public_name = name.replace(".default.", ".")
                owner = 0 if owners is None else owners.get(public_name, 0)
                try:
                    tensor = self.shards.gather_parameter(parameter, flats, self.world.device, owner)
                    if tensor is not None:
                        tensor = tensor.to(dtype)
                        tensor = tensor.cpu() if owners is None else copy_to_host(tensor)
                except Exception as error:
                    raise GatherError(f"gathering {name}: {describe_error(error)}") from error
                yield public_name, tensor
                del tensor
        if not self.uses_lora:
            for name, buffer in persistent_buffers(self.module):
                owner = 0 if owners is None else owners.get(name, 0)
                yield name, buffer.detach().cpu().clone() if self.world.rank == owner else None

    # Checkpoints

    def step_counters(self) -> dict[str, int]:
        """Return the numbers of updates and of skipped steps, for checkpoints. They are equal on all ranks."""
        counters = {"updates": self.num_updates, "skipped": self.num_skipped, "ema_seen": self._last_ema_update}
        return counters | {adapter_state_name(n, "updates"): updates for n, updates in self.adapter_updates.items()}

    def shard_states(self) -> dict[str, list[Tensor]]:
        """Return this rank's shards of all states that training changes, as {name: one tensor per optimizer group}.

        The names are `train`, each policy that changes during training, and `optimizer.NAME` for each optimizer state.
        The name for an extra adapter is adapter_state_name(adapter, name). A tensor with 0 dimensions is a number for
        the whole group, such as AdamW's step. The tensors are views that the next step overwrites.
        """
        states = self.shards.training_states()
        states |= {name: list(copy.flats) for name, copy in self._moving_copies().items()}
        for adapter, shards in self.extra_shards.items():
            states |= {adapter_state_name(adapter, name): flats for name, flats in shards.training_states().items()}
        return states

    @torch.no_grad()
    def restore_state(self, counters: Mapping[str, int], states: Mapping[str, Flats]) -> None:
        """Restore the engine from results of `step_counters` and `shard_states`. All ranks must call this."""
        self._require_trained_policy("restore_state")
        self.num_updates, self.num_skipped = counters["updates"], counters["skipped"]
        self._last_ema_update = counters["ema_seen"]
        self.shards.load_training_states(states)
        for adapter, shards in self.extra_shards.items():
            self.adapter_updates[adapter] = counters[adapter_state_name(adapter, "updates")]
            prefix = adapter_state_name(adapter, "")
            own = {name.removeprefix(prefix): flats for name, flats in states.items() if name.startswith(prefix)}
            shards.load_training_states(own)
        for name, copy in self._moving_copies().items():
            torch._foreach_copy_(copy.flats, list(states[name]))
        if self.uses_lora:
            self._stale_adapters |= self.copies.keys()

    def _moving_copies(self) -> dict[str, ShardedCopy]:
        return {name: copy for name, copy in self.copies.items() if name != "ref"}

    def lora_config(self) -> peft.LoraConfig | None:
        """Return the adapter's PEFT configuration, or None in full training."""
        return cast(Any, self.module).peft_config[DEFAULT_ADAPTER] if self.uses_lora else None

    def _policy_flats(self, policy: str) -> Sequence[Tensor]:
        if policy == "train":
            return self.shards.master_weights()
        if self.uses_lora and policy == "ref":
            raise ValueError("ref has no tensors in a LoRA run: it is the base model without adapter")
        self._require_policy(policy)
        return self.copies[policy].flats

    def _require_policy(self, name: str) -> None:
        if name in self._adapter_policies:
            raise ValueError(f"{name} is an adapter without policy copy: only use_policy and train_adapter accept it")
        if name not in self.policies:
            names = " ".join([*sorted(self.policies), *self._adapter_policies])
            raise ValueError(f"unknown policy {name}; this engine has train {names}")
