"""The port of the loop to whoever gives it groups. Runs in the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from moerl.buffer.queue import QueueLimits
from moerl.contract.ports import PolicyEngine, Taken
from moerl.contract.trajectory import Trajectory
from moerl.orchestration.rollouts import Collector


class Source(Protocol):
    """Gives groups to the loop, a batch for each step, and keeps account of every rollout.

    `groups.GroupSource` asks an engine for them, embedded or servers; `dump_source.DumpSource` reads them.
    """

    limits: QueueLimits

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the latest batch."""
        ...

    @property
    def overlaps(self) -> bool:
        """True if groups are sampled while others are trained."""
        ...

    def restore(self, snapshot: Mapping[str, Any], step: int) -> None:
        """Takes over the state of a checkpoint after `step` steps, empty at the start of a stage."""
        ...

    def recover(self) -> None:
        """Takes back, after `restore`, what was finished and not trained."""
        ...

    def batch(self) -> list[Trajectory]:
        """Returns the trajectories of the next step, group by group; waits for them."""
        ...

    def upcoming(self) -> list[Trajectory] | None:
        """Waits, in another thread, for what `batch` would return now; None if nobody is to wait for it."""
        ...

    def trained(self) -> None:
        """Takes note that the batch was trained."""
        ...

    def expect(self) -> Taken:
        """Takes note that weights are on their way to the engine; returns a callback for when it holds them."""
        ...

    def settle(self) -> None:
        """Waits until the engine holds the weights that are on their way."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as plain JSON; the ledger as `ledger`."""
        ...

    def committed(self, step: int, snapshot: Mapping[str, Any]) -> None:
        """Takes note that a checkpoint was begun with this snapshot."""
        ...

    def finished(self) -> None:
        """Takes note that the last checkpoint is on disk."""
        ...

    def close(self) -> None:
        """Gives up what is under way."""
        ...


@dataclass(frozen=True, slots=True)
class Live:
    """The engine of a run, which samples, is measured and takes the weights; a run from dumps has none."""

    engine: PolicyEngine
    collector: Collector
