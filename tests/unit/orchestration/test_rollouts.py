"""From engine answers to rewarded trajectories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from factories import SPEC, make_trajectory, values_of
from policy_rows import grpo

from moerl.algorithms.arrays import with_advantages
from moerl.algorithms.policy import RewardedBatch
from moerl.contract import trajectory as trajectory_module
from moerl.contract.layers import LayerSelection, select_layers
from moerl.contract.ports import EngineInfo, Prompt, ReportedLayers, RolloutRecord, RolloutRequest
from moerl.contract.quarantine import Quarantine, read_quarantined
from moerl.contract.reasons import Reason
from moerl.contract.trajectory import SamplingParams, Trajectory
from moerl.errors import ContractError, MoerlError, RewardError
from moerl.orchestration.rollouts import Collector, in_request_order
from moerl.tasks.rewards import at_once
from moerl.tasks.rewards.make import make_scorer
from moerl.tasks.rewards.section import JsonReward

PROMPT = Prompt("p", "2+2=")


class FakeEngine:
    """Answers every request with a valid trajectory, the last one first."""

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        rng = np.random.default_rng(0)
        for request in reversed(requests):
            trajectory = replace(make_trajectory(rng), lineage=request.lineage)
            yield RolloutRecord(request.lineage.rollout_id, "fake", 0, values_of(trajectory))


class FakeTokenizer:
    """Enough of a tokenizer for short prompts."""

    backend_tokenizer = SimpleNamespace(normalizer=None)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(chr(i) for i in ids)


class FlakyTask:
    """Rewards 0, 1, 2, ... in turn; the reward of call `fails_at` fails, that of every call where it is -1."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at, self.calls = fails_at, 0

    def reward(self, *_: object) -> Future[dict[str, float]]:
        self.calls += 1
        rewards = at_once({"reward": float(self.calls), "accuracy": 0.0})
        if self.fails_at in (self.calls, -1):
            rewards = Future()
            rewards.set_exception(
                RewardError(f"call {self.calls} failed at data.jsonl:7", seen="KeyError: 'x', in score (mine.py:3)")
            )
        return rewards


ALL_MOE = LayerSelection(SPEC.num_moe_layers, tuple(range(SPEC.num_moe_layers)))


def collector(
    folder: Path,
    fails_at: int = 0,
    engine: FakeEngine | None = None,
    layers: LayerSelection = ALL_MOE,
    max_rate: float = 1.0,
    notify: Callable[[str], None] = print,
) -> Collector:
    quarantine = Quarantine(folder, max_rate)
    task, tokenizer = cast(Any, FlakyTask(fails_at)), cast(Any, FakeTokenizer())
    return Collector(cast(Any, engine or FakeEngine()), task, tokenizer, quarantine, 8, layers, (1,), notify)


def collect(collect_from: Collector, count: int) -> tuple[list[Any], list[RolloutRequest]]:
    requests = collect_from.requests([PROMPT], run="t", count=count, sampling=SamplingParams(seed=7))
    return collect_from.collect([PROMPT], requests, "step 9", trainer_version=9), requests


def test_a_reward_that_fails_quarantines_its_sample_and_the_others_go_on(tmp_path: Path):
    here = collector(tmp_path, fails_at=2)
    found, _ = collect(here, 4)
    assert [trajectory.rewards["reward"] for trajectory in found] == [1.0, 3.0, 4.0]
    assert here.quarantine.counts == {"reward_failed": 1}
    assert here.take_counts() == {"reward/function/failed": 1.0}
    assert here.take_counts() == {}


def test_a_few_rewards_that_fail_are_told_with_the_first_cause(tmp_path: Path):
    said: list[str] = []
    collect(here := collector(tmp_path, fails_at=2, notify=said.append), 4)
    cause = "reward_failed in rewards, call 2 failed at data.jsonl:7: KeyError: 'x', in score (mine.py:3)"
    assert said == [f"step 9: 1 of 4 responses refused; the first: {cause}; kept in {tmp_path}"]
    collect(here, 4)
    assert len(said) == 1


def test_where_every_reward_fails_the_first_cause_is_in_the_error(tmp_path: Path):
    with pytest.raises(MoerlError) as caught:
        collect(collector(tmp_path, fails_at=-1), 4)
    assert str(caught.value).startswith("step 9: no response was admitted; seen: 4 of 4 refused; the first: reward_fai")
    assert "call 1 failed at data.jsonl:7: KeyError: 'x', in score (mine.py:3)" in str(caught.value)


def test_where_too_many_rewards_fail_the_first_cause_is_in_the_error(tmp_path: Path):
    with pytest.raises(ContractError, match="quarantine_rate_exceeded") as caught:
        collect(collector(tmp_path, fails_at=20, max_rate=0.01), 40)
    assert "1 of 32 refused" in str(caught.value)
    assert "call 20 failed at data.jsonl:7: KeyError: 'x', in score (mine.py:3)" in str(caught.value)


