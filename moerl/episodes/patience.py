"""Clock of an environment: its limit, and the time that it has taken. Belongs to the event loop of the episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass


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
