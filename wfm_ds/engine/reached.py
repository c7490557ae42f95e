"""The watch over trained parameters that no backward pass reaches.

Such a one has no gradient, and AdamW moves it all the same, by weight decay alone: a silent loss of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

from torch import nn

from wfm_ds.distributed.world import World
from wfm_ds.errors import ModelError

PartOf = Callable[[str], str]
NAMED = 3  # in the error, of however many there are


def one_part(name: str) -> str:
    """Return the part of a network that every step runs as a whole."""
    return ""


class Reached:
    """Notes the parameters that get a gradient, by hooks that are gone after the first optimizer step, or after the
    first that runs their part of the network.

    A gradient of zeros is a gradient: LoRA's A has no other in the first step. Hooks run on the host, beside autograd;
    no device is waited for.
    """

    def __init__(
        self, module: nn.Module, *, frozen: AbstractSet[str] = frozenset(), part_of: PartOf = one_part
    ) -> None:
        """Watch all of a module that trains but adapters of layers whose weight is in `frozen`: they do nothing, and
        B stays 0. part_of: the part of the network of a parameter's name; a step may leave whole parts out."""
        self._part_of = part_of
        self._watched: dict[str, Any] = {}
        self._seen: set[str] = set()
        self._judged = False  # some part
        parameter: Any
        for name, parameter in module.named_parameters():
            layer, adapter, _ = name.partition(".lora_")
            if parameter.requires_grad and not (adapter and f"{layer}.weight" in frozen):
                self._watched[name] = parameter.register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[Any], None]:
        return lambda _: self._seen.add(name)

    def check(self, world: World) -> None:
        """Collective, before an optimizer step. Raises ModelError, on all ranks alike, for parameters of which no rank
        has a gradient, though it has one of their part of the network."""
        if not self._watched:
            return
        seen = world.maxima({name: float(name in self._seen) for name in self._watched})
        parts = {self._part_of(name) for name, reached in seen.items() if reached}
        if not parts and not self._judged:  # else the step ran a part that was judged before
            parts = set(map(self._part_of, seen))
        self._judged = True
        judged = [name for name in seen if self._part_of(name) in parts]
        for name in judged:
            self._watched.pop(name).remove()
        if missed := [name.replace(".default", "") for name in judged if not seen[name]]:
            more = f" and {len(missed) - NAMED} more" if len(missed) > NAMED else ""
            error = ModelError(
                f"{', '.join(missed[:NAMED])}{more}: no gradient reached what is to train, and weight decay alone "
                "would move it; name it in the family's `frozen` (a reasoner's in language.freeze), or leave its layer "
                "out of lora.target_modules"
            )
            error.agreed = True
            raise error