class ScoredTask:
    """Has every response rewarded as JSON by the schema of a row, whatever the sampled text: `response` instead."""

    def __init__(self, response: str, row: dict[str, Any]) -> None:
        keys = {"kind": "json", "column": "schema", "timeout_seconds": 60.0}
        self.scorer = make_scorer({"form": JsonReward.model_validate(keys)}, None)
        self.response, self.row = response, row

    def reward(self, *_: object) -> Future[dict[str, float]]:
        return self.scorer.score(Prompt("p", "", self.row), "data.jsonl:7", self.response)


def test_a_policy_of_hostile_responses_alone_stops_no_run_and_a_broken_reward_does(tmp_path: Path):
    deep = "[" * 100_000
    for row, is_stopped in (({"schema": {}}, False), ({}, True)):
        task = ScoredTask(deep, row)
        here = replace(collector(tmp_path, max_rate=0.0), task=cast(Any, task))
        try:
            if is_stopped:
                with pytest.raises(ContractError, match="quarantine_rate_exceeded"):
                    collect(here, 40)
            else:
                found, _ = collect(here, 40)
                assert [each.rewards["form.unscored"] for each in found] == [1.0] * 40
                assert {each.rewards["reward"] for each in found} == {0.0}
                assert here.quarantine.num_refused == 0
        finally:
            task.scorer.close()


def test_rewards_of_too_many_names_refuse_their_sample_alone(tmp_path: Path):
    here = collector(tmp_path)
    names = {"reward": 1.0, "accuracy": 0.0, **{f"part{i}": 0.0 for i in range(100)}}
    rewards = iter([names, *[{"reward": 1.0, "accuracy": 0.0}] * 3])
    task = SimpleNamespace(reward=lambda *_: at_once(next(rewards)))
    found, _ = collect(replace(here, task=cast(Any, task)), 4)
    assert len(found) == 3
    assert here.quarantine.counts == {"too_many_names": 1}


class RecordedEngine:
    """Answers with records that were made before."""

    def __init__(self, records: Sequence[RolloutRecord]) -> None:
        self.records = records

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        yield from self.records


def test_each_trajectory_is_checked_once_and_not_again_when_it_gets_its_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = collector(tmp_path)
    requests = here.requests([PROMPT], run="t", count=4, sampling=SamplingParams(seed=7))
    engine = cast(Any, RecordedEngine(list(FakeEngine().generate(requests))))
    checked: list[Trajectory] = []
    check = trajectory_module.check_trajectory
    monkeypatch.setattr(trajectory_module, "check_trajectory", lambda each: [checked.append(each), check(each)])
    found, _ = collect(replace(here, engine=engine), 4)
    assert (len(found), len(checked)) == (4, 4)


class CountingEngine(FakeEngine):
    """Counts its answers."""

    count = 0

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        for record in super().generate(requests):
            yield record
            self.count += 1  # the next one was asked for


class SlowRewards(Future[dict[str, float]]):
    """Rewards that come when somebody waits for them; notes how many answers the engine had given by then."""

    def __init__(self, engine: CountingEngine, reward: float, waited_at: list[int]) -> None:
        super().__init__()
        self.engine, self.reward, self.waited_at = engine, reward, waited_at

    def result(self, timeout: float | None = None) -> dict[str, float]:
        self.waited_at.append(self.engine.count)
        return {"reward": self.reward, "accuracy": 0.0}


class SlowTask:
    """Rewards 1, 2, 3, ..., none of which is there at once; `quick` names those that are."""

    def __init__(self, engine: CountingEngine, quick: Sequence[int] = ()) -> None:
        self.engine, self.quick = engine, quick
        self.waited_at: list[int] = []
        self.asked: list[SlowRewards] = []

    def reward(self, *_: object) -> Future[dict[str, float]]:
        self.asked.append(SlowRewards(self.engine, len(self.asked) + 1.0, self.waited_at))
        if len(self.asked) in self.quick:
            return at_once({"reward": float(len(self.asked)), "accuracy": 0.0})
        return self.asked[-1]


def test_sampling_waits_for_no_reward(tmp_path: Path):
    task = SlowTask(engine := CountingEngine())
    found, requests = collect(replace(collector(tmp_path, engine=engine), task=cast(Any, task)), 5)
    assert task.waited_at == [5] * 5
    assert [t.rewards["reward"] for t in found] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [t.rewards["reward"] for t in in_request_order(found, requests)] == [5.0, 4.0, 3.0, 2.0, 1.0]


def test_rewards_that_overtake_others_change_no_order(tmp_path: Path):
    task = SlowTask(engine := CountingEngine(), quick=(2, 3, 5))
    found, _ = collect(replace(collector(tmp_path, engine=engine), task=cast(Any, task)), 5)
    assert [t.rewards["reward"] for t in found] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_rewards_of_rollouts_that_are_given_up_are_cancelled(tmp_path: Path):
    class BrokenEngine(CountingEngine):
        def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
            yield from list(super().generate(requests))[:3]
            raise KeyboardInterrupt

    task = SlowTask(engine := BrokenEngine())
    with pytest.raises(KeyboardInterrupt):
        collect(replace(collector(tmp_path, engine=engine), task=cast(Any, task)), 5)
    assert [rewards.cancelled() for rewards in task.asked] == [True] * 3


