"""Port between the loop and the source of its groups. Runs in the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from moerl.buffer.queue import QueueLimits
from moerl.contract.ports import PolicyEngine, Taken
from moerl.contract.trajectory import Trajectory
from moerl.orchestration.rollouts import Collector


class Source(Protocol):
    """Source of groups: hands the loop a batch for each step, and keeps account of every rollout.

    `groups.GroupSource` asks an engine for groups, embedded or servers; `dump_source.DumpSource` reads them.
    """

    limits: QueueLimits
    """Limits of staleness, and of groups under way."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the latest batch."""
        ...

    @property
    def overlaps(self) -> bool:
        """True if groups are sampled while others are trained."""
        ...

    def restore(self, snapshot: Mapping[str, Any], step: int) -> None:
        """Restores the state of a checkpoint after `step` steps; it is empty at the start of a stage."""

    def recover(self) -> None:
        """Reads back, after `restore`, the groups that were finished and not trained."""

    def batch(self) -> list[Trajectory]:
        """Returns the trajectories of the next step, group by group; waits for them."""
        ...

    def upcoming(self) -> list[Trajectory] | None:
        """Waits, called in another thread, for the trajectories that `batch` would return now; returns None if there
        are none to wait for."""
        ...

    def trained(self) -> None:
        """Notes that the batch was trained."""

    def expect(self) -> Taken:
        """Notes that weights are on their way to the engine; returns a callback to call when the engine has them."""
        ...

    def settle(self) -> None:
        """Waits until the engine has the weights that are on their way."""

    def snapshot(self) -> dict[str, Any]:
        """Returns the state that a checkpoint keeps, as plain JSON; the ledger as `ledger`."""
        ...

    def committed(self, step: int, snapshot: Mapping[str, Any]) -> None:
        """Notes that a checkpoint of `step` was begun with this snapshot."""

    def finished(self) -> None:
        """Notes that the last checkpoint is on disk."""

    def close(self) -> None:
        """Drops the groups that are under way."""


@dataclass(frozen=True, slots=True)
class Live:
    """The engine of a run, which samples, is evaluated and gets the weights; a run from dumps has none."""

    engine: PolicyEngine
    """Engine that gets weights."""
    collector: Collector
    """Collector that asks the same engine."""
