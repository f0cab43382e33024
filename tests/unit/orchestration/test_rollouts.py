"""From engine answers to rewarded trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from factories import make_trajectory, values_of

from moerl.algorithms.grpo import GRPO
from moerl.contract import Prompt, Quarantine, RolloutRecord, RolloutRequest, SamplingParams
from moerl.errors import RewardError
from moerl.orchestration.rollouts import Collector, in_request_order, with_advantages

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

    eos_token_id = 1
    backend_tokenizer = SimpleNamespace(normalizer=None)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(chr(i) for i in ids)


class FlakyTask:
    """Rewards 0, 1, 2, ... in turn; the reward of call `fails_at` fails."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at, self.calls = fails_at, 0

    def reward(self, *_: object) -> dict[str, float]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RewardError("the reward timed out")
        return {"reward": float(self.calls), "accuracy": 0.0}


ALL_MOE = LayerSelection(SPEC.num_moe_layers, tuple(range(SPEC.num_moe_layers)))


def collector(
    folder: Path, fails_at: int = 0, engine: FakeEngine | None = None, layers: LayerSelection = ALL_MOE
) -> Collector:
    quarantine = Quarantine(folder, 1.0)
    task, tokenizer = cast(Any, FlakyTask(fails_at)), cast(Any, FakeTokenizer())
    return Collector(cast(Any, engine or FakeEngine()), task, tokenizer, quarantine, 8, layers)


def collect(collect_from: Collector, count: int) -> tuple[list[Any], list[RolloutRequest]]:
    requests = collect_from.requests([PROMPT], run="t", count=count, sampling=SamplingParams(seed=7), prefixes={})
    found = collect_from.collect([PROMPT], requests, trainer_version=9, prefixes={})
    return list(found), requests


def test_a_reward_that_fails_quarantines_its_sample_and_the_others_go_on(tmp_path: Path):
    here = collector(tmp_path, fails_at=2)
    found, _ = collect(here, 4)
    assert [trajectory.rewards["reward"] for trajectory in found] == [1.0, 3.0, 4.0]
    assert here.quarantine.counts == {"reward_failed": 1}


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
    samples = with_advantages(found, GRPO(normalize_std=False))
    for sample, advantage in zip(samples, (-1.0, 0.0, 1.0), strict=True):
        np.testing.assert_allclose(sample.advantages[sample.trajectory.sampled], advantage, atol=1e-6)
        assert not sample.advantages[~sample.trajectory.sampled].any()
