"""Ranks in processes of their own, in any placement: their program, commands to all, their replies, and the error of
the first. Runs in the controller, and in the actors of ranks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from moerl.config.ranks import RankConfig, rank_threads
from moerl.contract.commands import AnyCommand, Close, Reply, encode
from moerl.contract.ports import PolicyEngine
from moerl.errors import MoerlError, TrainerError, UnprovedError, ending, undoing
from moerl.machine.torch_start import cuda_variables
from moerl.processes.child import describe_output, module_program, remove_empty

PROGRAM = module_program("moerl.ranks.process")
GRACE_SECONDS = 10.0
"""Seconds for the replies of the other ranks, once one has failed: most errors are raised by all of them."""
CLOSING_SECONDS = 90.0
"""Seconds for a rank to end after its last reply."""


class RankAway:
    """The controller's side of one rank.

    Attributes:
        rank: number, from 0.
        log: file with the output of the rank.
        reply: to the latest command; None before it has come.
        is_gone: the rank ended before its reply.
        peak_rss_bytes: peak resident memory, as of the latest reply.
    """

    def __init__(self, rank: int, log: Path) -> None:
        self.rank, self.log = rank, log
        self.reply: Reply | None = None
        self.is_gone = False
        self.peak_rss_bytes = 0

    @property
    def is_waited_for(self) -> bool:
        """True before the rank has replied or ended."""
        return self.reply is None and not self.is_gone


class RanksAway[R: RankAway](ABC):
    """`moerl.ranks.port.Ranks` in processes of their own. Called by one thread at a time.

    Args:
        watch: called when a microbatch of rank 0 begins, with the number of those before it and of all in the pass.
    """

    def __init__(self, config: RankConfig, watch: Callable[[int, int], None]) -> None:
        self._watch, self._seconds = watch, config.trainer.command_seconds
        self._logs = [config.run_dir / "logs" / f"rank-{rank}.log" for rank in range(config.parallel.world_size)]
        self._ranks: list[R] = []
        self._told, self._has_ended = "", False

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

    def replies(self) -> list[Reply]:
        command, self._told = self._told, ""
        with undoing(self._end):  # after an interrupt, too: ranks in the midst of a command read no other
            self._exchange(command)
            if any(rank.is_gone for rank in self._ranks):
                raise self._failure(command)
        replies = [rank.reply for rank in self._ranks if rank.reply is not None]
        failures = [(rank, reply.failure) for rank, reply in enumerate(replies) if reply.failure is not None]
        if failures:
            raise first_error([failure.error(rank, command) for rank, failure in failures])
        for rank, reply in zip(self._ranks, replies, strict=True):
            rank.peak_rss_bytes = reply.peak_rss_bytes
        return replies

    def close(self) -> None:
        with ending(self._end):
            if not self._has_ended:
                self.ask(Close())
                self._await_ends()

    def _tell(self, commands: Sequence[AnyCommand], frames: Sequence[bytes] = ()) -> None:
        """Sends each rank its command."""
        if self._told:
            self.replies()
        if self._has_ended:
            raise TrainerError("the ranks of the trainer have ended", remedy="see the error before this one")
        self._told = commands[0].name
        with undoing(self._end):
            for rank, command in zip(self._ranks, commands, strict=True):
                rank.reply, rank.is_gone = None, False
                self._send(rank, encode(command), frames[rank.rank] if frames else b"")

    def _note(self, rank: R, reply: Reply) -> None:
        """Notes what a rank sent: its reply, or how far it is."""
        if reply.progress is None:
            rank.reply = reply
        elif rank.rank == 0:
            self._watch(*reply.progress)

    def _remove_empty_logs(self) -> None:
        """Removes logs of ranks that wrote nothing, and their folder if it is empty then."""
        for log in self._logs:
            remove_empty(log)
        with contextlib.suppress(OSError):  # another has come, or nothing can be removed
            self._logs[0].parent.rmdir()

    def _has_failure(self) -> bool:
        return any(rank.is_gone or (rank.reply and rank.reply.failure) for rank in self._ranks)

    def _failure(self, command: str) -> MoerlError:
        """Returns the error of a command that not every rank has replied to: of the first rank that is gone, else of
        the first that failed, else of the first that is silent."""
        for rank in self._ranks:
            if rank.is_gone:
                return self._lost(rank, command, self._how_ended(rank), "one reply from each rank")
        for rank in self._ranks:
            if rank.reply is not None and rank.reply.failure is not None:
                error = rank.reply.failure.error(rank.rank, command)
                error.add_note(describe_output(rank.log))
                return error
        silent = next(rank for rank in self._ranks if rank.is_waited_for)
        seen = f"no reply within {self._seconds:g} s{self._where(silent)}"
        return self._lost(silent, command, seen, "a reply within trainer.command_seconds")

    def _lost(self, rank: R, command: str, seen: str, expected: str) -> TrainerError:
        return TrainerError(
            f"rank {rank.rank} of the trainer was lost in {command!r}",
            seen=f"{seen}; {describe_output(rank.log)}",
            expected=expected,
            remedy="correct the cause and go on from the last checkpoint; the other ranks were ended",
        )

    def _where(self, rank: R) -> str:
        """Returns the rank's place, as the end of a message about it."""
        return ""

    @abstractmethod
    def _send(self, rank: R, message: bytes, frame: bytes) -> None: ...

    @abstractmethod
    def _exchange(self, command: str) -> None:
        """Waits until every rank has replied or ended. Raises `MoerlError` if one is silent, or failed while others
        wait for it."""

    @abstractmethod
    def _how_ended(self, rank: R) -> str:
        """Returns how a rank that is gone ended."""

    @abstractmethod
    def _await_ends(self) -> None:
        """Waits until the processes have ended by themselves."""

    @abstractmethod
    def _end(self) -> None:
        """Kills the ranks that still run, and clears up."""


def first_error(errors: Sequence[MoerlError]) -> MoerlError:
    """Returns the error to raise for those of several ranks: the first that is no failed proof; else of the failed
    proofs one that says what was seen, with the first microbatch of all."""
    unproved = [error for error in errors if isinstance(error, UnprovedError)]
    if len(unproved) < len(errors):
        return next(error for error in errors if not isinstance(error, UnprovedError))
    numbers = [error.microbatch for error in unproved if error.microbatch >= 0]
    telling = next((error for error in unproved if error.seen), unproved[0])
    telling.microbatch = min(numbers, default=-1)
    return telling


def rank_variables(config: RankConfig, rank: int, local_rank: int) -> dict[str, str]:
    """Returns the variables of a rank's process. local_rank: its number among those that see the same GPUs."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(config.parallel.world_size),
        "OMP_NUM_THREADS": str(rank_threads(config, "sft")),
        **cuda_variables(config.trainer.tf32, deterministic=config.trainer.deterministic),
    }
