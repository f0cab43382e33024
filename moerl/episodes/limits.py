"""Use of the limits of an episode, and the clock of its environment. Belongs to the event loop of the episodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from moerl.config.rollouts import EpisodeConfig

LIMITS = ("max_turns", "max_tokens", "max_calls", "max_seconds")
"""Limits of `EpisodeConfig`. Once one is reached, no other turn begins; turns under way are finished."""


class Meter:
    """Count of what an episode has used.

    Args:
        clock: returns seconds.

    Attributes:
        turns: turns that were begun, whether or not they are answered.
        tokens: tokens that were sampled.
        calls: calls of tools.
        stopped_by: the limit that kept a turn from beginning, by its name; empty if none did.
    """

    def __init__(self, limits: EpisodeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock, self._start = limits, clock, clock()
        self.turns = self.tokens = self.calls = 0
        self.stopped_by = ""

    def stops(self) -> bool:
        """Returns whether no other turn may begin, and notes the limit that is reached."""
        # The last call that is allowed is carried out, and the policy reads its result.
        used = (self.turns, self.tokens, self.calls - 1, self._clock() - self._start)
        for name, number in zip(LIMITS, used, strict=True):
            limit: float | None = getattr(self._limits, name)
            if limit is not None and number >= limit:
                self.stopped_by = self.stopped_by or name
        return bool(self.stopped_by)


@dataclass(eq=False)
class Patience:
    """Clock of an environment: stands still while any session of the episode waits for the engine."""

    limit: asyncio.Timeout
    """Limit of the episode."""
    seconds: float
    """Seconds that the environment has from the end of a wait on."""
    clock: Callable[[], float]
    """Clock of the limit, in seconds."""
    num_waiting: int = 0
    """Sessions that wait for the engine."""
    environment_seconds: float = 0.0
    """Seconds so far in which no session waited for the engine."""

    def __post_init__(self) -> None:
        self._since = self.clock()

    def ran(self) -> None:
        """Counts the time since the last wait as the environment's."""
        if not self.num_waiting:
            now = self.clock()
            self.environment_seconds, self._since = self.environment_seconds + now - self._since, now

    @contextmanager
    def waiting(self) -> Generator[None]:
        self.ran()
        self.num_waiting += 1
        if not self.limit.expired():
            self.limit.reschedule(None)
        try:
            yield
        finally:
            self.num_waiting -= 1
            if not self.num_waiting:
                self._since = self.clock()
                if not self.limit.expired():
                    self.limit.reschedule(self._since + self.seconds)
