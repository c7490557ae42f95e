"""The rank at fault when a run of several ranks cannot go on, from what the ranks report, and one sentence about it.

Pure: no socket, no clock. heartbeat.py feeds it on rank 0. Three things end a run: a rank whose process or machine is
gone, a rank that failed by itself, and a rank that runs but does not advance while the others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SETTLE_S = 2.0  # after a first failure: one dead rank makes all others fail, and which of them speaks first is chance
NUM_NAMED = 8  # ranks in one sentence


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the run ends. `ranks`: those to blame; `stuck`: they run, so that they can show where they are."""

    ranks: tuple[int, ...]
    text: str
    stuck: bool = False


@dataclass(slots=True)
class RankRecord:
    """A rank as it last reported."""

    rank: int
    where: str  # for the reader: host and process id
    heard_at_s: float
    advanced_at_s: float
    num_begun: int = -1
    num_advances: int = -1
    doing: str = "start"
    state: Literal["runs", "done", "gone", "failed"] = "runs"
    reason: str = ""
    is_secondary: bool = False  # it failed because another rank did not answer

    def name(self) -> str:
        return f"rank {self.rank} ({self.where})"


class RankStates:
    """The ranks of one run, from the first that reports to the fault that ends it."""

    def __init__(self, size: int, *, silent_s: float, stuck_s: float, awake_s: float) -> None:
        """silent_s: how long a rank may say nothing. stuck_s: how long no rank may advance. awake_s: a longer time
        between two looks counts as sleep of this process (the whole job was suspended) and is blamed on no rank."""
        self.size, self.silent_s, self.stuck_s, self.awake_s = size, silent_s, stuck_s, awake_s
        self.looked_at_s: float | None = None
        self.members: dict[int, RankRecord] = {}
        self.ended_at_s: float | None = None  # the first that is gone or failed

    def joined(self, rank: int, where: str, now_s: float) -> None:
        self.members[rank] = RankRecord(rank, where, heard_at_s=now_s, advanced_at_s=now_s)

    def beat(self, rank: int, num_begun: int, num_advances: int, doing: str, now_s: float) -> None:
        """num_begun is compared between ranks; num_advances only shows that the rank works."""
        member = self.members[rank]
        member.heard_at_s = now_s
        if (num_begun, num_advances) != (member.num_begun, member.num_advances):
            member.num_begun, member.num_advances = num_begun, num_advances
            member.doing, member.advanced_at_s = doing, now_s

    def done(self, rank: int) -> None:
        """Record that the rank has finished its part and will report no more."""
        self.members[rank].state = "done"

    def failed(self, rank: int, reason: str, is_secondary: bool, now_s: float) -> None:
        """Record the end of a rank by its own error, or (`is_secondary`) because an exchange with others broke."""
        member = self.members[rank]
        member.state, member.reason, member.is_secondary = "failed", reason, is_secondary
        self._ended(now_s)

    def gone(self, rank: int, reason: str, now_s: float) -> None:
        """Record that its connection closed although it had not reported its end."""
        member = self.members[rank]
        if member.state == "runs":
            member.state, member.reason = "gone", reason
            self._ended(now_s)

    def _ended(self, now_s: float) -> None:
        self.ended_at_s = now_s if self.ended_at_s is None else self.ended_at_s

    def fault(self, now_s: float) -> Fault | None:
        """Return the fault; None while there is none, and for SETTLE_S after a first failure."""
        self._forgive_sleep(now_s)
        for member in self._in_state("runs"):
            if now_s - member.heard_at_s > self.silent_s:
                self.gone(member.rank, f"no sign of life for {now_s - member.heard_at_s:.0f} s", now_s)
        if self.ended_at_s is not None:
            return self._blame_ended() if self._is_settled(now_s, self.ended_at_s) else None
        return self._blame_stuck(now_s)

    def _is_settled(self, now_s: float, ended_at_s: float) -> bool:
        """Return whether the cause is known: when all failures are secondary, only once each other rank has reported
        since, or has been silent for too long."""
        running, ended = self._in_state("runs"), [*self._in_state("gone"), *self._in_state("failed")]
        is_known = not all(member.is_secondary for member in ended) or all(m.heard_at_s > ended_at_s for m in running)
        return is_known and now_s - ended_at_s >= SETTLE_S

    def _forgive_sleep(self, now_s: float) -> None:
        """Shift the times by the sleep of this process: messages that waited meanwhile count as received now."""
        slept_s = 0.0 if self.looked_at_s is None else now_s - self.looked_at_s - self.awake_s
        self.looked_at_s = now_s
        if slept_s > 0:
            for member in self.members.values():
                member.heard_at_s = min(now_s, member.heard_at_s + slept_s)
                member.advanced_at_s = min(now_s, member.advanced_at_s + slept_s)

    def _blame_ended(self) -> Fault:
        """Name the ranks that are gone without a report, else one that failed by itself, else those it waited for."""
        gone = self._in_state("gone")
        if gone:
            reasons = " and ".join(dict.fromkeys(member.reason for member in gone))
            return Fault(ranks(gone), f"{names(gone)} gone: {reasons}; last seen at {gone[0].doing}")
        failed = self._in_state("failed")
        first = next((member for member in failed if not member.is_secondary), failed[0])
        most = max(member.num_begun for member in failed)
        behind = [member for member in self._in_state("runs") if member.num_begun < most]
        if first.is_secondary and behind:  # they did not reach the operation in which the others failed
            least = min(member.num_begun for member in behind)
            last = [member for member in behind if member.num_begun == least]
            return Fault(
                ranks(last),
                f"{names(last)} missing: at {last[0].doing}, and {first.name()} failed waiting: {first.reason}",
                stuck=True,
            )
        return Fault((first.rank,), f"{first.name()} failed: {first.reason}")

    def _blame_stuck(self, now_s: float) -> Fault | None:
        running = self._in_state("runs")
        if len(running) < self.size or any(now_s - member.advanced_at_s <= self.stuck_s for member in running):
            return None
        least = min(member.num_begun for member in running)
        last = [member for member in running if member.num_begun == least]
        still_s = now_s - max(member.advanced_at_s for member in last)
        others = "all ranks are there" if len(last) == self.size else "the others are further and wait"
        text = f"{names(last)} stuck: no progress for {still_s:.0f} s at {last[0].doing}; {others}"
        return Fault(ranks(last), text, stuck=True)

    def _in_state(self, state: str) -> list[RankRecord]:
        return [self.members[rank] for rank in sorted(self.members) if self.members[rank].state == state]


def ranks(members: Sequence[RankRecord]) -> tuple[int, ...]:
    return tuple(member.rank for member in members)


def names(members: Sequence[RankRecord]) -> str:
    """`rank 1 (...) is`, or `rank 1 (...), rank 2 (...) are`."""
    listed = ", ".join(member.name() for member in members[:NUM_NAMED])
    more = f" and {len(members) - NUM_NAMED} more" if len(members) > NUM_NAMED else ""
    return f"{listed}{more} {'is' if len(members) == 1 else 'are'}"
