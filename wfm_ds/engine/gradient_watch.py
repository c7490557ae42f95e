"""Detection of trained parameters that no backward pass reaches. AdamW's weight decay would shrink them silently."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

from torch import nn

from wfm_ds.distributed.world import World
from wfm_ds.errors import ModelError

PartLookup = Callable[[str], str]
MAX_NAMED = 3  # maximum number of names in the error


def single_part(name: str) -> str:
    """Return one component for all parameter names. For networks that every step runs completely."""
    return ""


class GradientWatch:
    """Checks that all trained parameters receive a gradient.

    Hooks on the parameters record gradients without device synchronization. The hooks of a network component (e.g. an
    expert) are removed after the first optimizer step that runs it. A gradient of zeros counts, because LoRA's A has
    only zeros in the first step.
    """

    def __init__(
        self, module: nn.Module, *, frozen: AbstractSet[str] = frozenset(), find_part: PartLookup = single_part
    ) -> None:
        """Watch all trained parameters of a module.

        frozen: names of weights without effect on the output; their adapters are not watched, because their B stays 0.
        find_part: maps a parameter's name to its network component, such as an expert. A step may leave out components.
        """
        self._find_part = find_part
        self._watched: dict[str, Any] = {}
        self._names_with_gradient: set[str] = set()
        self._has_checked = False  # whether any component was checked before
        parameter: Any
        for name, parameter in module.named_parameters():
            layer, adapter, _ = name.partition(".lora_")
            if parameter.requires_grad and not (adapter and f"{layer}.weight" in frozen):
                self._watched[name] = parameter.register_post_accumulate_grad_hook(self._make_hook(name))

    def _make_hook(self, name: str) -> Callable[[Any], None]:
        return lambda _: self._names_with_gradient.add(name)

    def check_gradients(self, world: World) -> None:
        """Check that the watched parameters received gradients. Collective; call it before the optimizer step.

        Raises ModelError on all ranks if a component was run but one of its parameters has no gradient on any rank.
        """
        if not self._watched:
            return
        reached = world.max_over_ranks({name: float(name in self._names_with_gradient) for name in self._watched})
        parts = {self._find_part(name) for name, has_gradient in reached.items() if has_gradient}
        if not parts and not self._has_checked:  # otherwise the step ran a component that was checked before
            parts = set(map(self._find_part, reached))
        self._has_checked = True
        checked = [name for name in reached if self._find_part(name) in parts]
        for name in checked:
            self._watched.pop(name).remove()
        if missed := [name.replace(".default", "") for name in checked if not reached[name]]:
            more = f" and {len(missed) - MAX_NAMED} more" if len(missed) > MAX_NAMED else ""
            error = ModelError(
                f"{', '.join(missed[:MAX_NAMED])}{more}: trained parameters received no gradient, and weight decay "
                "alone would change them; add them to the family's `frozen` (for a reasoner: language.freeze), "
                "or remove their layers from lora.target_modules"
            )
            error.agreed = True
            raise error
