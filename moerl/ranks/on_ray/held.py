"""Registry of what has actors on a run's Ray cluster besides ranks: ended before the shared connection is given up."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Held(Protocol):
    """Something with actors of its own."""

    def abandon(self) -> None:
        """Ends it at once. Afterwards nothing of it waits for Ray: what waits by then waits for ever."""
        ...


_held: WeakSet[Held] = WeakSet()
"""Owners of actors in this process."""


def hold(held: Held) -> None:
    """Has it abandoned with the connection, unless nobody uses it any more by then."""
    _held.add(held)


def abandon_all() -> None:
    """Ends all that is held."""
    for held in list(_held):
        held.abandon()
