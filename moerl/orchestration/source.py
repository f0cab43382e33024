"""Port between the loop and the source of its groups, and the plan of groups that all sources have. Runs in the
controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moerl.buffer.queue import QueueLimits
from moerl.config.schema import RLConfig
from moerl.contract.ports import PolicyEngine, Prompt, RolloutRequest, UpdateDone
from moerl.contract.trajectory import SamplingParams, Trajectory
from moerl.orchestration.rollouts import Collector
from moerl.orchestration.selection import filtered_for, select


class Source(Protocol):
    """Source of groups: hands the loop a batch for each step, and keeps account of every rollout.

    `groups_ahead.group_source` makes one that asks an engine, embedded or servers; `dump_source` reads dumps.
    """

    limits: QueueLimits
    """Limits of staleness, and of groups under way."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the latest batch."""
        ...

    def restore(self, snapshot: Mapping[str, Any], step: int) -> None:
        """Restores the state of a checkpoint after `step` steps; it is empty at the start of a stage."""

    def recover(self) -> None:
        """Reads back, after `restore`, the groups that were finished and not trained."""

    def batch(self) -> list[Trajectory]:
        """Returns the trajectories of the next step, group by group; waits for them."""
        ...

    def upcoming(self, version: int) -> list[Trajectory] | None:
        """Waits, called in another thread, for the trajectories that `batch` would return for this version; returns
        None if there are none to wait for, or once the batch is asked for."""
        ...

    def trained(self) -> None:
        """Notes that the batch was trained."""

    def expect_update(self) -> UpdateDone:
        """Notes that weights are on their way to the engine; returns a callback to call when the engine has them."""
        ...

    def sent(self) -> None:
        """Notes that the weights were sent. Waits until the engine has them if the next groups need them."""

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


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Plan of groups: how many there are, how they are sampled, and what of them is trained."""

    loop: RLConfig
    """Steps, prompts of a step, responses of a group, and what is left out of it."""
    limits: QueueLimits
    """Limits of staleness, and of groups under way."""
    sampling: SamplingParams
    """Distribution of the responses; of dumps, of those whose dump does not say it."""
    seed: int
    """Seed of the order of prompts, and of the choice by `rl.keep`."""
    update_seconds: float
    """Longest time in which engines take one step of a weight update, `weights.step_seconds`."""

    def requests(self, collector: Collector, prompt: Prompt, stage: str, number: int) -> list[RolloutRequest]:
        """Returns the requests of a group by its number, in the order of dispatch. stage: first part of rollout ids."""
        run = f"{stage}-{number // self.loop.prompts_per_step:06d}"
        return collector.requests([prompt], run=run, count=self.loop.group_size, sampling=self.sampling)

    def reason_against(self, trajectories: Sequence[Trajectory]) -> str:
        """Returns why `rl.filters` leave a group out, as the ledger names it; empty if they do not, or no response of
        it was admitted."""
        return filtered_for(trajectories, self.loop.filters) if trajectories else ""

    def kept(self, trajectories: Sequence[Trajectory], number: int) -> list[Trajectory]:
        """Returns the trajectories of a group that `rl.keep` leaves. number: that of the group."""
        return select(trajectories, self.loop.keep, self.loop.keep_by, (self.seed, number))
