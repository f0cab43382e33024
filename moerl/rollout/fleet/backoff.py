"""Pauses between attempts at something that may succeed later."""

from __future__ import annotations

import asyncio

PAUSE_SECONDS = (0.2, 1.0, 3.0)
"""Before the second, third and fourth attempt."""

NUM_ATTEMPTS = len(PAUSE_SECONDS) + 1


async def backoff(attempt: int) -> None:
    """Sleeps before attempt number `attempt` + 1 (0 was the first)."""
    await asyncio.sleep(PAUSE_SECONDS[min(attempt, len(PAUSE_SECONDS) - 1)])
