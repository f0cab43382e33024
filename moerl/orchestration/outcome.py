"""Outcome of a rollout. Runs in the controller."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.contract.quarantine import Refusal
from moerl.contract.trajectory import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class RolloutOutcome:
    """Result of a rollout: its trajectories with their rewards, or the reason why it is in quarantine."""

    rollout_id: str
    """Id of the request; empty if a refused answer names none."""
    trajectories: tuple[Trajectory, ...] = ()
    """Admitted trajectories with their rewards: one of a single response, one per session of an episode; empty if the
    rollout was refused."""
    refusal: Refusal | None = None
    """Reason of the quarantine; None if the rollout was admitted."""

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(trajectory.num_sampled for trajectory in self.trajectories)
