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
from collections.abc import Callable, Sequence

from moerl.config.ranks import RankConfig
from moerl.contract.commands import AnyCommand, Close, Reply, Start, decode_reply, encode
from moerl.contract.files import discard
from moerl.contract.ports import PolicyEngine
from moerl.errors import MoerlError, ending, undoing
from moerl.machine.interfaces import interface_variables
from moerl.processes.channel import Inbox, Outbox
from moerl.processes.child import Child, describe_output
from moerl.processes.parent import child_environment, new_rendezvous
from moerl.ranks.child import PROGRAM, log_of, rank_variables, remove_empty_folders
from moerl.ranks.replies import CLOSING_SECONDS, GRACE_SECONDS, check_replies, lost, ranks_have_ended


class _Rank:
    """One child process, with messages to send to it and messages that it sent."""

    def __init__(self, rank: int, child: Child) -> None:
        self.rank, self.child = rank, child
        child.socket.setblocking(False)
        self.inbox, self.outbox = Inbox(), Outbox()
        self.reply: Reply | None = None
        self.is_gone = False
        self.peak_rss_bytes = 0

    @property
    def is_waited_for(self) -> bool:
        return self.reply is None and not self.is_gone


class Processes:
    """`moerl.ranks.port.Ranks` as processes of this machine. Called by one thread at a time.

    Args:
        watch: called when a microbatch of rank 0 begins, with the number of those before it and of all in the pass.
        lock: descriptor that ranks inherit, so that they hold the lock of the run directory, too; None for none.
    """

    def __init__(self, config: RankConfig, watch: Callable[[int, int], None], lock: int | None = None) -> None:
        self._watch, self._seconds = watch, config.trainer.command_seconds
        self._has_ended = False
        self._meeting = new_rendezvous(config.run_dir)
        self._ranks: list[_Rank] = []
        self._told = ""
        with undoing(self._end):  # an interrupt, too, leaves none behind
            for rank in range(config.parallel.world_size):
                log, held = log_of(config.run_dir, rank), () if lock is None else (lock,)
                self._ranks.append(_Rank(rank, Child(PROGRAM, log, _environment(config, rank), inherited=held)))
            text, rendezvous = config.model_dump_json(), f"file://{self._meeting}"
            self._tell([Start(text, rank.rank, rendezvous, len(self._ranks)) for rank in self._ranks])
            self.replies()

    @property
    def peak_rss_bytes(self) -> Sequence[int]:
        return [rank.peak_rss_bytes for rank in self._ranks]

    def adopt(self, engine: PolicyEngine | None) -> bool:
        return False

    def tell(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> None:
        self._tell([command] * len(self._ranks), frames)

    def ask(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> list[Reply]:
        self.tell(command, frames)
        return self.replies()

    def close(self) -> None:
        with ending(self._end):
            if not self._has_ended:
                self.ask(Close())
                deadline = time.monotonic() + CLOSING_SECONDS
                for rank in self._ranks:
                    rank.child.wait(max(0.1, deadline - time.monotonic()))

    # --- one command -------------------------------------------------------------------------------------------------

    def _tell(self, commands: Sequence[AnyCommand], frames: Sequence[bytes] = ()) -> None:
        if self._told:
            self.replies()
        if self._has_ended:
            raise ranks_have_ended()
        self._told = commands[0].name
        for rank, command in zip(self._ranks, commands, strict=True):
            rank.reply = None
            rank.outbox.put(encode(command), frames[rank.rank] if frames else b"")
            with contextlib.suppress(ConnectionError):  # it is gone: `replies` says how it ended
                rank.outbox.flush(rank.child.socket)

    def replies(self) -> list[Reply]:
        command, self._told = self._told, ""
        with undoing(self._end):  # after an interrupt, too: ranks in the midst of a command read no other
            self._exchange(command)
        replies = [rank.reply for rank in self._ranks if rank.reply is not None]
        check_replies(replies, command)
        for rank, reply in zip(self._ranks, replies, strict=True):
            rank.peak_rss_bytes = reply.peak_rss_bytes
        return replies

    def _exchange(self, command: str) -> None:
        """Sends and receives until every rank has replied; the caller reads the replies.

        Raises:
            MoerlError: a rank is gone or silent, or failed while others wait for it.
        """
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
                if not has_failed and any(rank.is_gone or (rank.reply and rank.reply.failure) for rank in self._ranks):
                    has_failed, until = True, min(until, time.monotonic() + GRACE_SECONDS)
        if any(rank.is_gone for rank in self._ranks):
            raise self._failure(command)

    def _serve(self, rank: _Rank, events: int, selector: selectors.BaseSelector) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                rank.outbox.flush(rank.child.socket)
                if not rank.outbox:
                    selector.modify(rank.child.socket, selectors.EVENT_READ, rank)
            if events & selectors.EVENT_READ:
                for message in rank.inbox.read(rank.child.socket):
                    self._take(rank, decode_reply(message))
        except (EOFError, ConnectionError):
            # After the reply to `Close` every rank ends.
            rank.is_gone = rank.reply is None
            selector.unregister(rank.child.socket)

    def _take(self, rank: _Rank, reply: Reply) -> None:
        if reply.progress is None:
            rank.reply = reply
        elif rank.rank == 0:
            self._watch(*reply.progress)

    def _failure(self, command: str) -> MoerlError:
        """Returns the error of a command that not every rank has replied to: of the first rank that is gone, else of
        the first that failed, else of the first that is silent."""
        for rank in self._ranks:
            if rank.is_gone:
                how = rank.child.describe_end(GRACE_SECONDS)
                return lost(rank.rank, command, f"{how}; {describe_output(rank.child.log)}", "one reply from each rank")
        for rank in self._ranks:
            if rank.reply is not None and rank.reply.failure is not None:
                error = rank.reply.failure.error(rank.rank, command)
                error.add_note(describe_output(rank.child.log))
                return error
        silent = next(rank for rank in self._ranks if rank.is_waited_for)
        seen = f"no reply within {self._seconds:g} s; {describe_output(silent.child.log)}"
        return lost(silent.rank, command, seen, "a reply within trainer.command_seconds")

    def _end(self) -> None:
        """Kills the ranks that still run, and clears up."""
        self._has_ended = True
        for rank in self._ranks:
            rank.child.kill()
            rank.child.release()
        discard(self._meeting)
        remove_empty_folders([rank.child.log for rank in self._ranks])


def _environment(config: RankConfig, rank: int) -> dict[str, str]:
    return {
        **child_environment(),
        **interface_variables("127.0.0.1"),
        **rank_variables(config),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(config.parallel.world_size),
    }
