"""Find the rank that died, hung or failed and so ended the run, from the reports of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SETTLE_S = 2.0  # wait after the first failure, because the rank that caused it may report later than others
MAX_NAMED_RANKS = 8  # ranks listed in one message


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why a run ends, and the ranks that caused it."""

    ranks: tuple[int, ...]
    text: str
    stuck: bool = False  # whether these ranks are still running and can print their stack traces


@dataclass(slots=True)
class RankRecord:
    rank: int
    location: str  # host and process id, for messages
    heard_at_s: float
    advanced_at_s: float
    num_started: int = -1
    num_advances: int = -1
    operation: str = "start"
    state: Literal["runs", "done", "gone", "failed"] = "runs"
    reason: str = ""
    is_secondary: bool = False  # whether the rank failed because communication with another rank failed

    def describe(self) -> str:
        return f"rank {self.rank} ({self.location})"


class RankStates:
    """States of all ranks, from which `find_fault` deduces the fault. `now_s` is the current time in seconds."""

    def __init__(self, size: int, *, silent_s: float, stuck_s: float, max_gap_s: float) -> None:
        """silent_s: a rank without a heartbeat for this many seconds counts as gone.

        stuck_s: the run counts as stuck if no rank makes progress for this many seconds. max_gap_s: if more than this
        many seconds pass between two calls of `find_fault`, this process counts as suspended, and the excess time is
        ignored.
        """
        self.size, self.silent_s, self.stuck_s, self.max_gap_s = size, silent_s, stuck_s, max_gap_s
        self.last_check_s: float | None = None
        self.members: dict[int, RankRecord] = {}
        self.first_end_s: float | None = None  # time at which the first rank was gone or failed

    def add_rank(self, rank: int, location: str, now_s: float) -> None:
        self.members[rank] = RankRecord(rank, location, heard_at_s=now_s, advanced_at_s=now_s)

    def record_beat(self, rank: int, num_started: int, num_advances: int, operation: str, now_s: float) -> None:
        """Record a heartbeat.

        num_started: number of operations that the rank has started. All ranks run the same operations in the same
        order. num_advances: number of other signs of progress, which only show that the rank is not stuck. operation:
        the operation that the rank started last.
        """
        member = self.members[rank]
        member.heard_at_s = now_s
        if (num_started, num_advances) != (member.num_started, member.num_advances):
            member.num_started, member.num_advances = num_started, num_advances
            member.operation, member.advanced_at_s = operation, now_s

    def record_done(self, rank: int) -> None:
        self.members[rank].state = "done"

    def record_failure(self, rank: int, reason: str, is_secondary: bool, now_s: float) -> None:
        """Record that a rank failed. is_secondary: whether it failed because communication with other ranks failed."""
        member = self.members[rank]
        member.state, member.reason, member.is_secondary = "failed", reason, is_secondary
        self._record_end(now_s)

    def record_disconnect(self, rank: int, reason: str, now_s: float) -> None:
        """Record that a rank's connection closed. Unless the rank has finished or failed, it counts as gone."""
        member = self.members[rank]
        if member.state == "runs":
            member.state, member.reason = "gone", reason
            self._record_end(now_s)

    def _record_end(self, now_s: float) -> None:
        self.first_end_s = now_s if self.first_end_s is None else self.first_end_s

    def find_fault(self, now_s: float) -> Fault | None:
        """Return the fault that ends the run, if any, at least SETTLE_S seconds after the first failure.

        In this time, other ranks can report.
        """
        self._exclude_sleep(now_s)
        for member in self._ranks_in_state("runs"):
            if now_s - member.heard_at_s > self.silent_s:
                self.record_disconnect(member.rank, f"no sign of life for {now_s - member.heard_at_s:.0f} s", now_s)
        if self.first_end_s is not None:
            return self._blame_ended() if self._is_settled(now_s, self.first_end_s) else None
        return self._blame_stuck(now_s)

    def _is_settled(self, now_s: float, ended_at_s: float) -> bool:
        """Return whether the ranks have had enough time to report the cause of the failure at `ended_at_s`."""
        running, ended = self._ranks_in_state("runs"), [*self._ranks_in_state("gone"), *self._ranks_in_state("failed")]
        is_known = not all(member.is_secondary for member in ended) or all(m.heard_at_s > ended_at_s for m in running)
        return is_known and now_s - ended_at_s >= SETTLE_S

    def _exclude_sleep(self, now_s: float) -> None:
        slept_s = 0.0 if self.last_check_s is None else now_s - self.last_check_s - self.max_gap_s
        self.last_check_s = now_s
        if slept_s > 0:
            for member in self.members.values():
                member.heard_at_s = min(now_s, member.heard_at_s + slept_s)
                member.advanced_at_s = min(now_s, member.advanced_at_s + slept_s)

    def _blame_ended(self) -> Fault:
        gone = self._ranks_in_state("gone")
        if gone:
            reasons = " and ".join(dict.fromkeys(member.reason for member in gone))
            return blame_ranks(gone, f"gone: {reasons}; last seen at {gone[0].operation}")
        failed = self._ranks_in_state("failed")
        first = next((member for member in failed if not member.is_secondary), failed[0])
        most = max(member.num_started for member in failed)
        behind = [member for member in self._ranks_in_state("runs") if member.num_started < most]
        if first.is_secondary and behind:  # these ranks have not started the operation that failed
            least = min(member.num_started for member in behind)
            last = [member for member in behind if member.num_started == least]
            waited = f"{first.describe()} failed while it waited: {first.reason}"
            return blame_ranks(last, f"missing: at {last[0].operation}; {waited}", stuck=True)
        return Fault((first.rank,), f"{first.describe()} failed: {first.reason}")

    def _blame_stuck(self, now_s: float) -> Fault | None:
        running = self._ranks_in_state("runs")
        if len(running) < self.size or any(now_s - member.advanced_at_s <= self.stuck_s for member in running):
            return None
        least = min(member.num_started for member in running)
        last = [member for member in running if member.num_started == least]
        still_s = now_s - max(member.advanced_at_s for member in last)
        others = "all ranks are at this operation" if len(last) == self.size else "the other ranks wait for it"
        problem = f"stuck: no progress for {still_s:.0f} s at {last[0].operation}; {others}"
        return blame_ranks(last, problem, stuck=True)

    def _ranks_in_state(self, state: str) -> list[RankRecord]:
        return [self.members[rank] for rank in sorted(self.members) if self.members[rank].state == state]


def blame_ranks(members: Sequence[RankRecord], problem: str, *, stuck: bool = False) -> Fault:
    """Return a fault with the text `rank 1 (...) is PROBLEM`, or `rank 1 (...), rank 2 (...) are PROBLEM`."""
    first_names = ", ".join(member.describe() for member in members[:MAX_NAMED_RANKS])
    more = f" and {len(members) - MAX_NAMED_RANKS} more" if len(members) > MAX_NAMED_RANKS else ""
    text = f"{first_names}{more} {'is' if len(members) == 1 else 'are'} {problem}"
    return Fault(tuple(member.rank for member in members), text, stuck)
