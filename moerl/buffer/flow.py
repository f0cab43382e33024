"""Metrics of the flow through the queue, batch by batch: ages, versions, waste, and how long engines had nothing to do.

Pure but for the clock it is given; runs in the controller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from moerl.buffer.queue import age
from moerl.telemetry.metrics import AGES


class Flow:
    """Counts of the flow through the queue between two batches.

    Args:
        clock: seconds, never falling.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lap_began = clock()
        self._idle_since: float | None = self._lap_began
        self._idle_seconds = 0.0
        self._tokens_left_out = 0

    def sampling(self, num_groups: int) -> None:
        """Notes that `num_groups` groups are being sampled from now on."""
        if num_groups and self._idle_since is not None:
            self._idle_seconds += self._clock() - self._idle_since
            self._idle_since = None
        elif not num_groups and self._idle_since is None:
            self._idle_since = self._clock()

    def leave_out(self, num_tokens: int) -> None:
        """Counts tokens that were sampled and will not be trained."""
        self._tokens_left_out += num_tokens

    def lap(self) -> dict[str, float]:
        """Returns metrics since the last batch; starts again from zero."""
        now = self._clock()
        if self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
            self._idle_since = now
        metrics = {
            "waiting/engine_for_slots": self._idle_seconds / max(now - self._lap_began, 1e-9),
            "tokens/left_out": float(self._tokens_left_out),
        }
        self._lap_began, self._idle_seconds, self._tokens_left_out = now, 0.0, 0
        return metrics


def age_metrics(trained_version: int, versions: Sequence[Sequence[int]], *, histogram: bool) -> dict[str, float]:
    """Returns metrics of the ages of a batch, each trajectory by its oldest token.

    Args:
        versions: per trajectory, the versions that sampled its tokens; at least one each.
        histogram: True adds shares by age.
    """
    ages = [age(trained_version, each) for each in versions]
    counts = [len(set(each)) for each in versions]
    metrics = {
        "staleness/age_max": float(max(ages)),
        "staleness/age_mean": sum(ages) / len(ages),
        "staleness/versions_max": float(max(counts)),
        "staleness/versions_mean": sum(counts) / len(counts),
    }
    if histogram:
        for name, (first, last) in AGES.items():
            metrics[f"staleness/{name}"] = sum(first <= each <= last for each in ages) / len(ages)
    return metrics
