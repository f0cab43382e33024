"""Batches of groups: prompts are dispatched slot by slot, their responses collected, filtered, and handed out in order.

Every rollout that is asked for is in the ledger until it is trained, filtered or refused. A step asks for its groups
and waits for them; `groups_ahead` has threads collect them during the training. Runs in the controller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moerl.batching.curriculum import Curriculum
from moerl.batching.order import batch_indices
from moerl.buffer.flow import Flow, age_metrics
from moerl.buffer.journal import FinishedGroup, Journal
from moerl.buffer.ledger import Ledger
from moerl.buffer.lengths import Lengths
from moerl.buffer.queue import GroupQueue, GroupState, age, check_ages
from moerl.buffer.turns import KeptTurn, KeptTurns
from moerl.contract.ports import Prompt, RolloutRequest, UpdateDone, update_overdue
from moerl.contract.trajectory import Trajectory
from moerl.errors import closing
from moerl.orchestration.outcome import NO_ANSWER, RolloutOutcome, finished_group
from moerl.orchestration.rollouts import Collector
from moerl.orchestration.selection import accuracy_of, check_fills_up, num_episodes
from moerl.orchestration.source import GroupPlan

NOT_KEPT = "not_kept"
"""Reason in the ledger of rollouts that `rl.keep` leaves out of a group."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A finished group and the trajectories of it that are trained. The ledger counts the others once these are
    trained: a run that goes on from an earlier checkpoint asks for the whole group again."""

    group: FinishedGroup
    kept: list[Trajectory]


class GroupSource:
    """Source of groups that asks an engine for them, and hands out batches of them.

    Args:
        plan: sampling of groups, and what of them is trained.
        prompts: prompts of the training split; their order follows from the seed alone.
        stage: first part of every rollout id.
        journal: keeps finished groups until a checkpoint records what became of them.

    Attributes:
        version: policy version of the weights that are trained next: the number of trained batches.
        metrics: metrics of the latest batch.
    """

    def __init__(
        self, plan: GroupPlan, collector: Collector, prompts: Sequence[Prompt], stage: str, journal: Journal
    ) -> None:
        self._plan, self._collector, self._prompts, self._stage = plan, collector, prompts, stage
        self._journal = journal
        self.limits = plan.limits
        self.version, self.metrics = 0, dict[str, float]()
        self._queue, self.ledger = GroupQueue(self.limits), Ledger()
        self._finished, self._batch = dict[int, _Waiting](), dict[int, _Waiting]()
        self._held, self._awaits_engines = list[int](), False
        # Locked while what threads may change is read or changed: with staleness, they collect.
        self._state = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed, self._asked_version = False, -1
        self._again: list[int] = []
        self._recovered: dict[int, FinishedGroup] = {}
        self._turns = KeptTurns()
        self._lengths, self._flow = Lengths(), Flow()
        self._committed: Mapping[str, Any] | None = None
        self._saved_version = 0
        self._curriculum = Curriculum.of(plan.loop, plan.seed, prompts)

    def batch(self) -> list[Trajectory]:
        """Returns the trajectories of the next step, group by group in the order of dispatch; waits for them.

        Raises:
            MoerlError: too many groups were filtered or all were refused, or a token is older than the limits allow.
        """
        first = self._queue.next_number
        with self._state:
            self._asked_version = self.version
            self._state.notify_all()
            while not (numbers := self._take_batch()):
                check_fills_up(self._queue.next_number - first, self.limits.groups_per_step, self.ledger)
                if not self._ask_for_more() and self._error is None:
                    self._wait()
                if self._error is not None:
                    raise self._error
            self._batch = {number: self._finished.pop(number) for number in numbers}
        trajectories = [trajectory for waiting in self._batch.values() for trajectory in waiting.kept]
        versions = [_versions(t) for t in trajectories]
        check_ages((age(self.version, each) for each in versions), self.limits)
        self._lengths.train(trajectory.num_sampled for trajectory in trajectories)
        self._lengths.warn(self._collector.notify)
        self.metrics = {
            **self._lengths.metrics(),
            **age_metrics(self.version, versions, histogram=self.limits.max_staleness > 0),
            **self._flow.lap(),
            "groups/waiting": float(self._queue.count(GroupState.FINISHED)),
            "groups/filtered": float(self.ledger.filtered.total()),
            **(self._curriculum.metrics() if self._curriculum else {}),
        }
        return trajectories

    def upcoming(self, version: int) -> list[Trajectory] | None:
        """Waits, in a thread of the caller, for the trajectories that `batch` would return for this version; returns
        None once that batch is asked for, or the source is closed or has failed."""
        with self._state:
            while self._asked_version < version and not self._is_closed and self._error is None:
                if numbers := self._queue.next_batch():
                    return [trajectory for number in numbers for trajectory in self._finished[number].kept]
                self._state.wait()
            return None

    def _take_batch(self) -> list[int]:
        """Returns the next batch's groups, none while it is not full. Drops groups that are too old, if `limits` do."""
        if self.limits.drops:
            for number in self._queue.numbers(GroupState.FINISHED):
                if max(age(self.version, _versions(t)) for t in self._finished[number].kept) > self.limits.max_age:
                    waiting = self._finished.pop(number)
                    self._leave_out(waiting.group, waiting.kept, "stale")
        return self._queue.take()

    def trained(self) -> None:
        """Counts the batch as trained in the ledger. Its slots stay taken until engines have the new weights."""
        self.settle()
        with self._state:
            for number, waiting in self._batch.items():
                self._count_left_out(waiting.group)
                num_kept = num_episodes(waiting.kept)
                self.ledger.leave_out(number, num_episodes(waiting.group.trajectories) - num_kept, NOT_KEPT)
                self.ledger.train(number, num_kept)
            self._held, self._batch = [*self._held, *self._batch], {}
            # Before engines have the new weights: their tokens must not seem to be of a later version than this one.
            self.version += 1
            self.ledger.check()

    def expect_update(self) -> UpdateDone:
        """Returns a callback. Call it, from any thread, when the engines have the new weights; it frees the slots of
        the batches that those weights were trained on."""
        self._awaits_engines = True
        return self._update_done

    def sent(self) -> None:
        """Notes that the trainer has sent the weights. Waits for the engines: the next groups need these weights."""
        self.settle()

    def settle(self) -> None:
        """Waits until the callback of `expect_update`, if one is due, is called. Raises the first error of a thread."""
        with self._state:
            while self._awaits_engines and self._error is None:
                self._wait()
            if self._error is not None:
                raise self._error

    def _wait(self) -> None:
        """Waits for the next change by a thread. Raises `WeightSyncError` if nothing changes for `weights.step_seconds`
        while an engine has to take weights."""
        seconds = self._plan.update_seconds if self._awaits_engines else None
        if not self._state.wait(seconds):
            raise update_overdue(self._plan.update_seconds)

    def _update_done(self, problem: Exception | None) -> None:
        try:
            if problem is not None:
                raise problem
            with self._state:
                released, self._held, self._awaits_engines = self._held, [], False
                self._queue.release(released)
                if released and not self._is_closed:
                    self._freed()
                self._state.notify_all()
        except Exception as error:  # noqa: BLE001 - the thread boundary: the loop raises it
            self._fail(error)

    def close(self) -> None:
        """Ends the source after the last step; groups that are still being collected are dropped."""
        with self._state:
            self._is_closed = True
            self._state.notify_all()
            self._journal.close()

    # --- asking ------------------------------------------------------------------------------------------------------

    def _ask_for_more(self) -> bool:
        """Asks for the groups that were asked for before a resume, and for new groups while there are free slots.
        Groups of the journal are not sampled again.

        Returns:
            True if some of the groups are there: the journal had them, or they were collected.
        """
        again, self._again = self._again, list[int]()
        numbers = [*again]
        # Groups that the run will still train, without those that are being trained.
        num_left = (self._plan.loop.steps - self.version) * self.limits.groups_per_step - len(self._batch)
        while self._queue.num_free > 0 and self._queue.count(GroupState.RUNNING, GroupState.FINISHED) < num_left:
            number = self._queue.dispatch()
            self.ledger.issue(number, self._plan.loop.group_size)
            if self._curriculum:
                # Here, in order and under the lock; threads that collect read it.
                self._curriculum.prompt(number)
            numbers.append(number)
        self._flow.sampling(self._queue.count(GroupState.RUNNING))
        there = [number for number in numbers if number in self._recovered]
        for number in there:
            group = self._recovered.pop(number)
            # Rollouts without an answer never were in quarantine.
            refused = [why for why in group.refused.values() if why != NO_ANSWER]
            self._collector.quarantine.count_again(len(group.trajectories), refused)
            self._finish(group)
            numbers.remove(number)
        for number in numbers:
            resumed = self._turns.num_episodes(number)
            self.ledger.ask_again(resumed, self.ledger.pending_of(number) - resumed if number in again else 0)
        are_collected = bool(numbers) and self._begin(numbers)
        return are_collected or bool(there)

    def _begin(self, numbers: Sequence[int]) -> bool:
        """Begins to collect groups. Returns True if they are there: the thread that waits for them collected them."""
        self._collect(numbers, self._collector.watch)
        return True

    def _freed(self) -> None:
        """Notes, in the thread of an update of weights, that slots are free: `batch` will ask for their groups."""

    def _fail(self, error: BaseException) -> None:
        with self._state:
            if not self._is_closed:
                self._error = self._error or error
            self._state.notify_all()

    def _collect(self, numbers: Sequence[int], watch: Callable[[int, int, int], None]) -> None:
        """Collects groups; each can be trained as soon as all of its rollouts are there. watch: that of `Collector`."""
        collector, version = self._collector, self.version
        requests = {n: self._plan.requests(collector, self._prompt(n), self._stage, n) for n in numbers}
        number_of = {r.lineage.rollout_id: number for number, group in requests.items() for r in group}
        found: dict[int, list[RolloutOutcome]] = {number: [] for number in numbers}
        num_tokens, num_refused, first = 0, 0, ""
        asked = [request for group in requests.values() for request in group]
        watch(0, len(asked), 0)
        turns = self._turns.memory({requests[n][0].lineage.group_id: n for n in numbers}, self._keep_turn)
        answers = collector.outcomes([self._prompt(n) for n in numbers], asked, lambda: self.version, turns)
        with closing(collector.scoring.outcomes(answers)) as outcomes:
            for outcome in outcomes:
                if self._is_closed:
                    return
                num_tokens += outcome.num_sampled
                if outcome.refusal is not None:
                    num_refused, first = num_refused + 1, first or outcome.refusal.text
                number = number_of.pop(outcome.rollout_id, None)
                if number is None:
                    continue
                found[number].append(outcome)
                watch(len(asked) - len(number_of), len(asked), num_tokens)
                if len(found[number]) == len(requests[number]):
                    self._take(number, requests.pop(number), found.pop(number))
        for number, group in requests.items():
            # A rollout that the engine leaves out counts as refused: no group gets smaller unseen.
            self._take(number, group, found[number])
        # A few groups that replace others may all be refused; a whole batch may not.
        at_most = len(asked) if len(numbers) >= self.limits.groups_per_step else len(asked) + 1
        collector.tell_refused(f"step {version + 1}", num_refused, at_most, first)

    def _keep_turn(self, turn: KeptTurn) -> None:
        with self._state:
            if not self._is_closed and self._may_recover(turn.newest_version):
                self._journal.append_turn(turn)

    def _may_recover(self, newest_version: int) -> bool:
        """Returns True if a resumed run could take back what these weights sampled: `recover` takes only what the
        weights of a checkpoint have sampled, and a batch is trained before the next checkpoint."""
        return newest_version <= self._saved_version

    def _take(self, number: int, requests: Sequence[RolloutRequest], outcomes: Sequence[RolloutOutcome]) -> None:
        """Adds a group whose rollouts are all answered to the journal, and finishes it."""
        group = finished_group(number, requests, outcomes)
        with self._state:
            if not self._is_closed:
                if self._may_recover(group.newest_version):
                    self._journal.append(group)
                self._finish(group)

    def _finish(self, group: FinishedGroup) -> None:
        """Lets a group wait for its batch, or filters it."""
        self._lengths.offer(group.number, (trajectory.num_sampled for trajectory in group.trajectories))
        if self._curriculum and group.trajectories:
            right = [accuracy_of(trajectory) for trajectory in group.trajectories]
            self._curriculum.learn(group.trajectories[0].lineage.prompt_id, sum(right) / len(right))
        reason = self._plan.reason_against(group.trajectories)
        if group.trajectories and not reason:
            kept = self._plan.kept(group.trajectories, group.number)
            self._flow.leave_out(sum(t.num_sampled for t in group.trajectories) - sum(t.num_sampled for t in kept))
            self._finished[group.number] = _Waiting(group, kept)
            self._queue.finish(group.number)
        else:
            self._leave_out(group, group.trajectories, reason)
        self._flow.sampling(self._queue.count(GroupState.RUNNING))
        self._state.notify_all()

    def _leave_out(self, group: FinishedGroup, left: Sequence[Trajectory], reason: str) -> None:
        """Frees the slot of a group that is not trained. left: its trajectories that are not yet counted as left out.
        reason: that of the ledger; empty if all rollouts of the group were refused or left out one by one."""
        self._queue.filter(group.number)
        self._count_left_out(group)
        if reason:
            self.ledger.filter(group.number, reason)
        self._flow.leave_out(sum(trajectory.num_sampled for trajectory in left))

    def _count_left_out(self, group: FinishedGroup) -> None:
        for why in group.refused.values():
            self.ledger.quarantine(group.number, why)
        for why in group.filtered.values():
            self.ledger.leave_out(group.number, 1, why)

    def _prompt(self, number: int) -> Prompt:
        if self._curriculum:
            return self._curriculum.prompt(number)
        per_step = self._plan.loop.prompts_per_step
        step, place = divmod(number, per_step)
        chosen = batch_indices(len(self._prompts), per_step, step, self._plan.seed)
        return self._prompts[chosen[place]]

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Returns the state that a checkpoint between two steps keeps, as plain JSON."""
        with self._state:
            queue, ledger = self._queue.snapshot(), self.ledger.snapshot()
            kept = {"queue": queue, "ledger": ledger, "lengths": self._lengths.snapshot(queue["open"])}
            return kept | ({"prompts": self._curriculum.snapshot(queue["open"])} if self._curriculum else {})

    def committed(self, step: int, snapshot: Mapping[str, Any]) -> None:
        """Notes that a checkpoint of this step was begun, with this snapshot: the one before is on disk."""
        with self._state:
            if self._committed is not None:
                self._journal.forget(self._committed["queue"]["open"], self._committed["queue"]["next_number"])
            self._committed, self._saved_version = snapshot, step
            self._journal.begin(step)

    def finished(self) -> None:
        """Clears the journal: the last checkpoint is on disk, and nothing will be asked for again."""
        self._journal.clear()

    def restore(self, snapshot: Mapping[str, Any], step: int) -> None:
        """Restores the state of a checkpoint after `step` steps; with an empty snapshot, numbers start there."""
        if snapshot:
            self._queue = GroupQueue.restored(self.limits, snapshot["queue"])
            self.ledger = Ledger.restored(snapshot["ledger"])
            if self._curriculum and "prompts" in snapshot:
                self._curriculum.restore(snapshot["prompts"])
        else:
            number = step * self._plan.loop.prompts_per_step
            self._queue, self.ledger = GroupQueue(self.limits, number), Ledger(number)
        self._lengths = Lengths.restored(snapshot.get("lengths", {}))
        self._finished, self._batch, self._held = {}, {}, []
        self.version = self._saved_version = step
        self._again = self._queue.numbers(GroupState.RUNNING)

    def recover(self) -> None:
        """Reads the groups of the journal, after `restore`. Groups that later weights than this checkpoint's sampled
        are sampled again: these weights are gone with the steps that were lost."""
        step = self.version
        if not step:
            # No checkpoint has the weights that sampled them.
            self._journal.clear()
        found = self._journal.read()
        if num_torn := self._journal.torn_bytes:
            self._collector.notify(f"note: the journal has {num_torn} bytes of unfinished records; left out")
        wanted = {n: group for n, group in found.items() if n in self._again or n >= self._queue.next_number}
        self._recovered = {n: group for n, group in wanted.items() if group.newest_version <= step}
        if wanted:
            num_lost = len(wanted) - len(self._recovered)
            lost = f"; {num_lost} were sampled by weights of lost steps, and are sampled again" if num_lost else ""
            self._collector.notify(f"finished groups that are taken from the journal: {len(self._recovered)}{lost}")
        self._turns = KeptTurns(self._journal.turns, step)
        self._journal.begin(step)


def _versions(trajectory: Trajectory) -> list[int]:
    return trajectory.policy_versions[trajectory.sampled].tolist()
