"""Metrics of episodes in a batch: turns, sessions, authors of tokens, and time.

Pure; numpy alone. Runs in the controller. Names, units and meanings: docs/metrics.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from moerl.contract.spans import is_of_episode
from moerl.contract.trajectory import Trajectory, TurnKind
from moerl.telemetry.metrics import agent_reward_metric, is_reward_name

ENVIRONMENT_SECONDS = "environment_seconds"
"""Key of `Trajectory.timings` that the first session of every played episode has."""
MAX_AGENTS = 8
"""Agents whose reward is reported: those with most sessions."""


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics of the episodes of a batch; empty if it has none: no trajectory was played, and none has
    several turns."""
    if not any(is_of_episode(each) or ENVIRONMENT_SECONDS in each.timings for each in trajectories):
        return {}
    turns, sessions = Counter[str](), Counter[str]()
    seconds = dict[str, tuple[float, float]]()
    for each in trajectories:
        name = each.lineage.episode
        turns[name] += len(each.sampled_turns)
        sessions[name] += 1
        environment, sampling = seconds.get(name, (0.0, 0.0))
        seconds[name] = (
            environment + each.timings.get(ENVIRONMENT_SECONDS, 0.0),
            sampling + each.timings.get("sampling_seconds", 0.0),
        )
    spans = (turn for each in trajectories for turn in each.turns)
    observed = sum(turn.end - turn.start for turn in spans if turn.kind is TurnKind.OBSERVATION)
    sampled = sum(each.num_sampled for each in trajectories)
    in_environment, in_sampling = np.array([*seconds.values()]).mean(0).tolist()
    return {
        "episode/turns_mean": float(np.mean([*turns.values()])),
        "episode/turns_max": float(max(turns.values())),
        "episode/sessions_mean": float(np.mean([*sessions.values()])),
        "episode/turn_tokens_mean": sampled / turns.total(),
        "episode/observed_share": observed / (observed + sampled),
        "episode/environment_seconds": in_environment,
        "episode/sampling_seconds": in_sampling,
        **_rewards_by_agent(trajectories),
    }


def _rewards_by_agent(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean reward of each agent that has a name; nothing if none has one."""
    rewards: dict[str, list[float]] = {}
    for each in trajectories:
        if is_reward_name(each.lineage.agent_id) and "reward" in each.rewards:
            rewards.setdefault(each.lineage.agent_id, []).append(each.rewards["reward"])
    largest = sorted(rewards, key=lambda agent: (-len(rewards[agent]), agent))[:MAX_AGENTS]
    return {agent_reward_metric(agent): float(np.mean(rewards[agent])) for agent in sorted(largest)}
