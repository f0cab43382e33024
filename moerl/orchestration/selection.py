"""Selection of the groups that are trained, and of the responses of a group if more are sampled than trained. Runs in
the controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from moerl.buffer.ledger import Ledger
from moerl.contract.trajectory import TURN_REWARDS, FinishReason, Trajectory
from moerl.errors import MoerlError, RewardError

SHORTEST = "shortest"
"""Value of `rl.keep_by`: the best responses are those with the fewest tokens."""
MAX_BATCHES = 10
"""Batches' worth of groups that are asked for, at most, until one batch is full of groups that are not filtered."""
FILTERS: Mapping[str, Callable[[Sequence[Trajectory]], bool]] = {
    "equal_rewards": lambda group: _equal_rewards(group),
    "truncated": lambda group: all(trajectory.finish_reason is FinishReason.LENGTH for trajectory in group),
}
"""Tests for groups that teach nothing, by name: all rewards of each agent are equal, and those of turns; no response
came to its end."""


def filtered_for(group: Sequence[Trajectory], filters: Sequence[str]) -> str:
    """Returns the first of `filters`, names of `FILTERS`, that keeps a group out; an empty text if none does."""
    return next((name for name in filters if FILTERS[name](group)), "")


def check_fills_up(num_groups: int, groups_per_step: int, ledger: Ledger) -> None:
    """Raises `MoerlError` if so many groups were asked for to fill one batch that it will not fill up."""
    allowed = MAX_BATCHES * groups_per_step
    if num_groups > allowed:
        filtered, refused = dict(ledger.filtered), dict(ledger.quarantined)
        raise MoerlError(
            "rl.filters: the batch of a step does not fill up",
            seen=f"{num_groups} groups asked for; rollouts of the run filtered {filtered}, refused {refused}",
            expected=f"at most {allowed} groups, {MAX_BATCHES} batches",
            remedy="choose prompts that the model solves sometimes, raise rollout.max_new_tokens or rl.group_size,"
            " or take a filter out of rl.filters",
        )


def select(group: Sequence[Trajectory], keep: int | None, keep_by: str, seed: Sequence[int]) -> list[Trajectory]:
    """Selects `keep` responses of a group, in their order; all if there are no more, or `keep` is None.

    Failures stay as varied as they are, successes are chosen (resample on correct, GRPO-RoC: rStar2-Agent, Shang et al.
    2025, arXiv:2508.20722). A response has succeeded if its reward is above the middle between the lowest and the
    highest of the group. Both kinds keep their share of the group, rounded, and at least one response: failures are
    drawn evenly, successes are those with the highest reward `keep_by`, or the fewest sampled tokens. Published with a
    draw among successes too, weighted by their quality. Episodes are kept whole; their first session counts.

    Args:
        seed: seed of the draw; the same group always gets the same draw.

    Raises:
        RewardError: a response has no reward of this name.
    """
    first = {trajectory.lineage.episode: trajectory for trajectory in reversed(group)}
    responses = [trajectory for trajectory in group if first[trajectory.lineage.episode] is trajectory]
    if keep is None or len(responses) <= keep:
        return list(group)
    rewards = np.array([trajectory.rewards["reward"] for trajectory in responses])
    order = np.random.default_rng(seed).permutation(len(responses))
    succeeded = rewards > (rewards.min() + rewards.max()) / 2
    num_successes = int(succeeded.sum())
    share = int(np.floor(keep * num_successes / len(responses) + 0.5))
    num_kept = min(max(share, 1), keep - 1) if num_successes else 0
    # Among equals the drawn order decides.
    best = sorted(order[succeeded[order]].tolist(), key=lambda i: _rank(responses[i], keep_by))
    chosen = {*best[:num_kept], *order[~succeeded[order]].tolist()[: keep - num_kept]}
    chosen.update(best[num_kept : num_kept + keep - len(chosen)])
    kept = {responses[i].lineage.episode for i in chosen}
    return [trajectory for trajectory in group if trajectory.lineage.episode in kept]


def accuracy_of(trajectory: Trajectory) -> float:
    """Returns the accuracy of a response. A session with rewards of its own may have none: then it is 1 from a reward
    of 1 on, else 0."""
    return trajectory.rewards.get("accuracy", float(trajectory.rewards["reward"] >= 1.0))


def num_episodes(trajectories: Sequence[Trajectory]) -> int:
    """Returns the number of rollouts that these trajectories came of: an episode is one, however many sessions it
    had."""
    return len({trajectory.lineage.episode for trajectory in trajectories})


def _equal_rewards(group: Sequence[Trajectory]) -> bool:
    of_agents: dict[str, set[float]] = {}
    of_turns: dict[str, set[bytes]] = {}
    for trajectory in group:
        agent, given = trajectory.lineage.agent_id, trajectory.scores.get(TURN_REWARDS)
        of_agents.setdefault(agent, set()).add(trajectory.rewards["reward"])
        ends = [turn.end - 1 for turn in trajectory.sampled_turns]
        of_turns.setdefault(agent, set()).add(b"" if given is None else np.trim_zeros(given[ends], "b").tobytes())
    return all(len(each) == 1 for each in (*of_agents.values(), *of_turns.values()))


def _rank(trajectory: Trajectory, keep_by: str) -> float:
    """Returns the rank of a response; the lower, the better."""
    if keep_by == SHORTEST:
        return float(trajectory.num_sampled)
    if keep_by not in trajectory.rewards:
        raise RewardError(
            "rl.keep_by: no such reward",
            seen=keep_by,
            expected=f"{SHORTEST}, {', '.join(trajectory.rewards)}",
            remedy="name one that the task gives",
        )
    return -trajectory.rewards[keep_by]
