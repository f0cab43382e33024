"""Groups for the loop from dumps, with no engine: the same contract, quarantine, ledger and checkpoints.

The rollouts of a step are read when the step begins. Their versions and ages are the recorded ones. Runs in the
controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.buffer.flow import age_metrics
from moerl.buffer.ledger import Ledger
from moerl.buffer.lengths import Lengths
from moerl.buffer.queue import age
from moerl.contract.ports import RolloutRecord, UpdateDone
from moerl.contract.quarantine import Quarantine
from moerl.contract.trajectory import Trajectory
from moerl.diagnostics.dumps import own
from moerl.diagnostics.dumps.records import record_of
from moerl.diagnostics.dumps.rollout import DumpedRollout
from moerl.diagnostics.dumps.slime import TorchFile
from moerl.diagnostics.dumps.survey import DumpedGroup, Survey, describe_unusable, rollouts_behind
from moerl.errors import CheckpointError, ContractError, MoerlError
from moerl.models.description import ModelDescription
from moerl.orchestration.groups import NOT_KEPT
from moerl.orchestration.source import GroupPlan


@dataclass(frozen=True, slots=True)
class TrainableDump:
    """A dump that fits model and settings."""

    path: Path
    """Dump, as `rollout.path` names it."""
    survey: Survey
    """Contents of it that can be used."""
    steps: Sequence[Sequence[DumpedGroup]]
    """Groups of each step."""
    scores: tuple[str, ...]
    """Names of the side scores that trajectories get, `Algorithm.needs`."""
    load: TorchFile
    """Reader of files of torch.save."""


class DumpSource:
    """A source of groups that reads `rollout.path`. Used from one thread, but for `upcoming`.

    A group that is filtered, or of which no rollout is admitted, is not replaced: its batch is smaller.

    Args:
        plan: steps, and what of a group is trained.
        model: model that is trained.
        quarantine: checks every rollout; keeps those that break the contract.
        notify: called with lines for people.

    Attributes:
        metrics: metrics of the latest batch.
    """

    def __init__(
        self,
        dump: TrainableDump,
        plan: GroupPlan,
        model: ModelDescription,
        quarantine: Quarantine,
        notify: Callable[[str], None],
    ) -> None:
        self._dump, self._plan, self._model, self._quarantine, self._notify = dump, plan, model, quarantine, notify
        self.limits, self.metrics = plan.limits, dict[str, float]()
        self._done, self.ledger, self._lengths = 0, Ledger(), Lengths()
        self._rollouts: Iterator[DumpedRollout] = iter(())
        self._batch: list[tuple[int, int, int]] = []

    @property
    def num_steps(self) -> int:
        """Steps that the run makes: `rl.steps`, or as many as the dump has groups for."""
        return min(self._plan.loop.steps, len(self._dump.steps))

    def describe(self) -> list[str]:
        """Returns notes for the user on the dump, a line each."""
        found, wanted = self._dump.survey, self._plan.loop.steps
        lines = [
            f"rollouts: {self._dump.path} ({found.format}): {found.num_rollouts} rollouts in"
            f" {len(found.groups)} groups,"
            f" enough for {len(self._dump.steps)} steps; no engine is started, nothing is evaluated"
        ]
        if self.num_steps < wanted:
            lines.append(f"the dumps end after step {self.num_steps}, and so does the run; rl.steps = {wanted}")
        if left := len(found.groups) - sum(map(len, self._dump.steps)):
            lines.append(f"note: the last {left} groups of the dump make no whole step, and are left out")
        if found.format != own.FORMAT:
            unsaid = ("top_k", "min_p") if found.says_sampling else ("temperature", "top_p", "top_k", "min_p")
            taken = ", ".join(f"rollout.{name} = {getattr(self._plan.sampling, name)}" for name in unsaid)
            lines.append(f"note: the dump does not say how rollouts were sampled, so these settings hold: {taken}")
        if unusable := describe_unusable(found.unusable):
            lines.append(f"WARNING: rows of the dump that cannot be used: {unusable}")
        return lines

    # --- batches -----------------------------------------------------------------------------------------------------

    def batch(self) -> list[Trajectory]:
        """Returns the trajectories of the next step, group by group in the order of the dump.

        Raises:
            MoerlError: no rollout is left, or a token is older than the limits allow.
            ContractError: a file is damaged, or too many rollouts were refused.
        """
        groups, first = self._dump.steps[self._done], sum(map(len, self._dump.steps[: self._done]))
        read = [[next(self._rollouts) for _ in range(group.size)] for group in groups]
        version = self._trained_version([rollout for group in read for rollout in group])
        refused_before, chosen = self._quarantine.num_refused, list[Trajectory]()
        ids = [rollout.name for group in read for rollout in group]
        self._quarantine.expect(ids)
        self._batch = []
        for number, rollouts in enumerate(read, first):
            self.ledger.issue(number, len(rollouts))
            trajectories = self._admitted(number, rollouts, version)
            # A run dumps only the rollouts that its own filters left.
            if reason := self._plan.reason_against(trajectories):
                self.ledger.filter(number, reason)
                continue
            kept = self._plan.kept(trajectories, number)
            self._batch += [(number, len(trajectories) - len(kept), len(kept))] if kept else []
            chosen += kept
        self._quarantine.forget(ids)
        self._check(groups, chosen, self._quarantine.num_refused - refused_before)
        versions = [trajectory.policy_versions[trajectory.sampled].tolist() for trajectory in chosen]
        oldest = max(age(version, each) for each in versions)
        if oldest > self.limits.max_age:
            raise MoerlError(
                f"step {self._done + 1}: a token of the dump is older than the settings allow",
                seen=f"{oldest} versions",
                expected=f"at most {self.limits.max_age}: {self.limits.formula}",
                remedy=f"set buffer.max_staleness={oldest} if you mean to train on it (also for a run that goes on)",
            )
        self._lengths.train(trajectory.num_sampled for trajectory in chosen)
        self._lengths.warn(self._notify)
        self.metrics = {
            **self._lengths.metrics(),
            **age_metrics(version, versions, histogram=self.limits.max_staleness > 0),
            "groups/filtered": float(self.ledger.filtered.total()),
        }
        return chosen

    def _trained_version(self, rollouts: Sequence[DumpedRollout]) -> int:
        """Returns the policy version that the batch is trained with. For the file of a step of moerl, it is the version
        that the run which wrote it trained; other dumps do not say it: it is then the newest version of the batch, or
        the number of this run's steps if that is larger."""
        step = self._dump.steps[self._done][0].step
        if self._dump.survey.format == own.FORMAT and step > 0:
            return step - 1
        return max(self._done, *(int(rollout.policy_versions.max()) for rollout in rollouts))

    def _admitted(self, number: int, rollouts: Sequence[DumpedRollout], version: int) -> list[Trajectory]:
        """Returns the trajectories of a group that keep the contract; counts the others as quarantined in the
        ledger."""
        admitted: list[Trajectory] = []
        for rollout in rollouts:
            trajectory = self._admit(rollout, version)
            if trajectory is None:
                self.ledger.quarantine(number, self._quarantine.refusal_of(rollout.name).reason)
            else:
                admitted.append(trajectory)
        self._lengths.offer(number, (trajectory.num_sampled for trajectory in admitted))
        return admitted

    def _admit(self, rollout: DumpedRollout, version: int) -> Trajectory | None:
        try:
            record = record_of(rollout, self._model.spec, self._plan.sampling, self._dump.scores)
        except ContractError as error:
            values = {"token_ids": rollout.token_ids, "rewards": dict(rollout.rewards)}
            newest = int(rollout.policy_versions.max())
            refused = RolloutRecord(rollout.name, rollout.engine, newest, values)
            self._quarantine.refuse(refused, error, trainer_version=version)
            return None
        return self._quarantine.admit(record, trainer_version=version)

    def _check(self, groups: Sequence[DumpedGroup], chosen: Sequence[Trajectory], num_refused: int) -> None:
        """Says how many rollouts were refused. Raises `MoerlError` if none is left to train."""
        step, size = self._done + 1, sum(group.size for group in groups)
        cause = f"{num_refused} of {size} rollouts refused; the first: {self._quarantine.first_refusal}"
        if not chosen:
            raise MoerlError(
                f"step {step}: no rollout of the dump is left to train",
                seen=cause if num_refused else f"all {len(groups)} groups filtered by rl.filters",
                expected="at least one",
                remedy=f"correct the cause; what was refused is in {self._quarantine.folder}",
            )
        if num_refused:
            self._notify(f"step {step}: {cause}; kept in {self._quarantine.folder}")

    def trained(self) -> None:
        for number, num_left_out, num_trained in self._batch:
            self.ledger.leave_out(number, num_left_out, NOT_KEPT)
            self.ledger.train(number, num_trained)
        self._batch = []
        self._done += 1
        self.ledger.check()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        last = self._dump.steps[self._done - 1][-1].name if self._done else ""
        return {
            "ledger": self.ledger.snapshot(),
            "lengths": self._lengths.snapshot(()),
            "dumps": {"steps": self._done, "last_group": last},
        }

    def restore(self, snapshot: Mapping[str, Any], step: int) -> None:
        """Restores the state of a checkpoint.

        Raises:
            CheckpointError: the dump has changed since the checkpoint.
        """
        if snapshot:
            self.ledger = Ledger.restored(snapshot["ledger"])
        self._lengths, self._done = Lengths.restored(snapshot.get("lengths", {})), step
        wanted = snapshot["dumps"]["last_group"] if snapshot else ""
        here = self._dump.steps[step - 1][-1].name if 0 < step <= len(self._dump.steps) else ""
        if here != wanted:
            raise CheckpointError(
                "rollout.path: the dump has changed since the checkpoint",
                seen=f"group {here!r} at the end of step {step}" if here else f"{len(self._dump.steps)} steps",
                expected=f"group {wanted!r}, which was trained last",
                remedy="restore the dump, or start a new run",
            )
        num_read = sum(group.size for groups in self._dump.steps[:step] for group in groups)
        self._rollouts = rollouts_behind(self._dump.path, self._dump.survey, self._model, num_read, self._dump.load)

    # --- parts of the port that belong to an engine ------------------------------------------------------------------

    def recover(self) -> None:
        """Does nothing: rollouts that were not trained are read again."""

    def upcoming(self, version: int) -> None:
        """Returns None: nothing is read ahead."""

    def expect_update(self) -> UpdateDone:
        raise AssertionError("a run from dumps publishes no weights")

    def sent(self) -> None:
        raise AssertionError("a run from dumps publishes no weights")

    def settle(self) -> None:
        """Does nothing: there is no engine to wait for."""

    def committed(self, step: int, snapshot: Mapping[str, Any]) -> None:
        """Does nothing: there is no journal to shorten."""

    def finished(self) -> None:
        """Does nothing: there is no journal to clear."""

    def close(self) -> None:
        """Drops the file that is being read."""
        self._rollouts = iter(())
