"""The goals of a day on one GPU, and the results for them.

An eager run cannot exceed the roofline of its operators (roofline.py), so recipes as shipped are compared with it. A
compiled run fuses operators. Its goals are ratios to the published loop, which is eager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.calls import GPU_TESTS, LORA, against_name
from benchmarks.gpu.variants import AS_SHIPPED, LEVERS

Row = dict[str, Any]
Tables = Mapping[str, Sequence[Row]]  # rows by line
TESTS_GOAL = "no wait for the device in the denoise loop, bit-equal resume, and the other tests of tests/gpu"


@dataclass(frozen=True, slots=True)
class Goal:
    """A minimum or a range for a number in the rows of some lines."""

    what: str
    find_value: Callable[[Tables], float | None]  # None if a line of `needs` has no such number
    needs: tuple[str, ...]  # names of lines
    least: float
    most: float | None = None

    @property
    def wanted(self) -> str:
        return f"at least {self.least:g}" if self.most is None else f"{self.least:g} to {self.most:g}"

    def is_met(self, value: float) -> bool:
        return self.least <= value and (self.most is None or value <= self.most)


def first_value(tables: Tables, line: str, column: str) -> float | None:
    """Return the value of a column in the first row of this line that has it."""
    return next((row[column] for row in tables.get(line, ()) if column in row), None)


def speedup_goal(what: str, recipe: str, variant: str, least: float) -> Goal:
    """Return the goal for the ratio of a variant of a recipe to the published loop."""
    line = against_name(recipe, variant)
    return Goal(what, lambda tables: first_value(tables, line, "times as fast"), (line,), least)


def mfu_goal(what: str, recipe: str, phase: str) -> Goal:
    """Return the goal for the MFU of a phase, as shipped, relative to the highest MFU of its eager operators."""
    steps, roofline = f"steps {recipe}", f"roofline {recipe}"

    def find_part(tables: Tables) -> float | None:
        limits = [row for row in tables.get(roofline, ()) if row.get("phase") == phase]
        limit = first_value({roofline: limits}, roofline, "highest MFU, eager")
        mfu = first_value(tables, steps, f"{phase} MFU")
        return None if mfu is None or limit is None else mfu / limit

    return Goal(f"MFU of {what}, as shipped, of the eager limit", find_part, (steps, roofline), 0.9)


def memory_goal() -> Goal:
    """Return the goal for the peak memory: the row with the ratio to the estimate that is farthest from 1."""
    needs, column = tuple(f"steps {recipe}" for recipe in LORA[:2]), "allocated / estimated"

    def find_farthest(tables: Tables) -> float | None:
        if any(first_value(tables, line, column) is None for line in needs):
            return None
        values = [float(row[column]) for rows in tables.values() for row in rows if column in row]
        return max(values, key=lambda value: abs(value - 1))

    return Goal("peak memory relative to the estimate, farthest from 1", find_farthest, needs, 0.85, 1.15)


def attention_gain(tables: Tables) -> float | None:
    rows = tables.get("videos cosmos2b", ())
    gains = [row["times as fast"] for row in rows if "times as fast" in row and row["what"] != "forward, native"]
    return max(gains, default=None)


GOALS = (
    speedup_goal("SFT compared with the example script, times as fast", "sd3_image_sft_lora", AS_SHIPPED, 1.3),
    speedup_goal(
        "DiffusionNFT with all levers compared with the published loop, times as fast",
        *("sd3_nft", LEVERS["sd3_nft"], 1.5),
    ),
    speedup_goal(
        "Flow-GRPO with all levers compared with the published loop, times as fast",
        *("sd3_flow_grpo", LEVERS["sd3_flow_grpo"], 1.75),
    ),
    mfu_goal("DiffusionNFT rollouts", "sd3_nft", "rollout"),
    mfu_goal("DiffusionNFT training", "sd3_nft", "train"),
    mfu_goal("Flow-GRPO rollouts", "sd3_flow_grpo", "rollout"),
    mfu_goal("Flow-GRPO training", "sd3_flow_grpo", "train"),
    Goal("Cosmos 704p forward by attention alone, times as fast", attention_gain, ("videos cosmos2b",), 1.3),
    memory_goal(),
)


def check_goals(tables: Tables, statuses: Mapping[str, str]) -> list[Row]:
    """Return a row for each goal. statuses: ends of all lines of the day."""
    rows: list[Row] = []
    for goal in GOALS:
        value = goal.find_value(tables)
        met = "not measured" if value is None else "yes" if goal.is_met(value) else "no"
        rows.append({"goal": goal.what, "wanted": goal.wanted, "found": value, "met": met})
    tests = {name: status for name, status in statuses.items() if name.startswith(GPU_TESTS)}
    if not tests or "not run" in tests.values():
        met = "not measured"
    else:
        met = "yes" if set(tests.values()) == {"done"} else "no"
    return [*rows, {"goal": TESTS_GOAL, "wanted": "passed", "found": "; ".join(tests.values()), "met": met}]


def measurable_goals(done: Collection[str], planned: Collection[str]) -> list[str]:
    """Return the goals that can be checked once the lines `done` have run. planned: all lines of the day."""
    tests = {name for name in planned if name.startswith(GPU_TESTS)}
    needs = [*((goal.what, set(goal.needs)) for goal in GOALS), (TESTS_GOAL, tests)]
    return [what for what, lines in needs if lines.issubset(done)]
