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
    """starting: not asked yet. healthy: gets requests. suspect: a request failed or nothing is heard of it; it is
    probed, and gets no new ones. restarting: lost; its launcher is making another. stale: serves, but not the current
    weights. dead: given up."""

    STARTING = "starting"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    RESTARTING = "restarting"
    STALE = "stale"
    DEAD = "dead"


class StaleServerError(EngineError):
    """The server holds other weights than it should."""


@dataclass(slots=True, eq=False)
class Replica:
    """A place for a server; the server itself may be replaced.

    server: None before there is one, and while it is replaced. key: of the connection to it; each has another.
    max_request_tokens: of the latest server; 0 before there was one.
    asks: requests under way. losses: servers lost in a row without an answer in between. strikes: failures in a row,
    those at one time counted once. struck_at, heard_at: when it failed last, when an answer came last, by the monotonic
    clock. error: why it is not healthy.
    """

    name: str
    launcher: ServerLauncher
    server: ServerBackend | None = None
    key: str = ""
    max_request_tokens: int = 0
    state: State = State.STARTING
    load: int = 0
    asks: set[asyncio.Future[Any]] = field(default_factory=set)
    losses: int = 0
    strikes: int = 0
    struck_at: float = 0.0
    heard_at: float = 0.0
    error: MoerlError | None = None

    @property
    def is_current(self) -> bool:
        """It holds the current weights. Whoever does not is in the hands of one task that sees to it."""
        return self.state in (State.HEALTHY, State.SUSPECT)

    def heard(self) -> None:
        """An answer came."""
        self.strikes = self.losses = 0
        self.heard_at = time.monotonic()
        if self.state is State.SUSPECT:
            self.state = State.HEALTHY

    def strike(self, asked_at: float) -> int:
        """A request that was asked at `asked_at` failed; returns the strikes. What failed together counts once."""
        if asked_at > self.struck_at:
            self.strikes += 1
            self.struck_at = time.monotonic()
        return self.strikes

    async def ask(self, attempt: Attempt) -> AttemptReply:
        """The answer to an attempt.

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
        """Takes another server."""
        self.server, self.key, self.strikes = server, secrets.token_hex(8), 0
        self.max_request_tokens = server.max_request_tokens

    def give_up_asks(self) -> None:
        """Requests under way fail."""
        for asked in list(self.asks):
            asked.cancel()

    async def disconnect(self) -> None:
        """Gives up what is under way, and the present server."""
        self.give_up_asks()
        server, self.server = self.server, None
        if server is not None:
            await server.close()
