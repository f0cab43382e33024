"""Rewards for tests: those of one response at a time, and such as need no waiting."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
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


def at_once(rewards: Rewards) -> Future[Rewards]:
    """Wraps rewards in a future, as `Task.reward` returns them."""
    future: Future[Rewards] = Future()
    future.set_result(rewards)
    return future
