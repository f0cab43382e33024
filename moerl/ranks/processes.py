"""Ranks as child processes on this machine: started, given commands, watched, and ended. Runs in the controller.

Every rank has a socket to the controller: commands and frames go in, replies come back. Its output goes to
``logs/rank-N.log`` in the run directory. If a rank fails, ends or is silent until the deadline of a command, the
controller raises one error that names the rank, and kills the others. On Linux ranks also die with the controller,
however it dies.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable
from pathlib import Path

from moerl.config.ranks import RankConfig
from moerl.contract.commands import Start, decode_reply
from moerl.contract.files import discard
from moerl.errors import undoing
from moerl.machine.interfaces import interface_variables
from moerl.processes.channel import Inbox, Outbox
from moerl.processes.child import Child
from moerl.processes.parent import child_environment, new_rendezvous
from moerl.ranks.away import CLOSING_SECONDS, GRACE_SECONDS, PROGRAM, RankAway, RanksAway, rank_variables


class _Rank(RankAway):
    """One child process, with messages to send to it and messages that it sent."""

    def __init__(self, rank: int, child: Child, log: Path) -> None:
        super().__init__(rank, log)
        self.child = child
        child.socket.setblocking(False)
        self.inbox, self.outbox = Inbox(), Outbox()


class Processes(RanksAway[_Rank]):
    """`moerl.ranks.port.Ranks` as processes of this machine.

    Args:
        watch: as in `RanksAway`.
        lock: descriptor that ranks inherit, so that they hold the lock of the run directory, too; None for none.
    """

    def __init__(self, config: RankConfig, watch: Callable[[int, int], None], lock: int | None = None) -> None:
        super().__init__(config, watch)
        self._meeting = new_rendezvous(config.run_dir)
        with undoing(self._end):  # an interrupt, too, leaves none behind
            for rank, log in enumerate(self._logs):
                held = () if lock is None else (lock,)
                child = Child(PROGRAM, log, _environment(config, rank), inherited=held)
                self._ranks.append(_Rank(rank, child, log))
            text, rendezvous = config.model_dump_json(), f"file://{self._meeting}"
            self._tell([Start(text, rank.rank, rendezvous, len(self._ranks)) for rank in self._ranks])
            self.replies()

    def _send(self, rank: _Rank, message: bytes, frame: bytes) -> None:
        rank.outbox.put(message, frame)
        with contextlib.suppress(ConnectionError):  # it is gone: `replies` says how it ended
            rank.outbox.flush(rank.child.socket)

    def _exchange(self, command: str) -> None:
        until = time.monotonic() + self._seconds
        has_failed = False
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.child.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
            while any(rank.is_waited_for for rank in self._ranks):
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    raise self._failure(command)
                for key, events in ready:
                    self._serve(key.data, events, selector)
                if not has_failed and self._has_failure():
                    has_failed, until = True, min(until, time.monotonic() + GRACE_SECONDS)

    def _serve(self, rank: _Rank, events: int, selector: selectors.BaseSelector) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                rank.outbox.flush(rank.child.socket)
                if not rank.outbox:
                    selector.modify(rank.child.socket, selectors.EVENT_READ, rank)
            if events & selectors.EVENT_READ:
                for message in rank.inbox.read(rank.child.socket):
                    self._note(rank, decode_reply(message))
        except (EOFError, ConnectionError):
            # After the reply to `Close` every rank ends.
            rank.is_gone = rank.reply is None
            selector.unregister(rank.child.socket)

    def _how_ended(self, rank: _Rank) -> str:
        return rank.child.describe_end(GRACE_SECONDS)

    def _await_ends(self) -> None:
        deadline = time.monotonic() + CLOSING_SECONDS
        for rank in self._ranks:
            rank.child.wait(max(0.1, deadline - time.monotonic()))

    def _end(self) -> None:
        self._has_ended = True
        for rank in self._ranks:
            rank.child.kill()
            rank.child.release()
        discard(self._meeting)
        self._remove_empty_logs()


def _environment(config: RankConfig, rank: int) -> dict[str, str]:
    return child_environment() | interface_variables("127.0.0.1") | rank_variables(config, rank, rank)
