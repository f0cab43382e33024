"""Starts the ranks of a run as child processes on this machine and watches over them. Torch-free; runs in the parent.

Every rank gets the same command line. Rank 0 keeps the terminal; the others write to ``logs/rank-N.log``. When a rank
fails, all others are killed by pid. Ctrl-C and the signals that ask for a stop at a safe point are passed on; a rank
that has not ended a while after Ctrl-C, or after another one stopped, is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from moerl.config.interfaces import interface_variables
from moerl.config.stop_signals import SIGNALS, STOPPED
from moerl.launch.rank import new_rendezvous

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
CLOSING_SECONDS = 90.0
"""Time that ranks have to close their servers after they agreed to stop; `SGLangServer.stop` may take a while."""


@dataclass(frozen=True, slots=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None

    def stopped(self, asked: int) -> bool:
        """True where it ended because it was asked to, also by the signal itself, before it could take notice."""
        return self.process.poll() == STOPPED or (asked > 0 and self.process.poll() == -asked)

    def failed(self, asked: int) -> bool:
        return self.process.poll() not in (None, 0) and not self.stopped(asked)


@dataclass(slots=True)
class _Stop:
    """What the parent was told; the watch loop passes it on.

    interrupted: Ctrl-C. asked: number of the first signal that asks for a stop at a safe point; 0 = none.
    """

    interrupted: bool = False
    asked: int = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupted = True
        else:
            self.asked = self.asked or number


def launch_local(
    command: Sequence[str],
    *,
    run_dir: Path,
    world_size: int,
    num_threads: int,
    lock: int | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> int:
    """Runs `command` once per rank and waits for all of them. Call from the main thread.

    Args:
        command: program and arguments, the same for every rank.
        run_dir: made if needed; holds the rendezvous file while the ranks run, and ``logs/`` where there is output.
        num_threads: CPU threads of the whole run; each rank gets its share, at least 1.
        lock: descriptor that ranks inherit, so that they hold the lock of the run directory, too.
        grace_seconds: time from Ctrl-C, or from the first rank that stopped, to KILL.

    Returns:
        0; the exit status of the first rank found to have failed (one killed by signal n counts as 128 + n);
        `STOPPED` where the ranks stopped when they were asked to; 130 after Ctrl-C.
    """
    logs = run_dir / "logs"
    run_dir.mkdir(parents=True, exist_ok=True)
    rendezvous = new_rendezvous(run_dir)
    stop = _Stop()
    ranks: list[_Rank] = []
    try:
        with _stop_signals(stop):
            for rank in range(world_size):
                environment = _environment(rank, world_size, rendezvous, num_threads)
                log = None if rank == 0 else logs / f"rank-{rank}.log"
                ranks.append(_Rank(rank, _start(command, environment, log, lock), log))
            return _watch(ranks, stop, grace_seconds)
    finally:
        _end(ranks, grace_seconds, first=signal.SIGKILL)
        Path(rendezvous.removeprefix("file://")).unlink(missing_ok=True)
        _remove_empty([rank.log for rank in ranks if rank.log is not None])


def _environment(rank: int, world_size: int, rendezvous: str, num_threads: int) -> dict[str, str]:
    return {
        **os.environ,
        **interface_variables("127.0.0.1"),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MOERL_RENDEZVOUS": rendezvous,
        "MOERL_LAUNCHER_PID": str(os.getpid()),
        "OMP_NUM_THREADS": str(max(1, num_threads // world_size)),
        # Ranks that wait must not burn the cores that others compute on.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def _start(
    command: Sequence[str], environment: dict[str, str], log: Path | None, lock: int | None
) -> subprocess.Popen[bytes]:
    """Starts one rank in a session of its own, so that Ctrl-C reaches it once, through the parent."""
    inherited = () if lock is None else (lock,)
    if log is None:
        return subprocess.Popen(list(command), env=environment, pass_fds=inherited, start_new_session=True)
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            env=environment,
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _watch(ranks: Sequence[_Rank], stop: _Stop, grace_seconds: float) -> int:
    passed_on = 0
    while True:
        if stop.interrupted:
            _end(ranks, grace_seconds, first=signal.SIGINT)
            return 128 + signal.SIGINT
        if stop.asked and not passed_on:
            passed_on = stop.asked
            for rank in ranks:
                _send(rank, passed_on)
        failed = [rank for rank in ranks if rank.failed(passed_on)]
        if failed:
            _report(failed)
            return _status(failed[0].process.returncode)
        if any(rank.stopped(passed_on) for rank in ranks):
            return _after_a_stop(ranks, passed_on, grace_seconds)
        if all(rank.process.poll() == 0 for rank in ranks):
            return 0
        time.sleep(POLL_SECONDS)


def _after_a_stop(ranks: Sequence[_Rank], asked: int, grace_seconds: float) -> int:
    """Waits for the other ranks once one has stopped; the exit status of the run."""
    if not any(rank.process.poll() == STOPPED for rank in ranks):
        # It died of the signal before it could take notice: the others may wait for it without end.
        _end(ranks, grace_seconds)
        return STOPPED
    _end(ranks, CLOSING_SECONDS)
    failed = [rank for rank in ranks if rank.failed(asked) and rank.process.returncode != -signal.SIGKILL]
    if failed:
        _report(failed)
        return _status(failed[0].process.returncode)
    return STOPPED


def _end(ranks: Sequence[_Rank], grace_seconds: float, first: int = 0) -> None:
    """Sends `first` (a signal, or 0 for none) to every rank that still runs, and KILL after the grace period."""
    for rank in ranks:
        _send(rank, first)
    deadline = time.monotonic() + grace_seconds
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()


def _send(rank: _Rank, signal_number: int) -> None:
    if rank.process.poll() is None:
        rank.process.send_signal(signal_number)


def _remove_empty(logs: Sequence[Path]) -> None:
    for log in logs:
        if log.stat().st_size == 0:
            log.unlink()
    for folder in {log.parent for log in logs}:
        if not any(folder.iterdir()):
            folder.rmdir()


def _report(failed: Sequence[_Rank]) -> None:
    for rank in failed:
        where = "its output is above"
        if rank.log is not None:
            where = f"its output is in {rank.log}" if rank.log.stat().st_size else "it wrote nothing"
        status = _status(rank.process.returncode)
        print(f"error: rank {rank.rank} ended with status {status}; {where}", file=sys.stderr, flush=True)


def _status(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


@contextlib.contextmanager
def _stop_signals(stop: _Stop) -> Iterator[None]:
    """Notes Ctrl-C and the stop signals while the context is open; those that the process ignores stay ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *SIGNALS)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop.receive)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