def test_every_request_has_a_seed_and_an_id_of_its_own(tmp_path: Path):
    _, requests = collect(collector(tmp_path), 5)
    assert len({request.sampling.seed for request in requests}) == 5
    assert len({request.lineage.rollout_id for request in requests}) == 5
    assert {request.lineage.group_id for request in requests} == {"t/p"}


def test_trajectories_are_put_in_the_order_in_which_they_were_asked_for(tmp_path: Path):
    found, requests = collect(collector(tmp_path), 3)
    asked = [request.lineage.rollout_id for request in requests]
    assert [t.lineage.rollout_id for t in found] == asked[::-1]
    assert [t.lineage.rollout_id for t in in_request_order(found, requests)] == asked


def test_advantages_lie_on_sampled_tokens_alone(tmp_path: Path):
    found, _ = collect(collector(tmp_path), 3)
    samples = with_advantages(found, grpo(normalize_std=False))
    for sample, advantage in zip(samples, (-1.0, 0.0, 1.0), strict=True):
        np.testing.assert_allclose(sample.advantages[sample.trajectory.sampled], advantage, atol=1e-6)
        assert not sample.advantages[~sample.trajectory.sampled].any()


def algorithm_of_tokens(needs: tuple[str, ...] = ("teacher",)) -> Any:
    """One whose advantages are scores of tokens, less the mean reward."""

    def advantages(batch: RewardedBatch) -> torch.Tensor:
        return batch.scores_N["teacher"] - batch.rewards_B.mean()

    return SimpleNamespace(kl_in_reward=False, needs=needs, compute_advantages=advantages)


def test_advantages_may_be_of_tokens_and_be_made_of_their_scores(tmp_path: Path):
    found, _ = collect(collector(tmp_path), 3)
    rng, mean = np.random.default_rng(0), np.mean([t.rewards["reward"] for t in found])
    scored = [replace(t, scores={"teacher": rng.normal(size=len(t)).astype(np.float32)}) for t in found]
    for sample in with_advantages(scored, algorithm_of_tokens()):
        own = sample.trajectory
        np.testing.assert_allclose(sample.advantages[own.sampled], own.scores["teacher"][own.sampled] - mean, rtol=1e-6)
        assert not sample.advantages[~own.sampled].any()


def test_a_trajectory_without_a_score_that_is_needed_is_refused(tmp_path: Path):
    found, _ = collect(collector(tmp_path), 3)
    with pytest.raises(ContractError, match=r"missing_field.*scores\['teacher'\]"):
        with_advantages(found, algorithm_of_tokens())


class AllLayersEngine(FakeEngine):
    """Reports a dense layer, before and between the others, whose columns mean nothing; one record lacks a column."""

    info = EngineInfo("fake", SPEC, 0, ReportedLayers.ALL, (0, 1, 2, 3, 4))

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        for number, record in enumerate(super().generate(requests)):
            moe = record.values["expert_ids"]
            wide = np.zeros((moe.shape[0], 5, moe.shape[2]), moe.dtype)
            wide[:, (1, 2, 4)] = moe
            yield replace(record, values={**record.values, "expert_ids": moe if number == 1 else wide})


def test_of_an_engine_that_reports_all_layers_the_moe_layers_are_taken_and_other_tables_refused(tmp_path: Path):
    engine = AllLayersEngine()
    layers = select_layers(engine.info, 5, (1, 2, 4))
    plain, _ = collect(collector(tmp_path / "plain"), 4)
    found, _ = collect(here := collector(tmp_path / "wide", engine=engine, layers=layers), 4)
    assert here.quarantine.counts == {"wrong_shape": 1}
    assert [t.lineage.rollout_id for t in found] == [plain[i].lineage.rollout_id for i in (0, 2, 3)]
    for trajectory, i in zip(found, (0, 2, 3), strict=True):
        np.testing.assert_array_equal(trajectory.expert_ids, plain[i].expert_ids)


class UnreadableEngine(FakeEngine):
    """The first answer could not be read; what arrived comes with the reason."""

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[RolloutRecord]:
        refusal = ContractError(Reason.FRAME_CORRUPT, field="compact_answer", seen="bytes", expected="a whole frame")
        for number, record in enumerate(super().generate(requests)):
            values = {"meta_info": {"compact_answer": b"what arrived"}}
            yield record if number else replace(record, values=values, refusal=refusal)


def test_an_answer_that_could_not_be_read_lies_whole_in_the_quarantine(tmp_path: Path):
    found, _ = collect(collector(tmp_path, engine=UnreadableEngine()), 4)
    assert len(found) == 3
    (folder,) = tmp_path.iterdir()
    why, content = read_quarantined(folder)
    assert (why["reason"], why["field"]) == ("frame_corrupt", "compact_answer")
    assert content["meta_info"]["compact_answer"] == b"what arrived"


def test_the_prompt_of_a_trajectory_is_what_stands_before_its_first_sampled_token(tmp_path: Path):
    collect_from = collector(tmp_path)
    (trajectory,), _ = collect(collect_from, 1)
    assert collect_from.prompt(trajectory) == "".join(map(chr, trajectory.token_ids[:3]))
