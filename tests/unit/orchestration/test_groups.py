"""Batches of groups: filled up where groups are filtered or refused, and every rollout accounted for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import SPEC, make_trajectory
from waiting import eventually

from moerl.buffer.journal import Journal
from moerl.config.load import load_config
from moerl.contract import Prompt, RolloutRequest, Trajectory
from moerl.contract.quarantine import Quarantine, Refusal
from moerl.contract.trajectory import FinishReason, Lineage, SamplingParams
from moerl.errors import MoerlError
from moerl.orchestration.groups import MAX_BATCHES, GroupSource
from moerl.orchestration.rollouts import Outcome

PROMPTS = [Prompt(f"p{i}", f"{i}+1=") for i in range(12)]
Answer = Callable[[str, int], Trajectory | None]
"""What becomes of a rollout, by its id and the version: None where it is refused."""


def answer(rollout_id: str, version: int, *, reward: float | None = None, **changes: Any) -> Trajectory:
    group, _, number = rollout_id.rpartition("/")
    prompt = group.rpartition("/")[2]
    made = make_trajectory(np.random.default_rng(0))
    changes.setdefault("policy_versions", np.where(made.sampled, np.int32(version), np.int32(-1)))
    rewards = {"reward": float(number) if reward is None else reward, "accuracy": 0.0}
    return replace(made, lineage=Lineage(rollout_id, prompt, group), rewards=rewards, **changes)


class FakeCollector:
    """Answers at once, in an order of its own. asked: rollout ids of every call. refused: by call."""

    def __init__(self, answers: Answer) -> None:
        self._answers = answers
        self.asked: list[list[str]] = []
        self.told: list[tuple[int, int]] = []

        self.said: list[str] = []
        self.say = self.said.append
        self.quarantine = Quarantine(FOLDERS[-1] / "quarantine", max_rate=1.0)

    def watch(self, done: int, total: int, tokens: int) -> None:
        assert 0 <= done <= total

    def requests(self, prompts: Sequence[Prompt], *, run: str, count: int, **_: Any) -> list[RolloutRequest]:
        return [
            RolloutRequest(Lineage(f"{run}/{p.prompt_id}/{i}", p.prompt_id, f"{run}/{p.prompt_id}"), (1,), SAMPLING, 4)
            for p in prompts
            for i in range(count)
        ]

    def outcomes(
        self, prompts: Sequence[Prompt], requests: Sequence[RolloutRequest], version: Callable[[], int], _: object
    ) -> Generator[Outcome]:
        ids = [request.lineage.rollout_id for request in requests]
        self.asked.append(ids)
        for name in sorted(ids):
            found = self._answers(name, version())
            yield Outcome(name, found, None if found is not None else Refusal("routing_rows", "routing_rows in x, 7"))

    def tell_refused(self, purpose: str, num_refused: int, num_asked: int, first: str) -> None:
        assert bool(first) == bool(num_refused)
        self.told.append((num_refused, num_asked))


SAMPLING = SamplingParams()
FOLDERS: list[Path] = []
"""Of the test that runs."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    FOLDERS[:] = [tmp_path]


def source(answers: Answer, *overrides: str) -> tuple[GroupSource, FakeCollector]:
    sizes = ("recipe=tiny", "rl.steps=8", "rl.prompts_per_step=3", "rl.group_size=4")
    config = load_config([*sizes, *overrides], command="train")
    collector: Any = FakeCollector(answers)
    groups = GroupSource(config, collector, PROMPTS, "rl", Journal(FOLDERS[-1] / "journal", SPEC))
    groups.restore({}, 0)
    return groups, collector


def trained(groups: GroupSource) -> None:
    """A step, after which engines hold its weights."""
    groups.version += 1
    groups.release()


def group_ids(trajectories: Sequence[Trajectory]) -> list[str]:
    return list(dict.fromkeys(t.lineage.group_id for t in trajectories))


def test_every_step_trains_its_own_groups_in_the_order_of_requests() -> None:
    groups, collector = source(answer)
    for step in range(3):
        batch = groups.batch()
        assert [t.lineage.rollout_id for t in batch] == collector.asked[-1]
        assert all(name.startswith(f"rl-{step:06d}/") for name in group_ids(batch))
        trained(groups)
    assert (groups.ledger.issued, groups.ledger.trained, groups.ledger.pending) == (36, 36, 0)


def test_a_filtered_group_is_replaced_by_the_next_prompt_within_the_step() -> None:
    first: list[str] = []

    def equal_for_the_first(rollout_id: str, version: int) -> Trajectory:
        group = rollout_id.rpartition("/")[0]
        first[:] = first or [group]
        return answer(rollout_id, version, reward=1.0 if group == first[0] else None)

    groups, collector = source(equal_for_the_first, "rl.filters=[equal_rewards]")
    batch = groups.batch()
    assert len(group_ids(batch)) == 3
    assert first[0] not in group_ids(batch)
    assert [len(asked) for asked in collector.asked] == [12, 4]
    trained(groups)
    assert dict(groups.ledger.filtered) == {"equal_rewards": 4}
    assert (groups.ledger.issued, groups.ledger.trained, groups.ledger.pending) == (16, 12, 0)


