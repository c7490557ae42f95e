"""DenoiserEngine: DeepSpeed around the denoiser.

Owns the scale of the loss, the optimizer step, the learning rate, which policy the weights show, and the way from
shards to whole tensors. Knows no algorithm, no family and no file. Words: theta is the policy `train`; old, ref and ema
are the others (policy.py). An update is an optimizer step that was applied.
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
from wfm_ds.engine.accumulation import accumulate_in_float32
from wfm_ds.engine.dropout import AdapterDropout
from wfm_ds.engine.lockstep import Guard
from wfm_ds.engine.merging import merged
from wfm_ds.engine.optimizer import build_optimizer
from wfm_ds.engine.policy import Adapters, Flats, ShardedCopy, Shards, publish_to_adapter
from wfm_ds.engine.preparation import DTYPES, Share, prepare
from wfm_ds.engine.reached import PartOf, Reached, one_part
from wfm_ds.engine.replay import Replays
from wfm_ds.engine.schedules import ema_decay, learning_rate
from wfm_ds.engine.work import Work, WorkCounter
from wfm_ds.recipe.deepspeed import deepspeed_config, policy_copies
from wfm_ds.recipe.schema import Recipe
from wfm_ds.ulysses.install import install

MERGED = "merged"  # the active policy, whichever it is, while its adapter is in the weights
OPTIMIZER = "optimizer."  # before the names of the optimizer's states


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of an optimizer step. The same on every rank."""

    applied: bool  # False: a gradient was not finite somewhere, or there was no term; nothing moved on any rank
    grad_norm: float  # global, before clipping, unscaled; NaN if not applied
    clipped: bool
    lr: float  # the rate of this step, or the one that it would have had


class EngineForward:
    """The denoiser as a family sees it: calls go through DeepSpeed, attributes (config, dtype, ...) are the module's.

    DeepSpeed must see each forward whose output is differentiated, and its own `config` would hide diffusers'.
    """

    def __init__(self, engine: DenoiserEngine) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.module, name)


