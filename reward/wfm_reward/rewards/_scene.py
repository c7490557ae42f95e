"""GenEval's checks of an image (arXiv 2310.11513): classes, counts, colours and positions of objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

POSITION_MARGIN = 0.1  # minimum distance of centres / sum of both sizes, along an axis
MIN_AXIS_SHARE = 0.5  # minimum component of the normalized offset along an axis
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")


@dataclass(frozen=True, slots=True)
class DetectedObject:
    name: str
    box: tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels
    confidence: float
    mask: npt.NDArray[np.bool_] | None = None  # [H,W]


@dataclass(frozen=True, slots=True)
class SceneScore:
    """Scores of one image.

    soft: mean of the scores (at most 1) of all required counts, colours and positions.
    correct: whether all clauses in `include`, with at least `count` objects each, and in `exclude` hold, as in GenEval.
    strict: whether all clauses in `include` hold, with exactly `count` objects each.
    """

    soft: float
    correct: bool
    strict: bool


def score_scene(
    objects: Mapping[str, Sequence[DetectedObject]],
    include: Sequence[Mapping[str, Any]],
    exclude: Sequence[Mapping[str, Any]],
    classify_colors: Callable[[str, Sequence[DetectedObject]], Sequence[str]],
) -> SceneScore:
    """Score detected objects against the clauses of a prompt.

    objects: {class: detected objects, most confident first}.
    include: [{class, count, color?, position?: [relation, index]}]. A position is relative to the clause `index`.
    exclude: [{class, count}]. The image must contain fewer than `count` objects of the class.
    classify_colors: function that returns the colour of each object, given a class name and objects.
    """
    strict, shares = _check_clauses(objects, include, classify_colors, exact=True)
    correct, _ = _check_clauses(objects, include, classify_colors, exact=False)
    clean = all(len(objects.get(clause["class"], ())) < clause["count"] for clause in exclude)
    return SceneScore(sum(shares) / len(shares), correct and clean, strict)


def _check_clauses(
    objects: Mapping[str, Sequence[DetectedObject]],
    include: Sequence[Mapping[str, Any]],
    classify_colors: Callable[[str, Sequence[DetectedObject]], Sequence[str]],
    *,
    exact: bool,
) -> tuple[bool, list[float]]:
    """Return whether all clauses hold, and one score for each required count, colour and position.

    exact: whether a clause fails if the image has more objects than required.
    """
    shares: list[float] = []
    matched: list[Sequence[DetectedObject] | None] = []
    for clause in include:
        name, count = clause["class"], clause["count"]
        candidates = list(objects.get(name, ()))
        selected = candidates if exact else candidates[:count]
        good = len(selected) == count
        shares.append(1.0 - abs(count - len(candidates)) / count)
        if not good and ("color" in clause or "position" in clause):
            shares.append(0.0)
        if good and "color" in clause:
            right = list(classify_colors(name, selected)).count(clause["color"])
            shares.append(1.0 - abs(count - right) / count)
            good = right == count
        if good and "position" in clause:
            relation, index = clause["position"]
            target = matched[index]
            good = target is not None and all(relation in spatial_relations(a, b) for a in selected for b in target)
            shares.append(float(good))
        matched.append(selected if good else None)
    return all(m is not None for m in matched), shares


def spatial_relations(a: DetectedObject, b: DetectedObject) -> set[str]:
    """Return the position of `a` relative to `b`, as a subset of {left of, right of, above, below}.

    The subset is empty if the objects are close to each other.
    """
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
    holds = {
        "left of": dx < -MIN_AXIS_SHARE,
        "right of": dx > MIN_AXIS_SHARE,
        "above": dy < -MIN_AXIS_SHARE,
        "below": dy > MIN_AXIS_SHARE,
    }
    return {relation for relation, is_true in holds.items() if is_true}


def find_metadata_problem(metadata: Mapping[str, Any]) -> str:
    """Return an error message if an item's metadata has invalid clauses, otherwise ""."""
    for key in ("include", "exclude"):
        clauses = metadata.get(key, [])
        if not isinstance(clauses, list) or (key == "include" and not clauses):
            return f"the metadata `{key}` is not a list of clauses"
        for number, clause in enumerate(clauses):
            good = isinstance(clause, dict) and isinstance(clause.get("class"), str)
            if not good or type(clause.get("count")) is not int or clause["count"] < 1:
                return f"the metadata `{key}` has a clause without class and count: {str(clause)[:60]}"
            if "color" in clause and clause["color"] not in COLORS:
                return f"unknown colour {str(clause['color'])[:20]!r}; it must be one of {', '.join(COLORS)}"
            position = clause.get("position", ["", 0])
            if not isinstance(position, list) or len(position) != 2 or position[1] not in range(max(1, number)):
                return f"the position {str(position)[:60]} does not refer to an earlier clause"
    return ""
