"""One place for a server, and what is known about the server there. Belongs to the engine's event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from moerl.errors import EngineError, MoerlError
from moerl.rollout.fleet.backend import Attempt, AttemptReply, ServerBackend, ServerLauncher, TransportError


class State(StrEnum):
    """State of a place for a server."""

    STARTING = "starting"
    """It has had no server yet."""
    HEALTHY = "healthy"
    """Its server gets requests."""
    SUSPECT = "suspect"
    """A request failed, or the server is silent: it is probed, and gets no new requests."""
    RESTARTING = "restarting"
    """Its server is lost; the launcher gives another."""
    STALE = "stale"
    """Its server serves, but does not hold the current weights."""
    DEAD = "dead"
    """It is given up."""


class StaleServerError(EngineError):
    """The server holds other weights than it should."""


@dataclass(slots=True, eq=False)
class Replica:
    """A place for a server; the server itself may be replaced."""

    name: str
    """Id of the engine, and number of the place."""
    launcher: ServerLauncher
    """Source of its servers."""
    server: ServerBackend | None = None
    """None before there is one, and while it is replaced."""
    key: str = ""
    """Key of the connection to the server, another one for each; empty before there is one."""
    max_request_tokens: int = 0
    """Limit of the latest server; 0 before there was one."""
    state: State = State.STARTING
    """Set by `Fleet`, and by `heard`."""
    load: int = 0
    """Requests that `Fleet.admit` gave to the server, and that are not released."""
    asks: set[asyncio.Future[Any]] = field(default_factory=set)
    """Requests that wait for an answer."""
    losses: int = 0
    """Servers taken for lost ones, without an answer in between."""
    strikes: int = 0
    """Failures in a row; those at one time count once."""
    struck_at: float = 0.0
    """Time of the last counted failure, in seconds of the monotonic clock."""
    heard_at: float = 0.0
    """Time from which its silence counts, in seconds of the monotonic clock: that of the last answer, or later."""
    error: MoerlError | None = None
    """Latest error that made the server suspect, or for which the place was given up; None before."""

    @property
    def is_current(self) -> bool:
        """True if the server holds the current weights. If not, one task sees to it, or the place is given up."""
        return self.state in (State.HEALTHY, State.SUSPECT)

    def heard(self) -> None:
        """Records an answer."""
        self.strikes = self.losses = 0
        self.heard_at = time.monotonic()
        if self.state is State.SUSPECT:
            self.state = State.HEALTHY

    def strike(self, asked_at: float) -> int:
        """Counts a failed request that was asked at `asked_at`; returns the strikes. Those that failed together count
        once."""
        if asked_at > self.struck_at:
            self.strikes += 1
            self.struck_at = time.monotonic()
        return self.strikes

    async def ask(self, attempt: Attempt) -> AttemptReply:
        """Returns the answer to an attempt.

        Raises:
            TransportError: none came, or the server was lost meanwhile.
            EngineError: as `ServerBackend.ask`.
        """
        if self.server is None:
            raise TransportError(f"server {self.name!r} was lost before it was asked")
        asked = asyncio.ensure_future(self.server.ask(attempt))
        self.asks.add(asked)
        try:
            await asyncio.wait({asked})
        finally:
            self.asks.discard(asked)
            asked.cancel()
        if asked.cancelled():
            raise TransportError(f"server {self.name!r} was lost while it worked on a request")
        return asked.result()

    def connect(self, server: ServerBackend) -> None:
        """Puts another server into the place."""
        self.server, self.key, self.strikes = server, secrets.token_hex(8), 0
        self.max_request_tokens = server.max_request_tokens

    def give_up_asks(self) -> None:
        """Has the requests under way fail."""
        for asked in list(self.asks):
            asked.cancel()

    async def disconnect(self) -> None:
        """Gives up what is under way, and the present server."""
        self.give_up_asks()
        server, self.server = self.server, None
        if server is not None:
            await server.close()