class DenoiserEngine:
    """One denoiser, its DeepSpeed engine and its policies. Every method marked collective is called by all ranks."""

    def __init__(
        self,
        ds: Any,
        module: nn.Module,
        recipe: Recipe,
        world: World,
        policies: frozenset[str],
        total_updates: int,
        work: WorkCounter | None,
        adapters: Adapters | None,
        reached: Reached,
    ) -> None:
        """Use `build`. `ds`: what deepspeed.initialize returned for `module`. adapters: of a LoRA run."""
        self.ds = ds
        self.module = module
        self.recipe = recipe
        self.world = world
        self.policies = policies
        self.lora = adapters is not None
        self.accumulation = int(ds.gradient_accumulation_steps())
        self.total_updates = total_updates
        self._work = work
        self.forward_module = cast(nn.Module, EngineForward(self))
        self.active = "train"
        self.num_updates = 0
        self.num_skipped = 0
        self.shards = Shards(ds)
        self.copies = {name: ShardedCopy(self.shards) for name in sorted(policy_copies(policies, lora=self.lora))}
        self._adapters = adapters
        self._reached = reached
        self._unpublished: set[str] = set()  # copies that have moved since their adapters were written
        wanted = recipe.rollout is not None and recipe.rollout.cuda_graph
        self._replays = Replays(ds, module.parameters) if wanted else None
        self._replaying = False
        drops = recipe.lora is not None and recipe.lora.dropout > 0
        self._dropout = AdapterDropout(module, recipe.run.seed, world.rank) if drops else None
        self._guard = Guard(world) if recipe.engine.guard else None
        self._num_backwards = 0  # since the last step
        self._due_backwards = self.accumulation
        self._ema_seen = 0  # the update that the average saw last

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
        start: Mapping[str, Tensor] | None = None,
        counts_work: bool = True,
        share: Share = install,
        part_of: PartOf = one_part,
    ) -> DenoiserEngine:
        """Collective. Prepare the denoiser for training (preparation.py), then DeepSpeed and copies.

        denoiser: a diffusers model with equal weights on all ranks; it is changed in place. lora_targets: suffixes of
        layers, unless the recipe names its own. policies: those wanted of old, ref, ema. accumulation: backward passes
        per optimizer step. total_updates: optimizer steps of the run, where the schedule ends. block_classes: the
        repeated blocks, for engine.compile. frozen: names of parameters that full training leaves as they are.
        start: initial values of the adapter's tensors, by their names in `named_full_tensors`.
        counts_work: note the FLOPs of forwards, whose arguments must have a row for each sample. share: has the ranks
        of a replica share a sample's tokens. part_of: by a parameter's name, the part of the network that a step may
        leave out (reached.py). Raises RecipeError for a DeepSpeed JSON or LoRA targets that cannot work, UserError for
        a denoiser whose tokens the ranks of a replica cannot share, or that an attention kernel cannot serve.
        """
        unknown = policies - {"old", "ref", "ema"}
        if unknown:
            raise ValueError(f"there are the policies old, ref and ema, not {', '.join(sorted(unknown))}")
        config = deepspeed_config(
            recipe,
            accumulation=accumulation,
            policies=policies,
            world_size=world.size,
            ranks_per_node=ranks_per_node(world.size),
        )
        dtype = DTYPES[recipe.model.dtype]
        targets = (recipe.lora and recipe.lora.target_modules) or list(lora_targets)
        # While it is whole.
        work = WorkCounter.of(denoiser, recipe, targets, frozen) if world.is_main and counts_work else None
        names = sorted(policy_copies(policies, lora=True))
        adapters = prepare(
            denoiser,
            recipe,
            world,
            config,
            targets=targets,
            names=names,
            block_classes=block_classes,
            frozen=frozen,
            start=start,
            share=share,
        )
        reached = Reached(denoiser, frozen=frozen, part_of=part_of)
        optimizer = build_optimizer(denoiser, recipe.optimizer, world.device)
        ds = deepspeed.initialize(model=denoiser, optimizer=optimizer, config=config, dist_init_required=False)[0]
        if ds.zero_optimization_stage() == 1 and dtype != torch.float32:
            accumulate_in_float32(ds)
        return cls(ds, denoiser, recipe, world, policies, total_updates, work, adapters, reached)

    # Forwards

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Collective. Run the denoiser under the active policy. All ranks do the same forwards in one order."""
        LIVENESS.begin("a forward of the denoiser")
        if self._work is not None:
            bare = self.lora and self.active in ("ref", MERGED)
            self._work.note(args, kwargs, differentiated=torch.is_grad_enabled(), adapters=not bare)
        if self._replaying and self._replays is not None:
            return self._replays(self.active, args, kwargs)
        if self._dropout is not None and self.active == "train":
            with self._dropout.drawn(self.num_updates + self.num_skipped, self.world.device):
                return self.ds(*args, **kwargs)
        return self.ds(*args, **kwargs)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Run the forwards inside, which have no gradient, from CUDA graphs if the recipe says so (replay.py)."""
        self._replaying = True
        if self._replays is not None:
            self._replays.begin()
        try:
            yield
        finally:
            self._replaying = False

    def take_work(self) -> Work | None:
        """FLOPs of this rank's forwards since the last call, on rank 0, which stands for all; None elsewhere."""
        return None if self._work is None else self._work.take()

    def forget_work(self) -> None:
        """Leave the forwards so far out of what `take_work` says next: they belong to no step."""
        if self._work is not None:
            self._work.clear()

    def guard_check(self, *what: object, inputs: Sequence[Tensor] = ()) -> None:
        """Raise on all ranks unless all are about to do the same (lockstep.py); without engine.guard, do nothing."""
        if self._guard is not None:
            self._guard.check(*what, inputs=inputs)

    @contextlib.contextmanager
    def policy(self, name: str, *, merge: bool = False) -> Iterator[None]:
        """Collective. Use this policy for the forwards inside, without gradient unless it is `train`. Does not nest.

        Group forwards by phase: each change of policy costs an exchange of weights, or ZeRO-3's prefetch order.
        merge: with its adapter in the weights (merging.py) and without gradient; for a LoRA that is not at ZeRO-3.
        """
        self._require_train(f"policy({name!r})")
        if name == "train" and not merge:
            yield
            return
        if name != "train":
            self._require_known(name)
        if name in self._unpublished:
            publish_to_adapter(self.module, self.copies[name], name)
            self._unpublished.remove(name)
        self.active = MERGED if merge else name
        try:
            with torch.no_grad(), self._shown(name, merge):
                yield
        finally:
            self.active = "train"

    @contextlib.contextmanager
    def _shown(self, name: str, merge: bool) -> Iterator[None]:
        if self._adapters is None:
            with self.copies[name].applied():
                yield
            return
        adapter = {"train": "default", "ref": None}.get(name, name)
        self._adapters.use(None if merge else adapter)
        try:
            with merged(self._adapters.layers, adapter) if merge and adapter else contextlib.nullcontext():
                yield
        finally:
            self._adapters.use("default")

    # Optimization

    def expect(self, num_backwards: int) -> None:
        """Expect this many backwards in the next optimizer step, not `accumulation`. Collective, before the first."""
        if num_backwards < 1 or self._num_backwards:
            raise RuntimeError(f"cannot expect {num_backwards} backwards after {self._num_backwards} of a step")
        self._due_backwards = num_backwards

    def backward(self, loss_sum: Tensor, num_terms: int) -> None:
        """Collective. Back-propagate a micro-step so that all of a step's give the gradient of (1/N) sum l.

        loss_sum: the sum of this rank's terms in this micro-step, fp32 scalar, equal on the ranks of a replica.
        num_terms: N, the valid terms of the whole optimizer step over all replicas and micro-steps, at least 1: a step
        without any is `skip`.
        """
        self._require_train("backward")
        if loss_sum.ndim != 0:
            raise ValueError(f"loss_sum must be a scalar, got the shape {tuple(loss_sum.shape)}")
        if num_terms < 1:
            raise ValueError(f"a step of {num_terms} terms has no gradient: call skip()")
        if self._num_backwards == self._due_backwards:
            raise RuntimeError(f"step() is due: {self._due_backwards} backwards make an optimizer step")
        self._num_backwards += 1
        LIVENESS.begin("a backward of the denoiser")
        last = self._num_backwards == self._due_backwards
        self.ds.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks and divides by its own number of micro-steps, however many there are. The ranks
        # of a replica hold parts of one gradient, which add up: the factor is all ranks, not the replicas.
        scale = self.world.size * self.accumulation / num_terms
        self.ds.backward(loss_sum * scale)
        if not last:
            self.ds.step()  # counts the micro-step, nothing else

    def step(self) -> StepResult:
        """Collective, after `accumulation` backwards. Update the weights, unless a gradient is not finite on any rank:
        then nothing moves on any. Raises ModelError if no backward reached some of what trains."""
        self._require_train("step")
        if self._num_backwards != self._due_backwards:
            raise RuntimeError(f"step() after {self._num_backwards} of {self._due_backwards} backwards")
        self._num_backwards, self._due_backwards = 0, self.accumulation
        self._reached.check(self.world)
        LIVENESS.begin("an optimizer step")
        lr = learning_rate(self.recipe.optimizer, self.num_updates + 1, self.total_updates)
        for group in self.ds.optimizer.param_groups:
            group["lr"] = lr
        self.ds.step()
        self.shards.forget_gradients()
        if not self.ds.was_step_applied():
            self.num_skipped += 1
            return StepResult(applied=False, grad_norm=math.nan, clipped=False, lr=lr)
        self.num_updates += 1
        grad_norm, bound = float(self.ds.get_global_grad_norm()), self.recipe.engine.max_grad_norm
        return StepResult(applied=True, grad_norm=grad_norm, clipped=0 < bound < grad_norm, lr=lr)

    def skip(self) -> StepResult:
        """Call on all ranks instead of a step's backwards and `step` if no rank has a term: no weight changes."""
        self._require_train("skip")
        if self._num_backwards:
            raise RuntimeError(f"skip() after {self._num_backwards} backwards of a step")
        self.num_skipped += 1
        lr = learning_rate(self.recipe.optimizer, self.num_updates + 1, self.total_updates)
        return StepResult(applied=False, grad_norm=math.nan, clipped=False, lr=lr)

    # Policies

    def update_policy(self, name: str, decay: float) -> None:
        """Collective. Move a copy: copy <- decay * copy + (1 - decay) * theta for `old` or `ema`; 0 copies theta."""
        self._require_train("update_policy")
        if name == "ref":
            raise ValueError("ref is frozen: only old and ema follow the trained weights")
        self._require_known(name)
        self.copies[name].lerp_(decay)
        if self.lora:
            self._unpublished.add(name)  # its adapter is written when a forward asks for it

    def update_ema(self) -> None:
        """Collective, after each step. Move `ema` by the recipe's schedule, unless the step was not applied."""
        options, update = self.recipe.ema, self.num_updates
        if options is None or update == self._ema_seen:
            return
        self._ema_seen = update
        if update % options.every == 0:
            self.update_policy("ema", ema_decay(options.decay, update))

    def distance(self, policy: str) -> float:
        """Collective. Return norm(theta - policy) / norm(policy) over the trained tensors."""
        masters, flats = self.shards.masters(), self._flats(policy)
        sums = torch.zeros(2, dtype=torch.float64, device=masters[0].device)
        for parameter in self.shards.pieces:
            theta, other = self.shards.own(parameter, masters), self.shards.own(parameter, flats)
            sums += torch.stack([(theta - other).double().square().sum(), other.double().square().sum()])
        difference, norm = sums.tolist()
        total = self.world.sums({"difference": difference, "norm": norm})
        return math.sqrt(total["difference"] / total["norm"])

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor | None]]:
        """Collective, item by item: all ranks exhaust it. Yield names with tensors on rank 0's CPU, None elsewhere.

        Trained tensors in fp32, from the masters of the policy. Full run: all parameters and persistent buffers under
        their diffusers names. LoRA run: the adapter of the policy, without the adapter's name
        (`transformer_blocks.0.attn.to_k.lora_A.weight`).
        """
        flats = self._flats(policy)
        for name, parameter in self.module.named_parameters():
            if parameter in self.shards.pieces:
                LIVENESS.advance()
                yield name.replace(".default.", "."), self.shards.gather(parameter, flats, self.world.device)
        if not self.lora:
            for name, buffer in persistent_buffers(self.module):
                yield name, buffer.detach().cpu().clone() if self.world.is_main else None

    # Checkpoints

    def counters(self) -> dict[str, int]:
        """The engine's counters, the same on every rank."""
        return {"updates": self.num_updates, "skipped": self.num_skipped, "ema_seen": self._ema_seen}

    def states(self) -> dict[str, list[Tensor]]:
        """This rank's share of all that training changes, by name: `train`, the policies that follow it, and the
        optimizer's states as `optimizer.NAME`. Of each name one tensor per optimizer group, cut as `shards.layout()`
        says; [] if it is one number for the whole group (AdamW's step). Views: they change with the next step."""
        states = {"train": self.shards.masters(), **{n: list(copy.flats) for n, copy in self._moving_copies().items()}}
        of_groups = self.shards.optimizer_states()
        for name in of_groups[0]:
            states[OPTIMIZER + name] = [of_group[name].detach() for of_group in of_groups]
        return states

    @torch.no_grad()
    def restore(self, counters: Mapping[str, int], states: Mapping[str, Flats]) -> None:
        """Collective. Take up what `counters` and `states` gave; the forwards follow."""
        self._require_train("restore")
        self.num_updates, self.num_skipped = counters["updates"], counters["skipped"]
        self._ema_seen = counters["ema_seen"]
        masters = self.shards.masters()
        torch._foreach_copy_(masters, list(states["train"]))
        self.shards.install(masters)
        for name, copy in self._moving_copies().items():
            torch._foreach_copy_(copy.flats, list(states[name]))
        of_optimizer = {n.removeprefix(OPTIMIZER): flats for n, flats in states.items() if n.startswith(OPTIMIZER)}
        if of_optimizer:
            self.shards.take_up(of_optimizer)
        if self.lora:
            self._unpublished |= self.copies.keys()

    def _moving_copies(self) -> dict[str, ShardedCopy]:
        """Copies of all policies but `ref`, which is what the engine was built with."""
        return {name: copy for name, copy in self.copies.items() if name != "ref"}

    def lora_config(self) -> peft.LoraConfig | None:
        """The configuration of the adapter; None in a full run."""
        return cast(Any, self.module).peft_config["default"] if self.lora else None

    def _flats(self, policy: str) -> Sequence[Tensor]:
        """This rank's fp32 values of a policy, as masters or copy."""
        if policy == "train":
            return self.shards.masters()
        if self.lora and policy == "ref":
            raise ValueError("ref has no tensors of its own in a LoRA run: it is the base without adapter")
        self._require_known(policy)
        return self.copies[policy].flats

    def _require_known(self, name: str) -> None:
        if name not in self.policies:
            raise ValueError(f"this engine has the policies train {' '.join(sorted(self.policies))}, not {name}")

    def _require_train(self, what: str) -> None:
        if self.active != "train":
            raise RuntimeError(f"{what} inside policy({self.active!r}): the weights are swapped")


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to a model's files (SD3's pos_embed.pos_embed is one), by name."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
