"""Batches of groups: prompts are dispatched slot by slot, their responses collected, filtered, and handed out in order.

Every rollout that is asked for is in the ledger until it is trained, filtered or refused. Runs in the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moerl.batching.order import batch_indices
from moerl.buffer.ledger import Ledger
from moerl.buffer.queue import GroupQueue, GroupState, QueueLimits, age, check_ages
from moerl.config.schema import RunConfig
from moerl.contract.ports import Prompt, RolloutRequest
from moerl.contract.trajectory import FinishReason, Trajectory
from moerl.errors import MoerlError
from moerl.orchestration.rollouts import Collector, in_request_order, sampling_params

MAX_BATCHES = 10
"""Batches' worth of groups that are asked for at most to fill one batch with groups that are not filtered."""


class GroupSource:
    """Asks for groups and hands out batches of them.

    Args:
        prompts: of the training split; the order in which they are taken follows from the seed alone.
        stage: first part of every rollout id.
    """

    def __init__(self, config: RunConfig, collector: Collector, prompts: Sequence[Prompt], stage: str) -> None:
        self._config, self._collector, self._prompts, self._stage = config, collector, prompts, stage
        self._limits = QueueLimits(config.rl.prompts_per_step)
        self._queue, self.ledger = GroupQueue(self._limits), Ledger()
        self._finished: dict[int, list[Trajectory]] = {}
        self._batch: dict[int, int] = {}

    def batch(self, version: int) -> list[Trajectory]:
        """The trajectories of the next step, group by group in the order of dispatch.

        Args:
            version: that is trained next.

        Raises:
            MoerlError: Too many groups were filtered, or a token is older than the limits allow.
        """
        first = self._queue.next_number
        while not (numbers := self._queue.take()):
            self._check_filtered(self._queue.next_number - first)
            self._fill(version)
        groups = {number: self._finished.pop(number) for number in numbers}
        self._batch = {number: len(group) for number, group in groups.items()}
        trajectories = [trajectory for group in groups.values() for trajectory in group]
        check_ages((age(version, t.policy_versions[t.sampled].tolist()) for t in trajectories), self._limits)
        return trajectories

    def release(self) -> None:
        """The batch was trained, and engines hold the weights that came of it."""
        for number, count in self._batch.items():
            self.ledger.train(number, count)
        self._batch = {}
        self._queue.release()
        self.ledger.check()

    # --- asking ------------------------------------------------------------------------------------------------------

    def _fill(self, version: int) -> None:
        """Asks for what was asked for before a resume, and for as many new groups as there are free slots."""
        numbers = self._queue.numbers(GroupState.RUNNING)
        while self._queue.num_free:
            number = self._queue.dispatch()
            self.ledger.issue(number, self._config.rl.group_size)
            numbers.append(number)
        requests = {number: self._requests(number) for number in numbers}
        prompts = [self._prompt(number) for number in numbers]
        asked = [request for group in requests.values() for request in group]
        found = self._collector.collect(
            prompts,
            asked,
            f"step {version + 1}",
            trainer_version=version,
            prefixes={},
            may_be_empty=len(numbers) < self._limits.groups_per_step,
        )
        answered = {trajectory.lineage.rollout_id: trajectory for trajectory in found}
        for number, group in requests.items():
            self._take(number, group, answered)

    def _take(self, number: int, requests: Sequence[RolloutRequest], answered: Mapping[str, Trajectory]) -> None:
        ids = [request.lineage.rollout_id for request in requests]
        group = in_request_order([answered[name] for name in ids if name in answered], requests)
        for name in ids:
            if name not in answered:
                self.ledger.quarantine(number, self._collector.quarantine.reasons.get(name, "no_answer"))
        reason = "no_response" if not group else self._filtered_for(group)
        if reason:
            self._queue.filter(number)
            if group:
                self.ledger.filter(number, reason)
            return
        self._finished[number] = group
        self._queue.finish(number)

    def _filtered_for(self, group: Sequence[Trajectory]) -> str:
        """The first of `rl.filters` that keeps a group out; empty where none does."""
        return next((name for name in self._config.rl.filters if FILTERS[name](group)), "")

    def _requests(self, number: int) -> list[RolloutRequest]:
        config = self._config
        return self._collector.requests(
            [self._prompt(number)],
            run=f"{self._stage}-{number // config.rl.prompts_per_step:06d}",
            count=config.rl.group_size,
            sampling=sampling_params(config.rollout, config.seed),
            prefixes={},
        )

    def _prompt(self, number: int) -> Prompt:
        step, place = divmod(number, self._config.rl.prompts_per_step)
        chosen = batch_indices(len(self._prompts), self._config.rl.prompts_per_step, step, self._config.seed)
        return self._prompts[chosen[place]]

    def _check_filtered(self, num_groups: int) -> None:
        allowed = MAX_BATCHES * self._limits.groups_per_step
        if num_groups > allowed:
            filtered, refused = dict(self.ledger.filtered), dict(self.ledger.quarantined)
            raise MoerlError(
                "rl.filters: the batch of a step does not fill up",
                seen=f"{num_groups} groups asked for; rollouts of the run filtered {filtered}, refused {refused}",
                expected=f"at most {allowed} groups, {MAX_BATCHES} batches",
                remedy="choose prompts that the model solves sometimes, raise rollout.max_new_tokens or rl.group_size,"
                " or take a filter out of rl.filters",
            )

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """What a checkpoint keeps between two steps; plain JSON."""
        return {"queue": self._queue.snapshot(), "ledger": self.ledger.snapshot()}

    def restore(self, snapshot: Mapping[str, Any], step: int) -> None:
        """Takes over the state of a checkpoint after `step` steps; of one without any, counts from there."""
        if snapshot:
            self._queue = GroupQueue.restored(self._limits, snapshot["queue"])
            self.ledger = Ledger.restored(snapshot["ledger"])
        else:
            number = step * self._config.rl.prompts_per_step
            self._queue, self.ledger = GroupQueue(self._limits, number), Ledger(number)
        self._finished, self._batch = {}, {}


FILTERS: Mapping[str, Callable[[Sequence[Trajectory]], bool]] = {
    "equal_rewards": lambda group: len({trajectory.rewards["reward"] for trajectory in group}) == 1,
    "truncated": lambda group: all(trajectory.finish_reason is FinishReason.LENGTH for trajectory in group),
}
"""Groups that teach nothing, by name: all rewards are equal; no response came to its end."""
