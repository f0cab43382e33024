"""Slots and window: the age of what is trained has a bound, which is reached and never passed; nothing is dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moerl.buffer.queue import GroupQueue, GroupState, QueueLimits, age, check_ages
from moerl.errors import ConfigError, MoerlError


@st.composite
def limits_of_runs(draw: st.DrawFn, *, drops: bool) -> QueueLimits:
    per_step, staleness = draw(st.integers(1, 5)), draw(st.integers(int(drops), 3))
    window = 1 if drops or not staleness else draw(st.integers(1, 20))
    return QueueLimits(per_step, staleness, window, drops, update_every=draw(st.integers(1, staleness + 1)))


waiting_limits, dropping_limits = limits_of_runs(drops=False), limits_of_runs(drops=True)


class Simulation:
    """Engines and a trainer around a queue: a group's tokens are sampled from the version at its dispatch on."""

    def __init__(self, limits: QueueLimits) -> None:
        self.queue, self.version, self.engine_version = GroupQueue(limits), 0, 0
        self.versions: dict[int, int] = {}
        self.trained: list[int] = []
        self.filtered: set[int] = set()
        self.ages: list[int] = []

    def dispatch(self) -> None:
        while self.queue.num_free:
            self.versions[self.queue.dispatch()] = self.engine_version

    def train(self, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """One step where a batch is full; `meanwhile` happens before engines hold its weights, if they get them."""
        if self.queue.limits.drops:
            for number in self.queue.numbers(GroupState.FINISHED):
                if self.version - self.versions[number] > self.queue.limits.max_age:
                    self.queue.filter(number)
                    self.filtered.add(number)
        batch = self.queue.take()
        if not batch:
            return False
        self.ages += [age(self.version, [self.versions[number]]) for number in batch]
        self.trained += batch
        meanwhile()
        self.version += 1
        if self.version % self.queue.limits.update_every == 0:
            self.engine_version = self.version
            self.queue.release(self.queue.numbers(GroupState.TAKEN))
        return True


@given(waiting_limits | dropping_limits, st.data())
def test_no_order_of_arrival_makes_a_group_older_than_the_bound_and_every_group_is_trained_or_filtered_once(
    limits: QueueLimits, data: st.DataObject
) -> None:
    simulation = Simulation(limits)
    queue = simulation.queue

    def something_happens() -> None:
        simulation.dispatch()
        running = queue.numbers(GroupState.RUNNING)
        for number in data.draw(st.lists(st.sampled_from(running), unique=True) if running else st.just([])):
            if data.draw(st.integers(0, 4)) == 0:
                queue.filter(number)
                simulation.filtered.add(number)
            else:
                queue.finish(number)

    for _ in range(data.draw(st.integers(1, 25))):
        something_happens()
        simulation.train(something_happens)
        if data.draw(st.integers(0, 9)) == 0:
            # A crash between two steps: what was not trained is sampled again, by the weights of then.
            simulation.engine_version = simulation.version
            simulation.queue = queue = GroupQueue.restored(limits, queue.snapshot())
            simulation.versions |= dict.fromkeys(queue.numbers(GroupState.RUNNING), simulation.version)
    # Everything arrives in the end.
    while queue.numbers(GroupState.RUNNING):
        for number in queue.numbers(GroupState.RUNNING):
            queue.finish(number)
    while simulation.train():
        pass
    check_ages(simulation.ages, limits)
    left = set(queue.numbers(GroupState.FINISHED))
    assert sorted([*simulation.trained, *simulation.filtered, *left]) == list(range(queue.next_number))
    assert len(left) < limits.groups_per_step


@given(waiting_limits)
def test_the_bound_is_reached_where_the_last_group_of_a_step_is_the_slowest(limits: QueueLimits) -> None:
    simulation = Simulation(limits)
    queue = simulation.queue
    # With few updates the slots may end before the window does.
    assume(limits.update_every == 1 or limits.window == 1)
    # Late enough that all slots are in turn, and the last group that is dispatched at an update.
    slow = 4 * limits.update_every * limits.slots * limits.groups_per_step + limits.slots - 1
    while True:
        simulation.dispatch()
        for number in queue.numbers(GroupState.RUNNING):
            if number != slow:
                queue.finish(number)
        if not simulation.train():
            queue.finish(slow)
            simulation.train()
            break
    assert slow in simulation.trained
    assert max(simulation.ages) == limits.max_age


@pytest.mark.parametrize(
    ("per_step", "staleness", "window", "bound"),
    [(4, 0, 1, 0), (4, 1, 1, 1), (4, 1, 2, 2), (4, 1, 5, 2), (4, 1, 6, 3), (1, 2, 3, 4), (8, 3, 32, 7)],
)
def test_the_bound_is_the_published_formula(per_step: int, staleness: int, window: int, bound: int) -> None:
    assert QueueLimits(per_step, staleness, window).max_age == bound


def test_a_window_without_staleness_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"buffer.window: nothing can pass a slow group"):
        QueueLimits(4, 0, window=2)


