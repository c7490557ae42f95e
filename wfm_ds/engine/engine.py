"""DenoiserEngine: the denoiser with DeepSpeed.

Handles loss scaling, optimizer steps, the learning rate, the active policy, and gathering of full tensors. Does not
depend on algorithms, model families or files. theta denotes the trained weights (policy `train`). The other policies
are old, ref and ema (policies.py). An update is an optimizer step that was not skipped.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, cast

import deepspeed
import peft
import torch
from torch import Tensor, nn

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.world import World, ranks_per_node
from wfm_ds.engine.adapter_layers import use_merged_weights
from wfm_ds.engine.cuda_graphs import GraphReplayer
from wfm_ds.engine.flop_counter import FlopCount, FlopCounter
from wfm_ds.engine.optimizer import accumulate_in_float32, build_optimizer, ema_decay, learning_rate
from wfm_ds.engine.policies import AdapterDropout, Adapters, Flats, ShardedCopy, Shards, write_adapter
from wfm_ds.engine.preparation import DTYPES, TokenSharding, prepare_denoiser
from wfm_ds.engine.step_checks import GradientWatch, PartLookup, RankGuard, single_part
from wfm_ds.recipe.deepspeed import build_deepspeed_config, policy_copies
from wfm_ds.recipe.schema import Recipe
from wfm_ds.ulysses.install import install_ulysses

MERGED_POLICY = "merged"  # name of the active policy while an adapter is merged into the weights
OPTIMIZER_PREFIX = "optimizer."  # prefix of the names of the optimizer's states


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of an optimizer step. All ranks get equal values."""

    # False if a gradient was not finite on some rank, or if there were no loss terms; no weight changed on any rank
    is_applied: bool
    grad_norm: float  # global, before clipping, unscaled; NaN if not applied
    is_clipped: bool
    lr: float  # learning rate of this step, also if it was not applied


