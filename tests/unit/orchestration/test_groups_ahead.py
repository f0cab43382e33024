"""Groups that are sampled while others are trained: bounds, drops, and what a resumed run makes of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from factories import SPEC
from group_sources import FOLDERS, IN_PROCESS, Gate, answer, group_ids, source, trained
from waiting import eventually

from moerl.buffer.journal import Journal
from moerl.contract.ports import UpdateDone
from moerl.contract.trajectory import Trajectory
from moerl.errors import MoerlError, WeightSyncError

# A source that waits for what will not come ends its test with the stacks of all threads.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    FOLDERS[:] = [tmp_path]


def test_the_next_groups_are_sampled_while_a_batch_is_trained() -> None:
    gate = Gate()
    groups, collector = source(gate, *IN_PROCESS)
    gate.open("rl-000000/")
    first = groups.batch()
    assert len(first) == 12
    # Two steps' worth was asked for at once, and nothing more before engines hold the weights of this one.
    assert [len(asked) for asked in collector.asked] == [24]
    gate.open("rl-000001/")
    trained(groups)
    assert groups.ledger.issued == 36
    second = groups.batch()
    assert all(name.startswith("rl-000001/") for name in group_ids(second))
    gate.open("")


def test_a_batch_keeps_its_slots_until_engines_hold_what_came_of_it_and_not_of_another() -> None:
    groups, _ = source(answer, *IN_PROCESS)
    groups.batch()
    groups.trained()
    tell = groups.expect_update()
    # The next one is taken, and trained, while engines still take the weights of the first.
    groups.batch()
    assert groups.ledger.issued == 24
    tell(None)
    assert groups.ledger.issued == 36
    groups.trained()
    groups.expect_update()(None)
    assert groups.ledger.issued == 48
    assert groups.ledger.trained == 24


def test_slots_of_all_steps_since_the_last_update_are_given_back_by_the_next_one() -> None:
    groups, _ = source(answer, *IN_PROCESS, "weights.every=2")
    for step in (1, 2):
        groups.batch()
        groups.trained()
        assert (groups.ledger.issued, groups.ledger.trained) == (24, 12 * step)
    groups.expect_update()(None)
    assert groups.ledger.issued == 48


def test_no_more_is_asked_for_than_will_be_trained_while_a_batch_is_in_training() -> None:
    groups, _ = source(answer, *IN_PROCESS, "rl.steps=4")
    tell: UpdateDone = lambda problem: None  # noqa: E731
    for _ in range(4):
        groups.batch()
        # Engines take the weights of the batch before while this one is trained.
        tell(None)
        groups.trained()
        tell = groups.expect_update()
    tell(None)
    assert (groups.ledger.issued, groups.ledger.trained, groups.ledger.pending) == (48, 48, 0)


def test_a_step_is_not_counted_before_engines_hold_the_weights_of_the_one_before() -> None:
    groups, _ = source(answer, *IN_PROCESS)
    groups.batch()
    groups.trained()
    tell = groups.expect_update()
    groups.batch()
    thread = threading.Thread(target=groups.trained)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert groups.ledger.trained == 12
    tell(None)
    thread.join()
    assert groups.ledger.trained == 24


def test_without_staleness_the_next_step_waits_until_engines_have_the_weights_and_with_it_does_not() -> None:
    def step(*overrides: str) -> tuple[threading.Thread, UpdateDone]:
        groups, _ = source(answer, *overrides)
        groups.batch()
        groups.trained()
        tell = groups.expect_update()
        thread = threading.Thread(target=groups.sent)
        thread.start()
        thread.join(0.2)
        return thread, tell

    ahead, _ = step(*IN_PROCESS)
    assert not ahead.is_alive()
    in_turn, tell = step()
    assert in_turn.is_alive()
    tell(None)
    in_turn.join()


def test_progress_is_shown_while_the_loop_waits_and_not_by_threads_beside_it() -> None:
    beside, collector = source(answer, *IN_PROCESS)
    beside.batch()
    assert collector.watched == []
    in_turn, collector = source(answer)
    in_turn.batch()
    assert collector.watched == list(range(13))


def test_weights_that_engines_did_not_take_end_the_run_and_no_slot_is_given_back() -> None:
    groups, _ = source(answer, *IN_PROCESS)
    groups.batch()
    groups.trained()
    groups.expect_update()(WeightSyncError("the engine holds something else"))
    assert groups.ledger.issued == 24
    for ask in (groups.settle, groups.trained):
        with pytest.raises(WeightSyncError, match="something else"):
            ask()


@pytest.mark.parametrize("ask", ["settle", "batch"])
def test_an_engine_that_hangs_in_an_update_ends_the_run(ask: str) -> None:
    gate = Gate()
    groups, _ = source(gate, *IN_PROCESS, "weights.step_seconds=0.2")
    gate.open("rl-000000/")
    groups.batch()
    groups.trained()
    groups.expect_update()
    with pytest.raises(WeightSyncError, match=r"has not taken the weights; seen: 0\.2 s"):
        getattr(groups, ask)()
    gate.open("")


def test_a_checkpoint_is_the_same_whether_or_not_engines_hold_its_weights_by_then() -> None:
    groups, _ = source(answer, *IN_PROCESS, "rl.steps=1")
    groups.batch()
    groups.trained()
    tell = groups.expect_update()
    before = groups.snapshot()
    tell(None)
    again, _ = source(answer, *IN_PROCESS, "rl.steps=1")
    for snapshot in (before, groups.snapshot()):
        again.restore(snapshot, 1)
        assert again._queue.num_free == groups._queue.num_free
        assert again.ledger.trained == 12


def test_the_batch_after_the_one_in_training_is_seen_ahead_and_stays_where_it_is() -> None:
    gate = Gate()
    groups, _ = source(gate, *IN_PROCESS)
    gate.open("rl-000000/")
    first = groups.batch()
    seen: list[Sequence[Trajectory] | None] = []
    thread = threading.Thread(target=lambda: seen.append(groups.upcoming(1)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    gate.open("")
    thread.join()
    trained(groups)
    second = groups.batch()
    assert seen == [second]
    assert seen[0] != first


def test_nobody_waits_for_a_batch_ahead_once_it_is_asked_for_or_all_is_over() -> None:
    gate = Gate()
    groups, _ = source(gate, *IN_PROCESS)
    seen: list[Sequence[Trajectory] | None] = []
    with closing(groups):
        gate.open("rl-000000/")
        groups.batch()
        trained(groups)
        ahead = [threading.Thread(target=lambda v=v: seen.append(groups.upcoming(v))) for v in (1, 2)]
        ahead[0].start()
        asked = threading.Thread(target=groups.batch)
        asked.start()
        ahead[0].join()
        assert seen == [None]
        gate.open("rl-000001/")
        asked.join()
        ahead[1].start()
    ahead[1].join()
    assert seen == [None, None]
    gate.open("")


def test_the_bound_holds_and_every_rollout_is_trained_once_whatever_the_order() -> None:
    def slow_for_some(rollout_id: str, version: int) -> Trajectory:
        time.sleep(0.001 * (hash(rollout_id) % 5))
        return answer(rollout_id, version, reward=1.0 if "/p3/" in rollout_id else None)

    groups, _ = source(slow_for_some, *IN_PROCESS, "buffer.window=4", "rl.filters=[equal_rewards]")
    seen: list[str] = []
    with closing(groups):
        for _ in range(8):
            batch = groups.batch()
            assert groups.metrics["staleness/age_max"] <= groups.limits.max_age == 2
            seen += [t.lineage.rollout_id for t in batch]
            trained(groups)
    assert len(seen) == len(set(seen)) == groups.ledger.trained == 8 * 12
    assert groups.ledger.pending == 0
    assert groups.ledger.issued == 8 * 12 + groups.ledger.filtered["equal_rewards"]


def test_an_error_beside_the_training_ends_the_run() -> None:
    def broken(rollout_id: str, version: int) -> Trajectory:
        raise MoerlError("the engine is gone")

    groups, _ = source(broken, *IN_PROCESS)
    with pytest.raises(MoerlError, match="the engine is gone"):
        groups.batch()


def test_what_was_sampled_at_a_checkpoint_is_asked_for_again_under_the_same_ids() -> None:
    gate = Gate()
    groups, collector = source(gate, *IN_PROCESS)
    gate.open("rl-000000/")
    groups.batch()
    trained(groups)
    snapshot = json.loads(json.dumps(groups.snapshot()))
    assert [count for _, count in snapshot["ledger"]["pending"]] == [4] * 6
    resumed, again = source(answer, *IN_PROCESS)
    resumed.restore(snapshot, 1)
    batch = resumed.batch()
    asked = [name for call in again.asked for name in call]
    assert [t.lineage.rollout_id for t in batch] == asked[:12]
    assert sorted(asked) == sorted(name for call in collector.asked for name in call if "rl-000000/" not in name)
    assert resumed.ledger.issued == groups.ledger.issued
    gate.open("")


def test_lengths_of_groups_that_are_asked_for_again_count_once() -> None:
    def of_some_length(rollout_id: str, version: int) -> Trajectory:
        return answer(rollout_id, version, num_sampled=1 + sum(rollout_id.encode()) % 4)

    groups, _ = source(of_some_length, *IN_PROCESS)
    groups.batch()
    trained(groups)
    eventually(lambda: len(Journal(FOLDERS[-1] / "journal", SPEC).read()) >= 9)
    snapshot = json.loads(json.dumps(groups.snapshot()))
    assert len(snapshot["queue"]["open"]) == 6
    assert len(snapshot["lengths"]["offered"]) == len(snapshot["lengths"]["trained"]) == 12
    resumed, _ = source(of_some_length, *IN_PROCESS)
    resumed.restore(snapshot, 1)
    resumed.batch()
    trained(resumed)
    lengths = resumed.snapshot()["lengths"]
    assert sorted(lengths["offered"]) == sorted(lengths["trained"])
    assert len(lengths["trained"]) == 24


def test_a_resumed_run_counts_what_a_waiting_group_had_refused_once() -> None:
    def one_refused(rollout_id: str, version: int) -> Trajectory | None:
        return None if rollout_id.endswith("/1") else answer(rollout_id, version)

    groups, _ = source(one_refused, *IN_PROCESS, "rl.keep=2")
    groups.batch()
    trained(groups)
    eventually(lambda: len(Journal(FOLDERS[-1] / "journal", SPEC).read()) >= 9)
    snapshot = json.loads(json.dumps(groups.snapshot()))
    assert [count for _, count in snapshot["ledger"]["pending"]] == [4] * 6
    resumed, _ = source(one_refused, *IN_PROCESS, "rl.keep=2")
    resumed.restore(snapshot, 1)
    resumed.recover()
    assert len(resumed.batch()) == 6
    trained(resumed)
    ledger = resumed.ledger
    assert (ledger.trained, dict(ledger.quarantined), dict(ledger.filtered)) == (
        12,
        {"routing_rows": 6},
        {"not_kept": 6},
    )


@pytest.mark.parametrize("kept", [3, 2])
def test_groups_that_are_too_old_are_dropped_where_asked_for_and_others_do_not_wait_for_them(kept: int) -> None:
    gate = Gate()
    sizes = ("rl.prompts_per_step=1", "buffer.when_stale=drop", f"rl.keep={kept}")
    groups, _ = source(gate, *IN_PROCESS, *sizes)
    for step in (0, 2, 3, 4):
        gate.open(f"rl-00000{step}/")
    with closing(groups):
        seen, left_out = [], 0.0
        for _ in range(2):
            seen += group_ids(groups.batch())
            left_out += groups.metrics["tokens/left_out"]
            trained(groups)
        # Sampled by version 0, it comes when version 2 is trained.
        gate.open("rl-000001/")
        eventually(lambda: len(Journal(FOLDERS[-1] / "journal", SPEC).read()) == 4)
        for _ in range(2):
            seen += group_ids(groups.batch())
            left_out += groups.metrics["tokens/left_out"]
            trained(groups)
    assert [name.partition("/")[0] for name in seen] == [f"rl-00000{step}" for step in (0, 2, 3, 4)]
    assert groups.ledger.filtered["stale"] == 4
    # Each token once: those of the dropped group, and what `rl.keep` leaves out of the four that are trained.
    assert left_out == (4 + 4 * (4 - kept)) * answer("rl-000000/p0/0", 0).num_sampled


def test_how_long_the_engine_had_nothing_to_do_is_told() -> None:
    groups, _ = source(answer)
    groups.batch()
    time.sleep(0.2)
    trained(groups)
    groups.batch()
    assert 0.5 < groups.metrics["waiting/engine_for_slots"] <= 1.0


def test_a_batch_that_was_there_when_it_was_asked_for_is_not_waited_for_afterwards() -> None:
    gate = Gate()
    groups, _ = source(gate, *IN_PROCESS)
    with closing(groups):
        gate.open("rl-000000/")
        groups.batch()
        gate.open("rl-000001/")
        trained(groups)
        groups.batch()
        # A thread that starts this late must not wait for the batch after it.
        assert groups.upcoming(1) is None
    gate.open("")