@pytest.mark.parametrize(("staleness", "every"), [(0, 2), (1, 3), (2, 0)])
def test_slots_that_do_not_last_until_engines_are_updated_are_refused(staleness: int, every: int) -> None:
    with pytest.raises(ConfigError, match=rf"weights.every: .*; expected: 1 to {staleness + 1}"):
        QueueLimits(4, staleness, update_every=every)


def test_without_staleness_every_step_waits_for_its_own_groups() -> None:
    queue = GroupQueue(QueueLimits(3))
    first = [queue.dispatch() for _ in range(3)]
    assert (first, queue.num_free) == ([0, 1, 2], 0)
    for number in (2, 0):
        queue.finish(number)
    assert queue.take() == []
    queue.finish(1)
    assert queue.take() == [0, 1, 2]
    assert queue.num_free == 0
    queue.release([0, 1, 2])
    assert queue.num_free == 3


def test_a_filtered_group_gives_its_slot_back_at_once_and_the_next_one_takes_its_place() -> None:
    queue = GroupQueue(QueueLimits(2))
    for _ in range(2):
        queue.dispatch()
    queue.filter(0)
    assert queue.num_free == 1
    assert queue.dispatch() == 2
    queue.finish(2)
    queue.finish(1)
    assert queue.take() == [1, 2]


def test_a_window_lets_finished_groups_pass_a_slow_one_but_no_further() -> None:
    queue = GroupQueue(QueueLimits(1, max_staleness=3, window=2))
    for _ in range(4):
        queue.dispatch()
    for number in (1, 2, 3):
        queue.finish(number)
    assert queue.take() == [1]
    queue.release([1])
    assert queue.take() == []
    queue.finish(0)
    assert [queue.take(), queue.take(), queue.take()] == [[0], [2], [3]]


def test_where_too_old_groups_are_dropped_a_slow_group_holds_up_no_other() -> None:
    queue = GroupQueue(QueueLimits(1, max_staleness=2, drops=True))
    queue.dispatch()
    for number in range(1, 20):
        assert queue.dispatch() == number
        queue.finish(number)
        assert queue.take() == [number]
        queue.release([number])
    assert (queue.num_free, queue.snapshot()) == (2, {"next_number": 20, "open": [0], "released": []})


@pytest.mark.parametrize(("staleness", "window"), [(0, 1), (1, 2)])
def test_dropping_without_staleness_or_with_a_window_is_refused(staleness: int, window: int) -> None:
    with pytest.raises(ConfigError, match=r"buffer.when_stale=drop: groups are trained as they finish"):
        QueueLimits(4, staleness, window, drops=True)


def test_no_slot_no_group_and_nothing_ends_twice() -> None:
    queue = GroupQueue(QueueLimits(1))
    queue.dispatch()
    with pytest.raises(MoerlError, match="no slot is free"):
        queue.dispatch()
    queue.finish(0)
    with pytest.raises(MoerlError, match="group 0; seen: finished; expected: running"):
        queue.finish(0)
    queue.filter(0)
    with pytest.raises(MoerlError, match="group 0; seen: not in the queue"):
        queue.filter(0)


def test_a_batch_that_is_too_old_ends_the_run() -> None:
    limits = QueueLimits(2, max_staleness=1)
    check_ages([0, 1], limits)
    with pytest.raises(MoerlError, match="seen: 2 versions; expected: at most 1"):
        check_ages([0, 2], limits)
