"""GenEval's questions about a picture (arXiv 2310.11513): which objects, how many, of which colour, and where."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

POSITION_MARGIN = 0.1  # of the two objects' sizes, by which their centres must be apart
DIRECTION = 0.5  # share of the offset that must lie along an axis
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")


@dataclass(frozen=True, slots=True)
class Found:
    """One object."""

    name: str
    box: tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels
    confidence: float
    mask: npt.NDArray[np.bool_] | None = None  # [H,W]


@dataclass(frozen=True, slots=True)
class SceneScore:
    """Scores of one picture.

    `soft`: the mean over the clauses of `include`; `correct`: as GenEval has it, at least as many objects as asked for;
    `strict`: exactly as many.
    """

    soft: float
    correct: bool
    strict: bool


def judge(
    objects: Mapping[str, Sequence[Found]],
    include: Sequence[Mapping[str, Any]],
    exclude: Sequence[Mapping[str, Any]],
    colors_of: Callable[[str, Sequence[Found]], Sequence[str]],
) -> SceneScore:
    """`objects`: by name, the most confident first. `include`: [{class, count, color?, position?: [relation, index]}],
    the position being relative to the clause of that index. `exclude`: [{class, count}], fewer than count of which may
    be there. `colors_of`: the colour of each of some objects of a name."""
    strict, shares = _checked(objects, include, colors_of, exact=True)
    correct, _ = _checked(objects, include, colors_of, exact=False)
    clean = all(len(objects.get(one["class"], ())) < one["count"] for one in exclude)
    return SceneScore(sum(shares) / len(shares), correct and clean, strict)


def _checked(
    objects: Mapping[str, Sequence[Found]],
    include: Sequence[Mapping[str, Any]],
    colors_of: Callable[[str, Sequence[Found]], Sequence[str]],
    *,
    exact: bool,
) -> tuple[bool, list[float]]:
    """Return True if all clauses hold, and the share of each that does. `exact`: further objects spoil a clause."""
    shares: list[float] = []
    matched: list[Sequence[Found] | None] = []
    for clause in include:
        name, count = clause["class"], clause["count"]
        there = list(objects.get(name, ()))
        found = there if exact else there[:count]
        good = len(found) == count
        shares.append(1.0 - abs(count - len(there)) / count)
        if not good and ("color" in clause or "position" in clause):
            shares.append(0.0)
        if good and "color" in clause:
            right = list(colors_of(name, found)).count(clause["color"])
            shares.append(1.0 - abs(count - right) / count)
            good = right == count
        if good and "position" in clause:
            relation, index = clause["position"]
            target = matched[index]
            good = target is not None and all(relation in relations(a, b) for a in found for b in target)
            shares.append(float(good))
        matched.append(found if good else None)
    return all(m is not None for m in matched), shares


def relations(a: Found, b: Found) -> set[str]:
    """Return the place of a as seen from b: left of, right of, above, below; none if they are too near to tell."""
    centre = [((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in (a.box, b.box)]
    size = [(abs(box[2] - box[0]), abs(box[3] - box[1])) for box in (a.box, b.box)]
    offset = [centre[0][axis] - centre[1][axis] for axis in (0, 1)]
    apart = [
        math.copysign(max(abs(offset[axis]) - POSITION_MARGIN * (size[0][axis] + size[1][axis]), 0.0), offset[axis])
        for axis in (0, 1)
    ]
    if max(abs(apart[0]), abs(apart[1])) < 1e-3:
        return set()
    dx, dy = (part / math.hypot(*offset) for part in apart)
    found = {"left of": dx < -DIRECTION, "right of": dx > DIRECTION, "above": dy < -DIRECTION, "below": dy > DIRECTION}
    return {relation for relation, holds in found.items() if holds}


def problem_in(metadata: Mapping[str, Any]) -> str:
    """Return a sentence about wrong clauses in an item's metadata, "" if all are good."""
    for key in ("include", "exclude"):
        clauses = metadata.get(key, [])
        if not isinstance(clauses, list) or (key == "include" and not clauses):
            return f"the metadata `{key}` is not a list of clauses"
        for number, clause in enumerate(clauses):
            good = isinstance(clause, dict) and isinstance(clause.get("class"), str)
            if not good or type(clause.get("count")) is not int or clause["count"] < 1:
                return f"the metadata `{key}` has a clause without class and count: {str(clause)[:60]}"
            if "color" in clause and clause["color"] not in COLORS:
                return f"the colour {str(clause['color'])[:20]!r} is none of {', '.join(COLORS)}"
            where = clause.get("position", ["", 0])
            if not isinstance(where, list) or len(where) != 2 or where[1] not in range(max(1, number)):
                return f"the position {str(where)[:60]} names no earlier clause"
    return ""
