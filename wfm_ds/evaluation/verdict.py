"""Verdicts: whether held-out rewards confirm the gain in the trained rewards."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from wfm_ds.evaluation.paired_statistics import Difference, adjust_holm

VerdictName = Literal["hacked", "improved", "unconfirmed", "no gain", "cannot tell"]

SIGNIFICANCE_LEVEL = 0.05
MIN_DECREASE = 0.1
"""Smallest decrease that counts, in units of the standard deviation of the base model's scores."""


@dataclass(frozen=True, slots=True)
class Verdict:
    name: VerdictName
    message: str
    decreases: Mapping[str, float]  # {held-out reward that decreased: Holm-adjusted p value}


def decide_verdict(
    trained: str, total: Difference | None, held_out: Mapping[str, Difference], *, related: Collection[str] = ()
) -> Verdict:
    """Decide the verdict from the score differences between a model and its base model.

    trained: names of the trained rewards, for the message. "" if there are no trained rewards.
    total: difference in the weighted sum of the trained rewards. None if the sum was not measured.
    held_out: {reward: difference} for rewards that the model was not trained on.
    related: held-out rewards that use the same network as a trained reward. Their increase does not confirm a gain.
    """
    if not trained:
        return Verdict("cannot tell", "the model was not trained on rewards", {})
    if total is None:
        return Verdict("cannot tell", f"none of the trained rewards was measured ({trained})", {})
    if total.estimate.half_width is None:
        return Verdict("cannot tell", f"{total.estimate.num_prompts} prompts are too few for an interval", {})
    decreases = find_decreases(held_out, SIGNIFICANCE_LEVEL)
    if not total.estimate.is_above_zero:
        also = f"; {list_decreases(decreases, held_out)}" if decreases else ""
        return Verdict("no gain", f"{trained} did not increase{also}", decreases)
    if decreases:
        comparisons = f"{len(held_out)} held-out reward{'' if len(held_out) == 1 else 's'}"
        return Verdict(
            "hacked",
            f"{trained} increased, but {list_decreases(decreases, held_out)} (Holm over {comparisons})",
            decreases,
        )
    if not held_out:
        return Verdict(
            "cannot tell", f"{trained} increased, but no held-out reward was measured: add one with --held-out", {}
        )
    if confirming := [
        name for name, difference in held_out.items() if difference.estimate.is_above_zero and name not in related
    ]:
        return Verdict(
            "improved", f"{trained} and {', '.join(confirming)} increased, and no held-out reward decreased", {}
        )
    undetectable = ", ".join(
        f"{name} by less than {difference.estimate.half_width or 0:.3g}" for name, difference in held_out.items()
    )
    message = f"{trained} increased, but no unrelated held-out reward did; decreases below detection: {undetectable}"
    return Verdict("unconfirmed", message, {})


def find_decreases(held_out: Mapping[str, Difference], level: float) -> dict[str, float]:
    """Return {reward: p value} for the held-out rewards that decreased significantly.

    The p values are Holm-adjusted. A decrease is significant if p < `level` and if it is at least MIN_DECREASE.
    """
    adjusted = adjust_holm([difference.p_decrease for difference in held_out.values()])
    return {
        name: p
        for (name, difference), p in zip(held_out.items(), adjusted, strict=True)
        if p < level and difference.z <= -MIN_DECREASE
    }


def list_decreases(decreases: Mapping[str, float], held_out: Mapping[str, Difference]) -> str:
    """Describe the decreases as text, in units of the standard deviation of the base model's scores."""
    return ", ".join(f"{name} decreased by {-held_out[name].z:.2g} sd (p = {p:.1g})" for name, p in decreases.items())
