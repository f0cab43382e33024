"""Source of groups that samples ahead: threads collect groups while others are trained. Runs in the controller."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from moerl.buffer.journal import Journal
from moerl.contract.ports import Prompt
from moerl.orchestration.groups import GroupSource
from moerl.orchestration.rollouts import Collector, unwatched
from moerl.orchestration.source import GroupPlan


class AheadGroupSource(GroupSource):
    """Source of groups for `buffer.max_staleness` of 1 or more.

    Groups that are dispatched together have a thread, which asks the engine for them. When an update of weights frees
    slots, their groups are asked for at once; nobody waits for the engines until a batch is missing.
    """

    def sent(self) -> None:
        """Notes that the trainer has sent the weights. Returns at once: engines sample with those that they have."""

    def _begin(self, numbers: Sequence[int]) -> bool:
        name = f"groups-{numbers[0]}"
        threading.Thread(target=self._collect_in_thread, args=(numbers,), name=name, daemon=True).start()
        return False

    def _collect_in_thread(self, numbers: Sequence[int]) -> None:
        try:
            self._collect(numbers, unwatched)
        except BaseException as error:  # noqa: BLE001 - the thread boundary: the loop raises it
            self._fail(error)

    def _freed(self) -> None:
        self._ask_for_more()

    def _may_recover(self, newest_version: int) -> bool:
        """Returns True: a checkpoint may lie between the weights that sampled a group and the step that trains it."""
        return True


def group_source(
    plan: GroupPlan, collector: Collector, prompts: Sequence[Prompt], stage: str, journal: Journal
) -> GroupSource:
    """Returns the source that a plan asks for: it samples ahead if `buffer.max_staleness` lets it. Arguments: those of
    `GroupSource`."""
    kind = AheadGroupSource if plan.limits.max_staleness else GroupSource
    return kind(plan, collector, prompts, stage, journal)