def test_a_group_of_responses_that_were_all_cut_off_is_filtered_where_asked_for() -> None:
    def cut_off_in_the_first_step(rollout_id: str, version: int) -> Trajectory:
        reason = FinishReason.LENGTH if rollout_id.startswith("rl-000000/") else FinishReason.STOP
        return answer(rollout_id, version, finish_reason=reason)

    groups, _ = source(cut_off_in_the_first_step, "rl.filters=[truncated]")
    assert all(name.startswith("rl-000001/") for name in group_ids(groups.batch()))
    groups, _ = source(cut_off_in_the_first_step)
    assert all(name.startswith("rl-000000/") for name in group_ids(groups.batch()))


def test_refused_rollouts_are_counted_by_reason_and_a_group_of_them_is_replaced() -> None:
    refused: list[str] = []

    def refuse_the_first_group_and_one_more(rollout_id: str, version: int) -> Trajectory | None:
        group, _, number = rollout_id.rpartition("/")
        refused[:] = refused or [group]
        return None if group == refused[0] or (number == "2" and version == 1) else answer(rollout_id, version)

    groups, _ = source(refuse_the_first_group_and_one_more)
    assert len(groups.batch()) == 12
    trained(groups)
    assert len(groups.batch()) == 9
    trained(groups)
    assert dict(groups.ledger.quarantined) == {"routing_rows": 7}
    assert groups.ledger.issued == groups.ledger.trained + 7


def test_a_batch_that_never_fills_up_ends_the_run() -> None:
    groups, _ = source(lambda name, version: answer(name, version, reward=0.0), "rl.filters=[equal_rewards]")
    with pytest.raises(MoerlError, match=r"rl.filters: the batch of a step does not fill up"):
        groups.batch()
    assert groups.ledger.filtered.total() == groups.ledger.issued <= (MAX_BATCHES + 1) * 12


def test_a_token_of_an_older_version_than_the_limits_allow_ends_the_run() -> None:
    def one_old_token(rollout_id: str, version: int) -> Trajectory:
        made = answer(rollout_id, version)
        versions = made.policy_versions.copy()
        if version == 1 and rollout_id.endswith("/3"):
            versions[-1] = 0
        return replace(made, policy_versions=versions)

    groups, _ = source(one_old_token)
    groups.batch()
    trained(groups)
    with pytest.raises(MoerlError, match="older than the settings allow; seen: 1 versions; expected: at most 0"):
        groups.batch()


def test_a_resumed_run_goes_on_with_the_next_prompts_and_the_same_sums() -> None:
    def undisturbed(rollout_id: str, version: int) -> Trajectory:
        is_dull = rollout_id.split("/")[1] in ("p3", "p7")
        return answer(rollout_id, version, reward=1.0 if is_dull else None)

    whole, _ = source(undisturbed, "rl.filters=[equal_rewards]")
    expected, snapshots = [], []
    for _ in range(4):
        expected.append(group_ids(whole.batch()))
        trained(whole)
        snapshots.append(json.loads(json.dumps(whole.snapshot())))
    for done in range(1, 4):
        resumed, _ = source(undisturbed, "rl.filters=[equal_rewards]")
        resumed.restore(snapshots[done - 1], done)
        for step in range(done, 4):
            assert group_ids(resumed.batch()) == expected[step]
            trained(resumed)
        assert resumed.snapshot() == whole.snapshot()


def test_a_checkpoint_without_a_ledger_goes_on_with_the_prompts_of_its_step() -> None:
    groups, _ = source(answer)
    groups.restore({}, 2)
    assert all(name.startswith("rl-000002/") for name in group_ids(groups.batch()))
    trained(groups)
    assert (groups.ledger.issued, groups.ledger.trained) == (12, 12)


def test_groups_that_were_finished_before_a_crash_are_not_sampled_again() -> None:
    def one_refused(rollout_id: str, version: int) -> Trajectory | None:
        return None if rollout_id.endswith("/1") else answer(rollout_id, version)

    groups, _ = source(one_refused)
    for step in (1, 2):
        groups.batch()
        trained(groups)
        groups.committed(step, groups.snapshot())
    snapshot = json.loads(json.dumps(groups.snapshot()))
    lost = [t.lineage.rollout_id for t in groups.batch()]
    trained(groups)
    groups.batch()
    # Killed here: steps 3 and 4 are lost, but what the weights after step 2 have sampled is not.
    resumed, collector = source(one_refused)
    resumed.restore(snapshot, 2)
    resumed.recover()
    # Those of version 3 could not be taken, and are not written.
    assert collector.said == ["finished groups that are taken from the journal: 3"]
    assert [t.lineage.rollout_id for t in resumed.batch()] == lost
    assert collector.asked == []
    assert collector.quarantine.counters() == {"admitted": 9, "routing_rows": 3}
    trained(resumed)
    assert dict(resumed.ledger.quarantined) == {"routing_rows": 9}
    resumed.batch()
    assert len(collector.asked) == 1


