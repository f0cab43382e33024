"""Batches of groups: filled up where groups are filtered or refused, and every rollout accounted for."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
from disks import full_disk
from factories import SPEC
from group_sources import FOLDERS, IN_PROCESS, FakeCollector, answer, group_ids, source, trained

from moerl.buffer.journal import Journal
from moerl.contract.trajectory import FinishReason, Trajectory
from moerl.errors import MoerlError
from moerl.orchestration.groups import GroupSource
from moerl.orchestration.selection import MAX_BATCHES

# A source that waits for what will not come ends its test with the stacks of all threads.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    FOLDERS[:] = [tmp_path]


def test_every_step_trains_its_own_groups_in_the_order_of_requests() -> None:
    groups, collector = source(answer)
    for step in range(3):
        batch = groups.batch()
        assert [t.lineage.rollout_id for t in batch] == collector.asked[-1]
        assert all(name.startswith(f"rl-{step:06d}/") for name in group_ids(batch))
        trained(groups)
    assert (groups.ledger.issued, groups.ledger.trained, groups.ledger.pending) == (36, 36, 0)


def test_an_episode_counts_once_however_many_sessions_it_had(tmp_path: Path) -> None:
    def with_two_sessions(rollout_id: str, version: int) -> list[Trajectory]:
        sessions = [answer(rollout_id, version), answer(rollout_id, version)]
        names = (rollout_id, f"{rollout_id}~1")
        return [
            replace(t, lineage=replace(t.lineage, rollout_id=name, episode_id=rollout_id))
            for t, name in zip(sessions, names, strict=True)
        ]

    groups, _ = source(with_two_sessions, "rl.keep=3", "rl.keep_by=shortest")
    batch = groups.batch()
    assert len(batch) == 3 * 3 * 2
    trained(groups)
    assert (groups.ledger.issued, groups.ledger.trained, groups.ledger.pending) == (12, 9, 0)
    assert dict(groups.ledger.filtered) == {"not_kept": 3}


def test_a_finished_group_of_episodes_is_not_sampled_again_after_a_crash() -> None:
    def with_a_fork(rollout_id: str, version: int) -> list[Trajectory]:
        first = answer(rollout_id, version)
        lineage = replace(first.lineage, episode_id=rollout_id)
        fork = replace(lineage, rollout_id=f"{rollout_id}~1", parent_rollout_id=rollout_id, fork_at=4)
        return [replace(first, lineage=lineage), replace(first, lineage=fork)]

    before, _ = source(with_a_fork, *IN_PROCESS)
    before.batch()
    trained(before)
    before.committed(1, snapshot := before.snapshot())
    batch = before.batch()
    before.close()
    after, collector = source(with_a_fork, *IN_PROCESS)
    after.restore(snapshot, 1)
    after.recover()
    again = after.batch()
    assert [t.lineage for t in again] == [t.lineage for t in batch]
    assert not {t.lineage.episode for t in again} & {name for asked in collector.asked for name in asked}
    after.close()


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


def test_lengths_go_on_after_each_of_two_resumes() -> None:
    def of_some_length(rollout_id: str, version: int) -> Trajectory:
        return answer(rollout_id, version, num_sampled=1 + crc32(rollout_id.encode()) // 256 % 9)

    whole, _ = source(of_some_length, "rl.keep=2")
    expected = []
    for _ in range(6):
        whole.batch()
        trained(whole)
        expected.append({name: value for name, value in whole.metrics.items() if name.startswith("lengths/")})
    found, snapshot = [], {}
    for done in (0, 2, 4):
        resumed, _ = source(of_some_length, "rl.keep=2")
        resumed.restore(snapshot, done)
        for _ in range(2):
            resumed.batch()
            trained(resumed)
            found.append({name: value for name, value in resumed.metrics.items() if name.startswith("lengths/")})
        snapshot = json.loads(json.dumps(resumed.snapshot()))
    assert found == expected
    assert len({each["lengths/offered_mean"] for each in expected}) > 2


def test_a_checkpoint_that_has_no_lengths_is_gone_on_from() -> None:
    groups, _ = source(answer)
    groups.batch()
    trained(groups)
    snapshot = {name: value for name, value in groups.snapshot().items() if name != "lengths"}
    groups.restore(json.loads(json.dumps(snapshot)), 1)
    groups.batch()
    assert groups.metrics["lengths/distance"] == 0.0


def test_a_checkpoint_without_a_ledger_goes_on_with_the_prompts_of_its_step() -> None:
    groups, _ = source(answer)
    groups.restore({}, 2)
    assert all(name.startswith("rl-000002/") for name in group_ids(groups.batch()))
    trained(groups)
    assert (groups.ledger.issued, groups.ledger.trained) == (12, 12)


@pytest.mark.parametrize("is_answered", [True, False])
def test_groups_that_were_finished_before_a_crash_are_not_sampled_again(is_answered: bool) -> None:
    def one_refused(rollout_id: str, version: int) -> Trajectory | None:
        return None if rollout_id.endswith("/1") else answer(rollout_id, version)

    groups, sampling = source(one_refused)
    sampling.answers_all = is_answered
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
    # What the engine did not answer is in the ledger alone, as in the first process.
    assert collector.quarantine.counters() == {"admitted": 9, **({"routing_rows": 3} if is_answered else {})}
    trained(resumed)
    assert dict(resumed.ledger.quarantined) == {"routing_rows" if is_answered else "no_answer": 9}
    resumed.batch()
    assert len(collector.asked) == 1


def test_after_a_full_disk_at_the_journal_each_resume_takes_the_whole_groups_and_every_rollout_ends_once() -> None:
    groups, _ = source(answer)
    groups.batch()
    trained(groups)
    groups.committed(1, groups.snapshot())
    snapshot = json.loads(json.dumps(groups.snapshot()))
    batch = [t.lineage.rollout_id for t in groups.batch()]
    segment = FOLDERS[-1] / "journal" / "000001.journal"
    size = segment.stat().st_size
    segment.unlink()

    def gone_on() -> tuple[GroupSource, FakeCollector]:
        resumed, collector = source(answer)
        resumed.restore(snapshot, 1)
        resumed.recover()
        return resumed, collector

    # The first group fits, the second one is torn.
    with full_disk(size // 2), pytest.raises(MoerlError, match=f"cannot write {segment}; seen: File too large"):
        gone_on()[0].batch()
    again, collector = gone_on()
    torn = f"note: the journal has {size // 2 - size // 3} bytes of unfinished records; left out"
    assert collector.said == [torn, "finished groups that are taken from the journal: 1"]
    assert [t.lineage.rollout_id for t in again.batch()] == batch
    assert [len(asked) for asked in collector.asked] == [8]
    # Killed here, and resumed for a second time, and a third.
    for resumed, collector in (gone_on() for _ in range(2)):
        assert collector.said == ["finished groups that are taken from the journal: 3"]
        assert [t.lineage.rollout_id for t in resumed.batch()] == batch
        assert collector.asked == []
        trained(resumed)
        assert (resumed.ledger.issued, resumed.ledger.trained, resumed.ledger.pending) == (24, 24, 0)


def test_a_batch_that_is_all_in_the_journal_is_there_at_once_also_beside_the_training() -> None:
    groups, _ = source(answer, *IN_PROCESS)
    groups.batch()
    trained(groups)
    snapshot = groups.snapshot()
    while len(Journal(FOLDERS[-1] / "journal", SPEC).read()) < 9:
        time.sleep(0.01)
    groups.batch()
    trained(groups)
    while len(Journal(FOLDERS[-1] / "journal", SPEC).read()) < 12:
        time.sleep(0.01)
    resumed, collector = source(answer, *IN_PROCESS)
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


def test_of_a_group_that_is_larger_than_asked_for_some_are_trained_and_ages_are_theirs() -> None:
    # Rewards are 0 to 3: of the two that succeed and the two that fail one each is kept.
    groups, _ = source(answer, "rl.keep=2")
    for _ in range(2):
        batch = groups.batch()
        assert len(batch) == 6
        by_group = [[t.rewards["reward"] for t in batch if t.lineage.group_id == name] for name in group_ids(batch)]
        assert all(low < 1.5 < high for low, high in by_group)
        assert groups.metrics["staleness/age_max"] == max(
            groups.version - int(t.policy_versions[t.sampled].min()) for t in batch
        )
        trained(groups)
    assert (groups.ledger.issued, groups.ledger.trained, dict(groups.ledger.filtered)) == (24, 12, {"not_kept": 12})


def limited(rollout_id: str, version: int) -> Trajectory | str | None:
    """One rollout of each group is refused and one is left out; of the groups of p1 all are left out."""
    _, prompt, number = rollout_id.split("/")
    if prompt == "p1" or number == "2":
        return "episode_limited"
    return None if number == "3" else answer(rollout_id, version)


def test_rollouts_that_are_left_out_are_filtered_in_the_ledger_and_not_trained() -> None:
    groups, collector = source(limited)
    for _ in range(4):  # each prompt once, and another group in the place of those of p1
        batch = groups.batch()
        assert [t.lineage.rollout_id.rpartition("/")[2] for t in batch] == ["0", "1"] * 3
        assert all("/p1/" not in t.lineage.rollout_id for t in batch)
        trained(groups)
    num_groups = groups.ledger.issued // 4
    ones = sum("/p1/" in name for names in collector.asked for name in names) // 4
    assert ones
    assert dict(groups.ledger.filtered) == {"episode_limited": 4 * ones + num_groups - ones}
    assert groups.ledger.quarantined.total() == groups.ledger.issued - groups.ledger.trained - (
        groups.ledger.filtered.total() + groups.ledger.pending
    )


def test_groups_of_the_journal_keep_what_was_left_out() -> None:
    first, _ = source(limited, *IN_PROCESS)
    first.batch()
    trained(first)
    first.committed(1, snapshot := first.snapshot())
    first.batch()
    second, collector = source(limited, *IN_PROCESS)
    second.restore(json.loads(json.dumps(snapshot)), 1)
    second.recover()
    second.batch()
    trained(second)
    taken = [said for said in collector.said if "taken from the journal" in said]
    assert taken
    assert not taken[0].endswith(": 0")
    second.ledger.check()
    assert second.ledger.filtered["episode_limited"] > first.ledger.filtered["episode_limited"] / 2


def solved(rollout_id: str, version: int) -> Trajectory:
    """The first three prompts are always solved, the others half of the time."""
    prompt, number = rollout_id.split("/")[-2:]
    made = answer(rollout_id, version)
    always = prompt in ("p0", "p1", "p2")
    return made.with_rewards({"reward": float(number), "accuracy": float(always or int(number) % 2)})


def test_solved_prompts_are_passed_over_and_a_run_that_goes_on_takes_the_same_ones():
    def prompts(groups: GroupSource, steps: int) -> list[str]:
        found = []
        for _ in range(steps):
            found += group_ids(groups.batch())
            trained(groups)
        return found

    whole, _ = source(solved, "rl.skip_above=0.9")
    wanted = prompts(whole, 8)
    # The first epoch has all twelve; of the second, the solved ones are left out.
    assert len({name.rpartition("/")[2] for name in wanted[:12]}) == 12
    assert {name.rpartition("/")[2] for name in wanted[12:]}.isdisjoint({"p0", "p1", "p2"})
    first, _ = source(solved, "rl.skip_above=0.9")
    begun = prompts(first, 5)
    assert first.metrics["curriculum/passed"] >= 0.0
    second, _ = source(solved, "rl.skip_above=0.9")
    second.restore(json.loads(json.dumps(first.snapshot())), 5)
    assert begun + prompts(second, 3) == wanted
