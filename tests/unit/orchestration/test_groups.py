"""Batches of groups: filled up where groups are filtered or refused, and every rollout accounted for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from factories import make_trajectory

from moerl.config.load import load_config
from moerl.contract import Prompt, RolloutRequest, Trajectory
from moerl.contract.trajectory import FinishReason, Lineage, SamplingParams
from moerl.errors import MoerlError
from moerl.orchestration.groups import MAX_BATCHES, GroupSource

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
    """Answers at once, in another order than asked for. asked: rollout ids of every call."""

    def __init__(self, answers: Answer) -> None:
        self._answers = answers
        self.quarantine = SimpleNamespace(reasons={})
        self.asked: list[list[str]] = []

    def requests(self, prompts: Sequence[Prompt], *, run: str, count: int, **_: Any) -> list[RolloutRequest]:
        return [
            RolloutRequest(Lineage(f"{run}/{p.prompt_id}/{i}", p.prompt_id, f"{run}/{p.prompt_id}"), (1,), SAMPLING, 4)
            for p in prompts
            for i in range(count)
        ]

    def collect(
        self, prompts: Sequence[Prompt], requests: Sequence[RolloutRequest], purpose: str, **options: Any
    ) -> list[Trajectory]:
        ids = [request.lineage.rollout_id for request in requests]
        self.asked.append(ids)
        found = {name: self._answers(name, options["trainer_version"]) for name in reversed(ids)}
        self.quarantine.reasons = {name: "routing_rows" for name, each in found.items() if each is None}
        return [each for each in found.values() if each is not None]


SAMPLING = SamplingParams()


def source(answers: Answer, *overrides: str) -> tuple[GroupSource, FakeCollector]:
    sizes = ("recipe=tiny", "rl.prompts_per_step=3", "rl.group_size=4")
    config = load_config([*sizes, *overrides], command="train")
    collector: Any = FakeCollector(answers)
    return GroupSource(config, collector, PROMPTS, "rl"), collector


def group_ids(trajectories: Sequence[Trajectory]) -> list[str]:
    return list(dict.fromkeys(t.lineage.group_id for t in trajectories))


def test_every_step_trains_its_own_groups_in_the_order_of_requests() -> None:
    groups, collector = source(answer)
    for step in range(3):
        batch = groups.batch(step)
        assert [t.lineage.rollout_id for t in batch] == collector.asked[-1]
        assert all(name.startswith(f"rl-{step:06d}/") for name in group_ids(batch))
        groups.release()
    assert (groups.ledger.issued, groups.ledger.trained, groups.ledger.pending) == (36, 36, 0)


def test_a_filtered_group_is_replaced_by_the_next_prompt_within_the_step() -> None:
    first: list[str] = []

    def equal_for_the_first(rollout_id: str, version: int) -> Trajectory:
        group = rollout_id.rpartition("/")[0]
        first[:] = first or [group]
        return answer(rollout_id, version, reward=1.0 if group == first[0] else None)

    groups, collector = source(equal_for_the_first, "rl.filters=[equal_rewards]")
    batch = groups.batch(0)
    assert len(group_ids(batch)) == 3
    assert first[0] not in group_ids(batch)
    assert [len(asked) for asked in collector.asked] == [12, 4]
    groups.release()
    assert dict(groups.ledger.filtered) == {"equal_rewards": 4}
    assert (groups.ledger.issued, groups.ledger.trained, groups.ledger.pending) == (16, 12, 0)


def test_a_group_of_responses_that_were_all_cut_off_is_filtered_where_asked_for() -> None:
    def cut_off_in_the_first_step(rollout_id: str, version: int) -> Trajectory:
        reason = FinishReason.LENGTH if rollout_id.startswith("rl-000000/") else FinishReason.STOP
        return answer(rollout_id, version, finish_reason=reason)

    groups, _ = source(cut_off_in_the_first_step, "rl.filters=[truncated]")
    assert all(name.startswith("rl-000001/") for name in group_ids(groups.batch(0)))
    groups, _ = source(cut_off_in_the_first_step)
    assert all(name.startswith("rl-000000/") for name in group_ids(groups.batch(0)))


def test_refused_rollouts_are_counted_by_reason_and_a_group_of_them_is_replaced() -> None:
    refused: list[str] = []

    def refuse_the_first_group_and_one_more(rollout_id: str, version: int) -> Trajectory | None:
        group, _, number = rollout_id.rpartition("/")
        refused[:] = refused or [group]
        return None if group == refused[0] or (number == "2" and version == 1) else answer(rollout_id, version)

    groups, _ = source(refuse_the_first_group_and_one_more)
    assert len(groups.batch(0)) == 12
    groups.release()
    assert len(groups.batch(1)) == 9
    groups.release()
    assert dict(groups.ledger.quarantined) == {"routing_rows": 7}
    assert groups.ledger.issued == groups.ledger.trained + 7


def test_a_batch_that_never_fills_up_ends_the_run() -> None:
    groups, _ = source(lambda name, version: answer(name, version, reward=0.0), "rl.filters=[equal_rewards]")
    with pytest.raises(MoerlError, match=r"rl.filters: the batch of a step does not fill up"):
        groups.batch(0)
    assert groups.ledger.filtered.total() == groups.ledger.issued <= (MAX_BATCHES + 1) * 12


def test_a_token_of_an_older_version_than_the_limits_allow_ends_the_run() -> None:
    def one_old_token(rollout_id: str, version: int) -> Trajectory:
        made = answer(rollout_id, version)
        versions = made.policy_versions.copy()
        if version == 1 and rollout_id.endswith("/3"):
            versions[-1] = 0
        return replace(made, policy_versions=versions)

    groups, _ = source(one_old_token)
    groups.batch(0)
    groups.release()
    with pytest.raises(MoerlError, match="older than the settings allow; seen: 1 versions; expected: at most 0"):
        groups.batch(1)


def test_a_resumed_run_goes_on_with_the_next_prompts_and_the_same_sums() -> None:
    def undisturbed(rollout_id: str, version: int) -> Trajectory:
        is_dull = rollout_id.split("/")[1] in ("p3", "p7")
        return answer(rollout_id, version, reward=1.0 if is_dull else None)

    whole, _ = source(undisturbed, "rl.filters=[equal_rewards]")
    expected, snapshots = [], []
    for step in range(4):
        expected.append(group_ids(whole.batch(step)))
        whole.release()
        snapshots.append(json.loads(json.dumps(whole.snapshot())))
    for done in range(1, 4):
        resumed, _ = source(undisturbed, "rl.filters=[equal_rewards]")
        resumed.restore(snapshots[done - 1], done)
        for step in range(done, 4):
            assert group_ids(resumed.batch(step)) == expected[step]
            resumed.release()
        assert resumed.snapshot() == whole.snapshot()


def test_a_checkpoint_without_a_ledger_goes_on_with_the_prompts_of_its_step() -> None:
    groups, _ = source(answer)
    groups.restore({}, 2)
    assert all(name.startswith("rl-000002/") for name in group_ids(groups.batch(2)))
    groups.release()
    assert (groups.ledger.issued, groups.ledger.trained) == (12, 12)
