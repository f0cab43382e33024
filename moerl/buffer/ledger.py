"""Account of the end of every rollout that was asked for: trained, filtered, quarantined, or still pending.

A rollout contributes to at most one step. The ledger is committed with the weights, so the rollouts that a checkpoint
counts as trained are in its weights, and no others are. Pure; runs in the controller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from moerl.errors import MoerlError

LEDGER_FILE = "ledger.json"
"""File in a run directory: the ledger after the latest step, for people who watch. Checkpoints have their own."""


class Ledger:
    """Counts of rollouts by their end, and every group that has not ended.

    Args:
        first: number of the first group that it counts.

    Attributes:
        issued: rollouts asked for so far. trained: those of them that were in a step.
        filtered, quarantined: rollouts by reason.
        again: rollouts that a run that goes on asked for again: `resumed` with turns that it had, or `anew`.
    """

    def __init__(self, first: int = 0) -> None:
        self.issued = 0
        self.trained = 0
        self.filtered: Counter[str] = Counter()
        self.quarantined: Counter[str] = Counter()
        self.again: Counter[str] = Counter()
        self._pending: dict[int, int] = {}
        # Groups below the frontier have ended or are pending; from it on nothing was issued.
        self._frontier = first

    @property
    def pending(self) -> int:
        """Rollouts that are being sampled, wait, or are in the batch of the step in progress."""
        return sum(self._pending.values())

    def pending_of(self, number: int) -> int:
        """Returns the number of rollouts of a group that have not ended."""
        return self._pending.get(number, 0)

    def issue(self, number: int, count: int) -> None:
        """Counts a group of `count` rollouts as asked for.

        Raises:
            MoerlError: the group is not the next one.
        """
        if number != self._frontier:
            raise MoerlError(f"ledger: group {number} was issued", seen=self._frontier, expected="the next number")
        self._frontier += 1
        self.issued += count
        self._pending[number] = count

    def ask_again(self, resumed: int, anew: int) -> None:
        """Counts rollouts of a group that were asked for before: with turns that they had, and without."""
        self.again.update({name: count for name, count in (("resumed", resumed), ("anew", anew)) if count})

    def quarantine(self, number: int, reason: str) -> None:
        """Counts one rollout of a group as refused."""
        self._take(number, 1)
        self.quarantined[reason] += 1

    def leave_out(self, number: int, count: int, reason: str) -> None:
        """Counts some rollouts of a group as filtered: they are not trained on."""
        if count:
            self.filtered[reason] += self._take(number, count)

    def filter(self, number: int, reason: str) -> None:
        """Counts the rollouts of a group that have not ended as filtered: none of them is trained on."""
        self.filtered[reason] += self._take(number, self.pending_of(number))

    def train(self, number: int, count: int) -> None:
        """Counts `count` rollouts of a group, all that it has left, as trained in a step.

        Raises:
            MoerlError: the group has ended before, or has another number of rollouts left.
        """
        if count != self.pending_of(number):
            raise MoerlError(
                f"ledger: group {number} is trained with other rollouts than it has left",
                seen=count,
                expected=f"{self.pending_of(number)}, not one of which was trained before",
            )
        self.trained += self._take(number, count)

    def _take(self, number: int, count: int) -> int:
        left = self.pending_of(number) - count
        if number not in self._pending or left < 0:
            raise MoerlError(f"ledger: group {number} has ended", seen=count, expected="a rollout that is pending")
        self._pending[number] = left
        if not left:
            del self._pending[number]
        return count

    def check(self) -> None:
        """Raises `MoerlError` if rollouts are lost or counted twice."""
        ended = self.trained + self.filtered.total() + self.quarantined.total()
        if self.issued != ended + self.pending:
            raise MoerlError(
                "ledger: the sums are not right",
                seen=f"{ended} ended and {self.pending} pending",
                expected=f"{self.issued} issued",
                remedy="this is an error of moerl; the checkpoints before this one are not affected",
            )

    def snapshot(self) -> dict[str, Any]:
        """Returns the state that a checkpoint keeps, as plain JSON."""
        return {
            "issued": self.issued,
            "trained": self.trained,
            "filtered": dict(self.filtered),
            "quarantined": dict(self.quarantined),
            "again": dict(self.again),
            "pending": [[number, count] for number, count in self._pending.items()],
            "frontier": self._frontier,
        }

    @classmethod
    def restored(cls, snapshot: Mapping[str, Any]) -> Ledger:
        """Returns the ledger of a checkpoint.

        Raises:
            MoerlError: its sums are not right.
        """
        ledger = cls()
        ledger.issued, ledger.trained = snapshot["issued"], snapshot["trained"]
        ledger.filtered, ledger.quarantined = Counter(snapshot["filtered"]), Counter(snapshot["quarantined"])
        ledger.again = Counter(snapshot.get("again", {}))
        ledger._pending = dict(snapshot["pending"])
        ledger._frontier = snapshot["frontier"]
        ledger.check()
        return ledger
