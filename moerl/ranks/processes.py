"""Ranks as child processes on this machine: started, told what to do, watched, and ended. Runs in the controller.

Every rank has a socket to the controller: commands and frames go in, replies come back. Its output goes to
``logs/rank-N.log`` in the run directory. A rank that fails, ends or is silent until the deadline of a command is one
error here that names it; the others are killed. On Linux ranks also die with the controller, however it dies.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moerl.config.interfaces import interface_variables
from moerl.config.schema import RunConfig
from moerl.contract.commands import AnyCommand, Close, Reply, Start, decode_reply, encode
from moerl.contract.ports import PolicyEngine
from moerl.errors import MoerlError, TrainerError, UnprovedError
from moerl.processes.channel import Inbox, Outbox
from moerl.processes.parent import new_rendezvous
from moerl.ranks.links import Links
from moerl.ranks.process import CONTROLLER

# -P: a torch.py or json.py in the user's directory is not what we import.
PROGRAM = (sys.executable, "-P", "-m", "moerl.ranks.process")
GRACE_SECONDS = 10.0
"""For the replies of the other ranks, once one has failed: most errors are raised by all of them."""
CLOSING_SECONDS = 90.0


class _Rank:
    """One child process and the controller's end of its socket."""

    def __init__(self, rank: int, environment: dict[str, str], log: Path, inherited: Sequence[int]) -> None:
        self.rank, self.log = rank, log
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("ab") as output:
            self.process = subprocess.Popen(
                [*PROGRAM, str(theirs.fileno())],
                env=environment,
                pass_fds=(theirs.fileno(), *inherited),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C and the signals of schedulers are the controller's.
                start_new_session=True,
            )
        self.inbox, self.outbox = Inbox(), Outbox()
        self.reply: Reply | None = None
        self.is_gone = False
        self.peak_rss_bytes = 0

    @property
    def is_waited_for(self) -> bool:
        return self.reply is None and not self.is_gone

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        if self.log.exists() and self.log.stat().st_size == 0:
            self.log.unlink()

    def describe_end(self) -> str:
        try:
            code = self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"

    def describe_output(self) -> str:
        wrote = self.log.exists() and self.log.stat().st_size > 0
        return f"its output is in {self.log}" if wrote else "it wrote nothing"


