"""Check that every trained parameter receives a gradient, and that all ranks run the same forward passes."""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wfm_ds.distributed.world import World
from wfm_ds.errors import ModelError

PartLookup = Callable[[str], str]
MAX_NAMED = 3  # maximum number of parameter names in the error message


def single_part(name: str) -> str:
    """Return the same part for every parameter name, for networks that run all their parameters in every step."""
    return ""


class GradientWatch:
    """Checks that all trained parameters receive a gradient.

    A gradient of zeros counts as received, because the gradient of LoRA's matrix A is zero in the first step.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        frozen: AbstractSet[str] = frozenset(),
        find_part: PartLookup = single_part,
        adapter: str | None = None,
    ) -> None:
        """Watch all trained parameters of a module.

        frozen: names of weights that do not affect the output. Adapters of these weights are not watched. find_part:
        maps a parameter's name to its network component, for networks with components that only some steps run, such as
        experts. adapter: watch only this adapter. None: watch all adapters.
        """
        self._find_part, self._adapter = find_part, adapter
        self.watched: dict[str, Any] = {}  # {parameter name: its hook}; empty once all components were checked
        self._names_with_gradient: set[str] = set()
        self._has_checked = False  # whether a component was checked in an earlier step
        parameter: Any
        for name, parameter in module.named_parameters():
            layer, is_lora, _ = name.partition(".lora_")
            is_watched = adapter is None or f".{adapter}." in name
            if is_watched and parameter.requires_grad and not (is_lora and f"{layer}.weight" in frozen):
                self.watched[name] = parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: self._names_with_gradient.add(name)
                )

    def check_gradients(self, world: World) -> None:
        """Check that the watched parameters received gradients. All ranks must call this before the optimizer step.

        Raises ModelError on all ranks if a parameter of a component that was run has no gradient on any rank.
        """
        reached = world.max_over_ranks({name: float(name in self._names_with_gradient) for name in self.watched})
        parts = {self._find_part(name) for name, has_gradient in reached.items() if has_gradient}
        # A step without gradients for unchecked components may have run only components that were already checked.
        if not parts and not self._has_checked:
            parts = set(map(self._find_part, reached))
        self._has_checked = True
        checked = [name for name in reached if self._find_part(name) in parts]
        for name in checked:
            self.watched.pop(name).remove()
        if missed := [name.replace(f".{self._adapter or 'default'}", "") for name in checked if not reached[name]]:
            more = f" and {len(missed) - MAX_NAMED} more" if len(missed) > MAX_NAMED else ""
            error = ModelError(
                f"{', '.join(missed[:MAX_NAMED])}{more}: trained parameters received no gradient, so only weight decay "
                "would change them; add them to the family's unused_parameter_patterns (for a reasoner: "
                "language.freeze), or remove their layers from lora.target_modules"
            )
            error.agreed = True
            raise error


class RankGuard:
    """Checks that all ranks run the same forward pass, so that a mismatch raises an error instead of hanging.

    All ranks must create it at the same point. `world` needs a long timeout, because a rank may be late while it
    decodes videos or compiles.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # A separate process group, so that torch cannot match the all-reduce with another collective.
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=world.timeout_s))
        self.num_checks = 0

    def compare_ranks(self, *what: object, inputs: Sequence[Tensor] = ()) -> None:
        """Check that all ranks are about to run the same forward pass.

        All ranks must call this before each forward pass.

        what: values that identify the forward pass (policy, gradient, shape, ...). inputs: tensors that must be
        bit-equal on the ranks of a replica. Raises RuntimeError on all ranks if values or inputs differ, or if a rank
        does not call this in time.
        """
        self.num_checks += 1
        world = self._world
        # Row 0 compares all ranks. Row 1 + r compares the ranks of replica r. The initial value is below any checksum.
        marks = torch.full((1 + world.dp_size, 2), -(2**40))
        marks[0] = _signed_pair(zlib.crc32(repr((self.num_checks, what)).encode()))
        if world.sp_size > 1:
            marks[1 + world.dp_rank] = _signed_pair(tensor_checksum(inputs))
        try:
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {world.rank} waits at forward pass {self.num_checks} {what}, but another rank did not reach "
                f"it within {world.timeout_s:g} s: all ranks must run the same forward passes"
            ) from error
        if int(marks[0].sum()):
            forwards = world.gather(repr(what))
            raise RuntimeError(f"ranks disagree at forward pass {self.num_checks}: {forwards}")
        different = [replica for replica, both in enumerate(marks[1:]) if world.sp_size > 1 and int(both.sum())]
        if different:
            raise RuntimeError(
                f"forward pass {self.num_checks} {what}: the ranks of the replicas {different} hold different inputs, "
                "but they must work on the same samples"
            )


def _signed_pair(mark: int) -> torch.Tensor:
    """Return [mark, -mark]. Their maxima over all ranks sum to 0 only if the marks of all ranks are equal."""
    return torch.tensor([mark, -mark])


def tensor_checksum(tensors: Sequence[Tensor]) -> int:
    mark = 0
    for tensor in tensors:
        mark = zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes(), mark)
    return mark
