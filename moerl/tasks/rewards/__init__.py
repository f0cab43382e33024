"""Rewards of responses: a user's function in processes of its own, or numbers that are there at once."""

from __future__ import annotations

from concurrent.futures import Future


def at_once(rewards: dict[str, float]) -> Future[dict[str, float]]:
    """Wraps rewards that need no waiting in a future, as `Task.reward` returns them."""
    future: Future[dict[str, float]] = Future()
    future.set_result(rewards)
    return future
