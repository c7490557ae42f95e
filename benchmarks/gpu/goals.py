"""The goals of a day on one H100, and the results for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Tables = Mapping[str, Sequence[Row]]  # rows by line


@dataclass(frozen=True, slots=True)
class Goal:
    """A minimum or a range for a number in a line's rows."""

    what: str
    find_value: Callable[[Tables], float | None]
    least: float
    most: float | None = None

    @property
    def wanted(self) -> str:
        return f"at least {self.least:g}" if self.most is None else f"{self.least:g} to {self.most:g}"

    def is_met(self, value: float) -> bool:
        return self.least <= value and (self.most is None or value <= self.most)


def largest_value(line: str, column: str) -> Callable[[Tables], float | None]:
    """Return a function: the largest value of a column in lines with this prefix, or None if no row has it."""

    def find_largest(tables: Tables) -> float | None:
        rows = [row for name, of_line in tables.items() if name.startswith(line) for row in of_line]
        return max((row[column] for row in rows if column in row), default=None)

    return find_largest


def only_value(line: str, column: str) -> Callable[[Tables], float | None]:
    """Return a function: the value of a column in the only row of this line."""
    return lambda tables: next((row[column] for row in tables.get(line, ()) if column in row), None)


def farthest_from_one(column: str) -> Callable[[Tables], float | None]:
    """Return a function: the value of a column, over all lines, with the largest distance from 1."""

    def find_farthest(tables: Tables) -> float | None:
        values = [row[column] for rows in tables.values() for row in rows if column in row]
        return max(values, key=lambda value: abs(value - 1), default=None)

    return find_farthest


def attention_gain(tables: Tables) -> float | None:
    rows = tables.get("videos cosmos2b", ())
    gains = [row["times as fast"] for row in rows if "times as fast" in row and row["what"] != "forward, native"]
    return max(gains, default=None)


def speedup(recipe: str) -> Callable[[Tables], float | None]:
    """Return a function: the largest ratio to the published loop over the variants of a recipe."""
    return largest_value(f"against {recipe}", "times as fast")


GOALS = (
    Goal("SFT compared with the example script, times as fast", speedup("sd3_image_sft_lora"), 1.3),
    Goal("DiffusionNFT compared with the published loop, times as fast", speedup("sd3_nft"), 1.5),
    Goal("Flow-GRPO compared with the published loop, times as fast", speedup("sd3_flow_grpo"), 2.0),
    Goal("MFU of SD3.5 medium rollouts, as shipped", only_value("steps sd3_nft", "rollout MFU"), 0.45),
    Goal("MFU of SD3.5 medium rollouts, best variant", largest_value("variants sd3_nft", "rollout MFU"), 0.45),
    Goal("MFU of SD3.5 medium training, as shipped", only_value("steps sd3_nft", "train MFU"), 0.40),
    Goal("MFU of SD3.5 medium training, best variant", largest_value("variants sd3_nft", "train MFU"), 0.40),
    Goal("Cosmos 704p forward by attention alone, times as fast", attention_gain, 1.3),
    Goal(
        "peak memory relative to the estimate, farthest from 1",
        farthest_from_one("allocated / estimated"),
        0.85,
        1.15,
    ),
)
TESTS = "pytest -m gpu"


def check_goals(tables: Tables, statuses: Mapping[str, str]) -> list[Row]:
    """Return a row for each goal. Goals that were not measured are not met."""
    rows: list[Row] = []
    for goal in GOALS:
        value = goal.find_value(tables)
        met = "not measured" if value is None else "yes" if goal.is_met(value) else "no"
        rows.append({"goal": goal.what, "wanted": goal.wanted, "found": value, "met": met})
    status = statuses.get(TESTS, "not run")
    met = {"done": "yes", "not run": "not measured"}.get(status, "no")
    tests = "no wait for the device in the denoise loop, bit-equal resume, and the other tests of tests/gpu"
    return [*rows, {"goal": tests, "wanted": "passed", "found": status, "met": met}]
