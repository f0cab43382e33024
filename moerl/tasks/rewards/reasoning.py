"""Scores of reasoning-gym's sets. Run in the process of a reward: some sets evaluate answers as Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moerl.tasks.rewards.builtin import Score


def reasoning(*, dataset: str, size: int, options: Mapping[str, Any]) -> Score:
    """Makes a reward of the set's own score, from 0 to 1. A row has the `seed` of a set and the `index` of the problem:
    the problem itself may hold what no process can be sent."""
    # Seconds to import, and only in the process of such a reward.
    import reasoning_gym

    sets: dict[int, Any] = {}

    def score(row: Mapping[str, Any], response: str) -> float:
        seed = row["seed"]
        if seed not in sets:
            sets[seed] = reasoning_gym.create_dataset(dataset, seed=seed, size=size, **options)
        return float(sets[seed].score_answer(response, sets[seed][row["index"]]))

    return score
