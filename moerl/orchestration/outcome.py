"""Outcome of a rollout. Runs in the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moerl.buffer.journal import FinishedGroup
from moerl.contract.ports import RolloutRequest
from moerl.contract.quarantine import Refusal
from moerl.contract.trajectory import Trajectory

NO_ANSWER = "no_answer"
"""Reason against a rollout that the engine did not answer."""


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
    filtered: str = ""
    """Reason in the ledger of a rollout that is not trained on, as the configuration says; empty if it is, or is
    refused."""

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(trajectory.num_sampled for trajectory in self.trajectories)


def finished_group(
    number: int, requests: Sequence[RolloutRequest], outcomes: Sequence[RolloutOutcome]
) -> FinishedGroup:
    """Returns a group whose rollouts have all ended. A rollout without an outcome counts as refused, `NO_ANSWER`."""
    ids = [request.lineage.rollout_id for request in requests]
    order = {rollout_id: place for place, rollout_id in enumerate(ids)}
    filtered = {outcome.rollout_id: outcome.filtered for outcome in outcomes if outcome.filtered}
    refused = {o.rollout_id: o.refusal.reason for o in outcomes if o.refusal is not None}
    trained = [outcome for outcome in outcomes if outcome.refusal is None and not outcome.filtered]
    ended = {*filtered, *(outcome.rollout_id for outcome in trained)}
    # Training does not depend on which rollout finished first.
    trained.sort(key=lambda outcome: order[outcome.rollout_id])
    refused = {rollout_id: refused.get(rollout_id, NO_ANSWER) for rollout_id in ids if rollout_id not in ended}
    return FinishedGroup(number, [t for outcome in trained for t in outcome.trajectories], refused, filtered)
