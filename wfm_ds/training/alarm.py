"""Alarm of held-out judges: the trained reward rises, and they fall.

Both are compared with the first evaluation, sample by sample, by the statistics of `wfm evaluate`. One look at p < .05
would raise a false alarm in most runs that are evaluated twenty times; so it takes p < .01, after Holm's correction
over the judges, a fall of a tenth of a standard deviation at least, and the same judge at two evaluations in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wfm_ds.evaluation.paired import Array, Difference, difference
from wfm_ds.evaluation.verdict import fallen
from wfm_ds.storage.atomic import finite_or_none

LEVEL = 0.01
PROMPTS = 32
"""With so many prompts a fall of half a standard deviation is rarely missed; with fewer it often is."""


class Alarm:
    """Remembers the first evaluation and who fell at the last one. The same on every rank, as scores are."""

    def __init__(self, key: Sequence[Any]) -> None:
        """key: JSON of what is evaluated; another one makes what was remembered useless."""
        self._key = list(key)
        self._first: dict[str, Array] = {}  # total and judges at the first evaluation
        self._suspects: set[str] = set()
        self.fell: dict[str, Difference] = {}  # judges that raise the alarm now

    def look(self, total: Array | None, judges: Mapping[str, Array]) -> dict[str, float]:
        """Take an evaluation; `total` [P, S]: the reward that is trained on, None in a run without. Returns metrics,
        from the second evaluation on; `fell` is set."""
        now = {**({} if total is None else {"": total}), **judges}
        if not self._first:
            self._first = now
            return {}
        gaps = {name: difference(self._first[name], scores) for name, scores in now.items()}
        fell = fallen({name: gap for name, gap in gaps.items() if gap and name}, LEVEL)
        rose = (whole := gaps.get("")) is not None and whole.estimate.rose
        suspects = set(fell) if rose else set()
        known = {name: gap for name in sorted(suspects & self._suspects) if (gap := gaps[name])}
        self._suspects, self.fell = suspects, known
        changes = {f"val/judge/{name}/change": gap.estimate.value for name, gap in gaps.items() if gap and name}
        return changes | ({} if total is None else {"val/alarm": float(bool(self.fell))})

    def sentence(self) -> str:
        """Say who fell."""
        fell = ", ".join(f"{name} by {-gap.z:.2g} sd" for name, gap in self.fell.items())
        return f"the trained reward rose and {fell} fell since the first evaluation, at two evaluations in a row"

    def state(self) -> dict[str, Any]:
        """Everything remembered, as JSON."""
        rows = {name: scores.tolist() for name, scores in self._first.items()}
        first = {name: [[finite_or_none(one) for one in row] for row in table] for name, table in rows.items()}
        return {"key": self._key, "first": first, "suspects": sorted(self._suspects)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; from nothing if other prompts, seeds or judges are evaluated now."""
        if state.get("key") == self._key:
            self._first = {name: np.array(rows, np.float64) for name, rows in state["first"].items()}
            self._suspects = set(state["suspects"])
