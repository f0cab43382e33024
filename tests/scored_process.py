"""A process of a reward that scores one response at a time, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moerl.errors import RewardError
from moerl.tasks.rewards.process import RewardProcess, Rewards


class ScoredProcess(RewardProcess):
    """A `RewardProcess` that raises the error of a response."""

    def score(self, row: Mapping[str, Any], response: str) -> Rewards:
        [result] = self.score_all([row], [response])
        if isinstance(result, RewardError):
            raise result
        return result
