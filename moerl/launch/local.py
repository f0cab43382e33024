"""Starts the ranks of a run as child processes on this machine and watches over them. Torch-free; runs in the parent.

Every rank gets the same command line. Rank 0 keeps the terminal; the others write to ``logs/rank-N.log``. When a rank
fails, or the parent is told to stop, all others are ended by pid: TERM first, KILL after a grace period.
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

from moerl.launch.rank import new_rendezvous

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Network interface on which the ranks of one machine meet, where the user names no other."""


@dataclass(frozen=True, slots=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)


@dataclass(slots=True)
class _Stop:
    """The first stop signal that the parent received; 0 = none. The watch loop passes it on."""

    signal_number: int = 0

    def receive(self, signal_number: int, frame: FrameType | None) -> None:
        self.signal_number = self.signal_number or signal_number


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
        run_dir: made if needed; holds the rendezvous file while the ranks run, and ``logs/``.
        num_threads: CPU threads of the whole run; each rank gets its share, at least 1.
        lock: descriptor that ranks inherit, so that they hold the lock of the run directory, too.
        grace_seconds: time between TERM and KILL.

    Returns:
        0, the exit status of the first rank found to have failed, or 128 + the signal that stopped the run (a rank
        killed by signal n counts as 128 + n).
    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
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
        _end(ranks, grace_seconds)
        Path(rendezvous.removeprefix("file://")).unlink(missing_ok=True)


def _environment(rank: int, world_size: int, rendezvous: str, num_threads: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MOERL_RENDEZVOUS": rendezvous,
        "MOERL_LAUNCHER_PID": str(os.getpid()),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or LOOPBACK,
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
    while True:
        if stop.signal_number:
            _end(ranks, grace_seconds, first=stop.signal_number)
            return 128 + stop.signal_number
        failed = [rank for rank in ranks if rank.failed]
        if failed:
            _report(failed)
            return _status(failed[0].process.returncode)
        if all(rank.process.poll() == 0 for rank in ranks):
            return 0
        time.sleep(POLL_SECONDS)


def _end(ranks: Sequence[_Rank], grace_seconds: float, first: int = signal.SIGTERM) -> None:
    """Ends every rank that still runs: `first`, then KILL after the grace period."""
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


def _report(failed: Sequence[_Rank]) -> None:
    for rank in failed:
        where = f"its output is in {rank.log}" if rank.log else "its output is above"
        status = _status(rank.process.returncode)
        print(f"error: rank {rank.rank} ended with status {status}; {where}", file=sys.stderr, flush=True)


def _status(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


@contextlib.contextmanager
def _stop_signals(stop: _Stop) -> Iterator[None]:
    """Forwards TERM and INT to the ranks while the context is open."""
    before = {number: signal.signal(number, stop.receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