class EngineForward:
    """The denoiser that model families call. A call runs the active policy. Attributes are those of the module."""

    # Not the DeepSpeed engine itself, because its `config` would hide diffusers' `config`.
    def __init__(self, engine: DenoiserEngine) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the denoiser with the active policy.

        Collective: all ranks must make the same calls in the same order.
        """
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


class DenoiserEngine:
    """A denoiser with its DeepSpeed engine and its policies. All ranks must call the methods marked "Collective"."""

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
        gradient_watch: GradientWatch,
    ) -> None:
        """Use `build` instead. ds: result of deepspeed.initialize for `module`. adapters: None in full training."""
        self.ds = ds
        self.module = module
        self.recipe = recipe
        self.world = world
        self.policies = policies
        self.uses_lora = adapters is not None
        self.accumulation = int(ds.gradient_accumulation_steps())
        self.total_updates = total_updates
        self.flop_counter = flop_counter
        self.forward_module = cast(nn.Module, EngineForward(self))
        self.active_policy = "train"
        self.num_updates = 0
        self.num_skipped = 0
        self.shards = Shards(ds)
        self.copies = {name: ShardedCopy(self.shards) for name in sorted(policy_copies(policies, lora=self.uses_lora))}
        self._adapters = adapters
        self._gradient_watch = gradient_watch
        self._stale_adapters: set[str] = (
            set()
        )  # policies with copies that changed after their adapters were last written
        uses_graphs = recipe.rollout is not None and recipe.rollout.cuda_graph
        self.graphs = GraphReplayer(ds, module.parameters) if uses_graphs else None
        self.is_replaying = False
        uses_dropout = recipe.lora is not None and recipe.lora.dropout > 0
        self.dropout = AdapterDropout(module, recipe.run.seed, world.rank) if uses_dropout else None
        self._guard = RankGuard(world) if recipe.engine.guard else None
        self._num_backwards = 0  # since the last step
        self._expected_backwards = self.accumulation
        self._last_ema_update = 0  # last update included in the average

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
        initial_adapter: Mapping[str, Tensor] | None = None,
        count_flops: bool = True,
        shard_tokens: TokenSharding = install_ulysses,
        find_part: PartLookup = single_part,
    ) -> DenoiserEngine:
        """Prepare the denoiser (preparation.py) and create its DeepSpeed engine and policy copies. Collective.

        denoiser: a diffusers model with the same weights on every rank. It is changed in place.
        lora_targets: name suffixes of the layers to adapt; `lora.target_modules` in the recipe overrides them.
        policies: the required policies in addition to `train`: a subset of old, ref and ema.
        accumulation: number of backward passes per optimizer step.
        total_updates: number of optimizer steps of the run, the length of the learning rate schedule.
        block_classes: classes of the repeated blocks.
        frozen: names of parameters that full training does not train.
        initial_adapter: initial adapter tensors, named as in `iter_full_tensors`.
        count_flops: whether to count FLOPs. If so, tensor arguments of the denoiser must have one row per sample.
        shard_tokens: function that installs sequence parallelism over the ranks of a replica.
        find_part: maps a parameter's name to its network component, such as an expert. A step may run only some
        components.

        Raises RecipeError if the DeepSpeed JSON or the LoRA targets are invalid, and UserError if the denoiser does not
        support sequence parallelism or the attention kernel.
        """
        unknown = policies - {"old", "ref", "ema"}
        if unknown:
            raise ValueError(f"policies must be old, ref or ema, not {', '.join(sorted(unknown))}")
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
            shard_tokens=shard_tokens,
        )
        reached = GradientWatch(denoiser, frozen=frozen, find_part=find_part)
        optimizer = build_optimizer(denoiser, recipe.optimizer, world.device)
        ds = deepspeed.initialize(model=denoiser, optimizer=optimizer, config=config, dist_init_required=False)[0]
        if ds.zero_optimization_stage() == 1 and dtype != torch.float32:
            accumulate_in_float32(ds)
        return cls(ds, denoiser, recipe, world, policies, total_updates, work, adapters, reached)

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
        """Return the FLOPs of rank 0's forward passes since the last call; None on other ranks."""
        return None if self.flop_counter is None else self.flop_counter.pop_count()

    def discard_flop_count(self) -> None:
        if self.flop_counter is not None:
            self.flop_counter.discard()

    def check_ranks_agree(self, *what: object, inputs: Sequence[Tensor] = ()) -> None:
        """Raise an error on all ranks if their next forward passes differ.

        Does nothing if the recipe key `engine.guard` is false.
        """
        if self._guard is not None:
            self._guard.compare_ranks(*what, inputs=inputs)

    @contextlib.contextmanager
    def use_policy(self, name: str, *, merge: bool = False) -> Iterator[None]:
        """Make the policy `name` active inside the context: forward passes use its weights.

        Collective. Cannot be nested.

        Gradients are enabled only for the policy `train` without `merge`. Group forward passes by policy, because every
        switch of the policy takes time. (It copies weights, and at ZeRO-3 it resets DeepSpeed's prefetch order.)

        merge: merge the policy's adapter into the weights (adapter_layers.py). LoRA at ZeRO-3 does not support this.
        """
        self._require_trained_policy(f"use_policy({name!r})")
        if name == "train" and not merge:
            yield
            return
        if name != "train":
            self._require_policy(name)
        if name in self._stale_adapters:
            write_adapter(self.module, self.copies[name], name)
            self._stale_adapters.remove(name)
        self.active_policy = MERGED_POLICY if merge else name
        try:
            with torch.no_grad(), self._switch_weights(name, merge):
                yield
        finally:
            self.active_policy = "train"

    @contextlib.contextmanager
    def _switch_weights(self, name: str, merge: bool) -> Iterator[None]:
        if self._adapters is None:
            with self.copies[name].use_weights():
                yield
            return
        adapter = {"train": "default", "ref": None}.get(name, name)
        self._adapters.activate(None if merge else adapter)
        try:
            with use_merged_weights(self._adapters.layers, adapter) if merge and adapter else contextlib.nullcontext():
                yield
        finally:
            self._adapters.activate("default")

    # Optimization

    def expect_backwards(self, num_backwards: int) -> None:
        """Set the number of backward passes of the next optimizer step. Collective.

        Call it before the first of these backward passes.
        """
        if num_backwards < 1 or self._num_backwards:
            raise RuntimeError(
                f"cannot expect {num_backwards} backward passes: {self._num_backwards} of the step are done"
            )
        self._expected_backwards = num_backwards

    def backward(self, loss_sum: Tensor, num_terms: int) -> None:
        """Back-propagate the loss of one micro-step. Collective.

        The micro-steps of an optimizer step add up to the gradient of the mean loss over all N loss terms.

        loss_sum: sum of this rank's loss terms in this micro-step, fp32 scalar, equal on the ranks of a replica.
        num_terms: N >= 1, the number of valid loss terms of the optimizer step over all replicas and micro-steps. For a
        step without loss terms call `skip_step`.
        """
        self._require_trained_policy("backward")
        if loss_sum.ndim != 0:
            raise ValueError(f"loss_sum must be a scalar, got shape {tuple(loss_sum.shape)}")
        if num_terms < 1:
            raise ValueError(f"a step with {num_terms} terms has no gradient: call skip_step()")
        if self._num_backwards == self._expected_backwards:
            raise RuntimeError(
                f"call step() first: all {self._expected_backwards} backward passes of the optimizer step are done"
            )
        self._num_backwards += 1
        LIVENESS.start_operation("a backward pass of the denoiser")
        last = self._num_backwards == self._expected_backwards
        self.ds.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks and divides by its own number of micro-steps, whatever the actual number. The
        # ranks of a replica hold partial sums of one gradient, so the factor is the number of ranks, not of replicas.
        scale = self.world.size * self.accumulation / num_terms
        self.ds.backward(loss_sum * scale)
        if not last:
            self.ds.step()  # only counts the micro-step

    def step(self) -> StepResult:
        """Update the weights after all backward passes of the step. Collective.

        If a gradient is not finite on any rank, no rank changes its weights. Raises ModelError if a trained parameter
        received no gradient.
        """
        self._require_trained_policy("step")
        if self._num_backwards != self._expected_backwards:
            raise RuntimeError(f"step() after {self._num_backwards} of {self._expected_backwards} backward passes")
        self._num_backwards, self._expected_backwards = 0, self.accumulation
        if self._gradient_watch.watched:
            self._gradient_watch.check_gradients(self.world)
        LIVENESS.start_operation("an optimizer step")
        lr = learning_rate(self.recipe.optimizer, self.num_updates + 1, self.total_updates)
        for group in self.ds.optimizer.param_groups:
            group["lr"] = lr
        self.ds.step()
        self.shards.zero_gradients()
        if not self.ds.was_step_applied():
            self.num_skipped += 1
            return StepResult(is_applied=False, grad_norm=math.nan, is_clipped=False, lr=lr)
        self.num_updates += 1
        grad_norm, bound = float(self.ds.get_global_grad_norm()), self.recipe.engine.max_grad_norm
        return StepResult(is_applied=True, grad_norm=grad_norm, is_clipped=0 < bound < grad_norm, lr=lr)

    def skip_step(self) -> StepResult:
        """Skip an optimizer step without loss terms. All ranks call it instead of `backward` and `step`."""
        self._require_trained_policy("skip_step")
        if self._num_backwards:
            raise RuntimeError(f"skip_step() after {self._num_backwards} backward passes of a step")
        self.num_skipped += 1
        lr = learning_rate(self.recipe.optimizer, self.num_updates + 1, self.total_updates)
        return StepResult(is_applied=False, grad_norm=math.nan, is_clipped=False, lr=lr)

    # Policies

    def update_policy(self, name: str, decay: float) -> None:
        """Update the copy `old` or `ema`: copy <- decay * copy + (1 - decay) * trained weights. Collective."""
        self._require_trained_policy("update_policy")
        if name == "ref":
            raise ValueError("ref is frozen: only old and ema follow the trained weights")
        self._require_policy(name)
        self.copies[name].lerp_(decay)
        if self.uses_lora:
            self._stale_adapters.add(name)  # its adapter is written at the next forward pass that needs it

    def update_ema(self) -> None:
        """Update `ema` with the recipe's decay if the last step was applied. Call it after each step. Collective."""
        options, update = self.recipe.ema, self.num_updates
        if options is None or update == self._last_ema_update:
            return
        self._last_ema_update = update
        if update % options.every == 0:
            self.update_policy("ema", ema_decay(options.decay, update))

    def policy_distance(self, policy: str) -> float:
        """Return norm(trained weights - policy) / norm(policy) over the trained tensors. Collective."""
        masters, flats = self.shards.master_weights(), self._policy_flats(policy)
        sums = torch.zeros(2, dtype=torch.float64, device=masters[0].device)
        for parameter in self.shards.slices:
            theta, other = self.shards.local_elements(parameter, masters), self.shards.local_elements(parameter, flats)
            sums += torch.stack([(theta - other).double().square().sum(), other.double().square().sum()])
        difference, norm = sums.tolist()
        total = self.world.sum_over_ranks({"difference": difference, "norm": norm})
        return math.sqrt(total["difference"] / total["norm"])

    def iter_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, full tensor) of a policy. Collective: all ranks must iterate to the end.

        Tensors are on the CPU of rank 0, and None on other ranks. Trained tensors are fp32, from the policy's master
        weights. Full training yields all parameters and persistent buffers with their diffusers names. LoRA yields the
        adapter's tensors; names omit the adapter's name (`transformer_blocks.0.attn.to_k.lora_A.weight`).
        """
        flats = self._policy_flats(policy)
        for name, parameter in self.module.named_parameters():
            if parameter in self.shards.slices:
                LIVENESS.record_progress()
                yield name.replace(".default.", "."), self.shards.gather_parameter(parameter, flats, self.world.device)
        if not self.uses_lora:
            for name, buffer in persistent_buffers(self.module):
                yield name, buffer.detach().cpu().clone() if self.world.is_main else None

    # Checkpoints

    def step_counters(self) -> dict[str, int]:
        """Return the numbers of updates and skipped steps, for checkpoints. All ranks get equal numbers."""
        return {"updates": self.num_updates, "skipped": self.num_skipped, "ema_seen": self._last_ema_update}

    def shard_states(self) -> dict[str, list[Tensor]]:
        """Return this rank's shards of all states that training changes, as {name: one tensor per optimizer group}.

        The names are `train`, each policy that changes during training, and `optimizer.NAME` for each optimizer state.
        `shards.slices_by_name()` tells which elements of a tensor belong to which parameter. A tensor with 0 dimensions
        is a number for the whole group, such as AdamW's step. The tensors are views that the next step overwrites.
        """
        states = {
            "train": self.shards.master_weights(),
            **{n: list(copy.flats) for n, copy in self._moving_copies().items()},
        }
        group_states = self.shards.optimizer_states()
        for name in group_states[0]:
            states[OPTIMIZER_PREFIX + name] = [state[name].detach() for state in group_states]
        return states

    @torch.no_grad()
    def restore_state(self, counters: Mapping[str, int], states: Mapping[str, Flats]) -> None:
        """Restore a state returned by `step_counters` and `shard_states`, and set the weights to match. Collective."""
        self._require_trained_policy("restore_state")
        self.num_updates, self.num_skipped = counters["updates"], counters["skipped"]
        self._last_ema_update = counters["ema_seen"]
        masters = self.shards.master_weights()
        torch._foreach_copy_(masters, list(states["train"]))
        self.shards.install_weights(masters)
        for name, copy in self._moving_copies().items():
            torch._foreach_copy_(copy.flats, list(states[name]))
        optimizer_states = {
            n.removeprefix(OPTIMIZER_PREFIX): flats for n, flats in states.items() if n.startswith(OPTIMIZER_PREFIX)
        }
        if optimizer_states:
            self.shards.load_optimizer_states(optimizer_states)
        if self.uses_lora:
            self._stale_adapters |= self.copies.keys()

    def _moving_copies(self) -> dict[str, ShardedCopy]:
        return {name: copy for name, copy in self.copies.items() if name != "ref"}

    def lora_config(self) -> peft.LoraConfig | None:
        """Return the adapter's PEFT configuration; None in full training."""
        return cast(Any, self.module).peft_config["default"] if self.uses_lora else None

    def _policy_flats(self, policy: str) -> Sequence[Tensor]:
        if policy == "train":
            return self.shards.master_weights()
        if self.uses_lora and policy == "ref":
            raise ValueError("ref has no tensors in a LoRA run: it is the base model without adapter")
        self._require_policy(policy)
        return self.copies[policy].flats

    def _require_policy(self, name: str) -> None:
        if name not in self.policies:
            raise ValueError(f"unknown policy {name}; this engine has train {' '.join(sorted(self.policies))}")

    def _require_trained_policy(self, what: str) -> None:
        if self.active_policy != "train":
            raise RuntimeError(
                f"{what} inside use_policy({self.active_policy!r}): the weights of another policy are in use"
            )


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) of each buffer that model files contain, such as SD3's pos_embed.pos_embed."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
