"""Registry of owners of actors on a run's Ray cluster, ranks apart: they end their actors before the shared connection
is given up."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Held(Protocol):
    """Owner of actors."""

    def abandon(self) -> None:
        """Ends its actors at once. Afterwards none of its threads waits for Ray: one that still did would wait for
        ever."""


_held: WeakSet[Held] = WeakSet()
"""Owners of actors in this process."""


def hold(held: Held) -> None:
    """Has `abandon_all` abandon an owner, unless it has been garbage-collected by then."""
    _held.add(held)


def abandon_all() -> None:
    """Abandons all owners of actors."""
    for held in list(_held):
        held.abandon()
