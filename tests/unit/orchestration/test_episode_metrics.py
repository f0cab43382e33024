"""Metrics of the episodes of a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from factories import FULL, Layout, make_from_layout, make_trajectory

from moerl.contract.trajectory import Lineage, Trajectory, TurnKind
from moerl.orchestration.step_metrics import MAX_AGENTS, episode_metrics, rollout_metrics
from moerl.telemetry.metrics import check_metrics

RNG = np.random.default_rng(0)


def single(name: str, agent: str = "", reward: float = 1.0, **timings: float) -> Trajectory:
    """Four sampled tokens, in an episode with others if it has an agent."""
    lineage = Lineage(name, "p", "g", name.partition("~")[0] if agent else "", agent)
    return make_trajectory(RNG, num_sampled=4, lineage=lineage, rewards={"reward": reward}, timings=timings)


def two_turns(name: str, **timings: float) -> Trajectory:
    """Six sampled and two observed tokens."""
    sampled = (TurnKind.SAMPLED, 3, FULL)
    layout = Layout(((TurnKind.PROMPT, 5, None), sampled, (TurnKind.OBSERVATION, 2, None), sampled))
    return make_from_layout(RNG, layout, lineage=Lineage(name, "p", "g"), timings=timings)


def test_single_responses_have_no_metrics_of_episodes() -> None:
    assert episode_metrics([single("a"), single("b", sampling_seconds=1.0)]) == {}


def test_an_episode_that_was_played_in_one_turn_counts() -> None:
    assert episode_metrics([single("a", environment_seconds=0.5)])["episode/turns_mean"] == 1.0


def test_turns_and_tokens_and_seconds_are_those_of_episodes_however_many_sessions_one_has() -> None:
    helper = single("a~1", "helper", sampling_seconds=0.25)
    first = two_turns("a", environment_seconds=3.0, sampling_seconds=0.5)
    first = replace(first, lineage=replace(first.lineage, episode_id="a"))
    found = episode_metrics([first, helper, single("b", environment_seconds=1.0, sampling_seconds=0.25)])
    assert found.pop("reward/agent/helper/mean") == 1.0
    assert found == {
        "episode/turns_mean": 2.0,
        "episode/turns_max": 3.0,
        "episode/sessions_mean": 1.5,
        "episode/turn_tokens_mean": pytest.approx(14 / 4),
        "episode/observed_share": pytest.approx(2 / 16),
        "episode/environment_seconds": 2.0,
        "episode/sampling_seconds": 0.5,
    }
    check_metrics(found)


def test_rewards_are_told_by_agent_and_those_with_most_sessions_have_one() -> None:
    few = [single(f"a~{n}", f"agent {n}".replace(" ", "-"), reward=n / 8) for n in range(MAX_AGENTS)]
    batch = [*few, single("b~1", "checker"), single("c~1", "checker", reward=0.0), single("d~1", "a b/c")]
    found = episode_metrics(batch)
    agents = {name: value for name, value in found.items() if name.startswith("reward/agent/")}
    assert len(agents) == MAX_AGENTS
    assert agents["reward/agent/checker/mean"] == 0.5
    assert f"reward/agent/agent-{MAX_AGENTS - 1}/mean" not in agents
    check_metrics(found)


def test_a_step_reports_them() -> None:
    assert rollout_metrics([two_turns("a"), single("b")])["episode/turns_max"] == 2.0
    assert not [name for name in rollout_metrics([single("b")]) if name.startswith("episode/")]