class Processes:
    """`moerl.ranks.group.Ranks` as processes of this machine. Call from the main thread.

    Args:
        watch: told as a microbatch of rank 0 begins how many began before it, and of how many.
        lock: descriptor that ranks inherit, so that they hold the lock of the run directory, too; None for none.
    """

    def __init__(self, config: RunConfig, watch: Callable[[int, int], None], lock: int | None = None) -> None:
        self._watch, self._seconds = watch, config.trainer.command_seconds
        self._links, self._has_ended = Links(config), False
        self._meeting = new_rendezvous(config.run_dir)
        self._ranks: list[_Rank] = []
        try:
            for rank in range(config.parallel.world_size):
                log = config.run_dir / "logs" / f"rank-{rank}.log"
                self._ranks.append(_Rank(rank, _environment(config, rank), log, () if lock is None else (lock,)))
            text, rendezvous = config.model_dump_json(), f"file://{self._meeting}"
            self._ask([Start(text, rank.rank, rendezvous) for rank in self._ranks])
        except BaseException:  # an interrupt, too, leaves none behind
            self._end()
            raise

    @property
    def peak_rss_bytes(self) -> Sequence[int]:
        return [rank.peak_rss_bytes for rank in self._ranks]

    def connect(self, engine: PolicyEngine | None) -> str:
        return self._links.connect(engine)

    def ask(self, command: AnyCommand, frames: Sequence[bytes] = ()) -> list[Reply]:
        return self._ask([command] * len(self._ranks), frames)

    def close(self) -> None:
        try:
            if not self._has_ended:
                self.ask(Close())
                deadline = time.monotonic() + CLOSING_SECONDS
                for rank in self._ranks:
                    with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed below
                        rank.process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            self._end()

    # --- one command -------------------------------------------------------------------------------------------------

    def _ask(self, commands: Sequence[AnyCommand], frames: Sequence[bytes] = ()) -> list[Reply]:
        if self._has_ended:
            raise TrainerError("the ranks of the trainer have ended", remedy="see the error before this one")
        for rank, command in zip(self._ranks, commands, strict=True):
            rank.reply = None
            rank.outbox.put(encode(command), frames[rank.rank] if frames else b"")
        try:
            self._exchange(commands[0].name)
        except BaseException:  # an interrupt, too: ranks in the midst of a command hear no other
            self._end()
            raise
        replies = [rank.reply for rank in self._ranks if rank.reply is not None]
        failures = [(i, reply.failure) for i, reply in enumerate(replies) if reply.failure is not None]
        if failures:
            raise first_error([failure.error(rank, commands[0].name) for rank, failure in failures])
        for rank, reply in zip(self._ranks, replies, strict=True):
            rank.peak_rss_bytes = reply.peak_rss_bytes
        return replies

    def _exchange(self, command: str) -> None:
        """Sends and receives until every rank has replied; what the replies say is for the caller.

        Raises:
            MoerlError: a rank is gone or silent, or failed while others wait for it.
        """
        until = time.monotonic() + self._seconds
        has_failed = False
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
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
                rank.outbox.flush(rank.socket)
                if not rank.outbox:
                    selector.modify(rank.socket, selectors.EVENT_READ, rank)
            if events & selectors.EVENT_READ:
                for message in rank.inbox.read(rank.socket):
                    self._take(rank, decode_reply(message))
        except (EOFError, ConnectionError):
            # After the reply to the last command every rank leaves.
            rank.is_gone = rank.reply is None
            selector.unregister(rank.socket)

    def _take(self, rank: _Rank, reply: Reply) -> None:
        if reply.progress is None:
            rank.reply = reply
        elif rank.rank == 0:
            self._watch(*reply.progress)

    def _failure(self, command: str) -> MoerlError:
        """The error of a command that not every rank has replied to: the first rank that is gone, failed or is silent
        names it, in this order."""
        for rank in self._ranks:
            if rank.is_gone:
                how = rank.describe_end()
                return _lost(rank, command, f"{how}; {rank.describe_output()}", "one reply from each rank")
        for rank in self._ranks:
            if rank.reply is not None and rank.reply.failure is not None:
                error = rank.reply.failure.error(rank.rank, command)
                error.add_note(rank.describe_output())
                return error
        silent = next(rank for rank in self._ranks if rank.is_waited_for)
        seen = f"no reply within {self._seconds:g} s; {silent.describe_output()}"
        return _lost(silent, command, seen, "a reply within trainer.command_seconds")

    def _end(self) -> None:
        """Kills what still runs, and clears up."""
        self._has_ended = True
        for rank in self._ranks:
            rank.end()
        self._links.close()
        self._meeting.unlink(missing_ok=True)
        for folder in {rank.log.parent for rank in self._ranks}:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()


def _lost(rank: _Rank, command: str, seen: str, expected: str) -> TrainerError:
    return TrainerError(
        f"rank {rank.rank} of the trainer was lost in {command!r}",
        seen=seen,
        expected=expected,
        remedy="correct the cause and go on from the last checkpoint; the other ranks were ended",
    )


def first_error(errors: Sequence[MoerlError]) -> MoerlError:
    """The error to raise where several ranks have one: of proofs that failed, with the first microbatch of all."""
    unproved = [error for error in errors if isinstance(error, UnprovedError)]
    if len(unproved) < len(errors):
        return next(error for error in errors if not isinstance(error, UnprovedError))
    numbers = [error.microbatch for error in unproved if error.microbatch >= 0]
    telling = next((error for error in unproved if error.seen), unproved[0])
    telling.microbatch = min(numbers, default=-1)
    return telling


def _environment(config: RunConfig, rank: int) -> dict[str, str]:
    world_size = config.parallel.world_size
    return {
        **os.environ,
        **interface_variables("127.0.0.1"),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        CONTROLLER: str(os.getpid()),
        "OMP_NUM_THREADS": str(max(1, config.num_threads // world_size)),
        # Ranks that wait must not burn the cores that others compute on.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
