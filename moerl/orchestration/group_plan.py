"""Plan of the groups of a run, which both sources of groups have. Runs in the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moerl.buffer.queue import QueueLimits
from moerl.config.schema import RLConfig
from moerl.contract.ports import Prompt, RolloutRequest
from moerl.contract.trajectory import SamplingParams, Trajectory
from moerl.orchestration.rollouts import Collector
from moerl.orchestration.selection import filtered_for, select


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