def test_a_batch_that_is_all_in_the_journal_is_there_at_once_also_beside_the_training() -> None:
    groups, _ = source(answer, *BESIDE)
    groups.batch()
    trained(groups)
    snapshot = groups.snapshot()
    while len(Journal(FOLDERS[-1] / "journal", SPEC).read()) < 9:
        time.sleep(0.01)
    groups.batch()
    trained(groups)
    while len(Journal(FOLDERS[-1] / "journal", SPEC).read()) < 12:
        time.sleep(0.01)
    resumed, collector = source(answer, *BESIDE)
    resumed.restore(snapshot, 1)
    resumed.recover()
    assert collector.said == [
        "finished groups that are taken from the journal: 6; 3 were sampled by weights of lost steps, and are sampled"
        " again"
    ]
    assert all(name.startswith("rl-000001/") for name in group_ids(resumed.batch()))
    assert collector.asked == []


def test_a_journal_holds_no_more_than_two_checkpoints_may_ask_for() -> None:
    groups, _ = source(answer)
    for step in range(1, 7):
        groups.batch()
        trained(groups)
        groups.committed(step, groups.snapshot())
        assert len(list((FOLDERS[-1] / "journal").iterdir())) <= 2
    groups.finished()
    assert list((FOLDERS[-1] / "journal").iterdir()) == []


# --- beside the training ---------------------------------------------------------------------------------------------

BESIDE = ("rollout.placement=beside", "buffer.max_staleness=1")


class Gate:
    """Rollouts of a step are answered once the gate is open for it."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._changed = threading.Condition()

    def __call__(self, rollout_id: str, version: int) -> Trajectory:
        with self._changed:
            self._changed.wait_for(lambda: any(rollout_id.startswith(each) for each in self._open))
        return answer(rollout_id, version)

    def open(self, prefix: str) -> None:
        with self._changed:
            self._open.add(prefix)
            self._changed.notify_all()


def test_the_next_groups_are_sampled_while_a_batch_is_trained() -> None:
    gate = Gate()
    groups, collector = source(gate, *BESIDE)
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


def test_the_bound_holds_and_every_rollout_is_trained_once_whatever_the_order() -> None:
    def slow_for_some(rollout_id: str, version: int) -> Trajectory:
        time.sleep(0.001 * (hash(rollout_id) % 5))
        return answer(rollout_id, version, reward=1.0 if "/p3/" in rollout_id else None)

    groups, _ = source(slow_for_some, *BESIDE, "buffer.window=4", "rl.filters=[equal_rewards]")
    seen: list[str] = []
    with groups.open():
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

    groups, _ = source(broken, *BESIDE)
    with pytest.raises(MoerlError, match="the engine is gone"):
        groups.batch()


def test_what_was_sampled_at_a_checkpoint_is_asked_for_again_under_the_same_ids() -> None:
    gate = Gate()
    groups, collector = source(gate, *BESIDE)
    gate.open("rl-000000/")
    groups.batch()
    trained(groups)
    snapshot = json.loads(json.dumps(groups.snapshot()))
    assert [count for _, count in snapshot["ledger"]["pending"]] == [4] * 6
    resumed, again = source(answer, *BESIDE)
    resumed.restore(snapshot, 1)
    batch = resumed.batch()
    asked = [name for call in again.asked for name in call]
    assert [t.lineage.rollout_id for t in batch] == asked[:12]
    assert sorted(asked) == sorted(name for call in collector.asked for name in call if "rl-000000/" not in name)
    assert resumed.ledger.issued == groups.ledger.issued
    gate.open("")


def test_groups_that_are_too_old_are_dropped_where_asked_for_and_others_do_not_wait_for_them() -> None:
    gate = Gate()
    sizes = ("rl.prompts_per_step=1", "buffer.when_stale=drop")
    groups, _ = source(gate, *BESIDE, *sizes)
    for step in (0, 2, 3, 4):
        gate.open(f"rl-00000{step}/")
    with groups.open():
        seen = []
        for _ in range(2):
            seen += group_ids(groups.batch())
            trained(groups)
        # Sampled by version 0, it comes when version 2 is trained.
        gate.open("rl-000001/")
        eventually(lambda: len(Journal(FOLDERS[-1] / "journal", SPEC).read()) == 4)
        left_out = 0.0
        for _ in range(2):
            seen += group_ids(groups.batch())
            left_out += groups.metrics["tokens/left_out"]
            trained(groups)
    assert [name.partition("/")[0] for name in seen] == [f"rl-00000{step}" for step in (0, 2, 3, 4)]
    assert dict(groups.ledger.filtered) == {"stale": 4}
    assert left_out == 4 * answer("rl-000000/p0/0", 0).num_sampled


def test_how_long_the_engine_had_nothing_to_do_is_told() -> None:
    groups, _ = source(answer)
    groups.batch()
    time.sleep(0.2)
    trained(groups)
    groups.batch()
    assert 0.5 < groups.metrics["waiting/engine_for_slots"] <= 1.0
