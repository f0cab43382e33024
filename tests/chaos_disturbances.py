"""Disturbances of `chaos_campaign.py`: of one process of a run, of all its processes, of its directory and ports."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from listening import listening
from moerl_runs import Finished, Runs, Sums
from process_tree import descendants, family, tell_all
from strangers import SAYINGS

RUN_SECONDS = 900.0
STOP_SECONDS = 2.0
STRANGERS = 20
"""At each port of a run; each says nothing, or something of `SAYINGS`, and holds the connection."""
ROLES = {
    "rank": b"moerl.ranks.process",
    "engine": b"moerl.rollout.engine_process.process",
    "reward worker": b"rewards/worker.py",
    "server": b"sglang::scheduler",
    "agent": b"agent.py",
}
"""By role, what is on the command line of its processes; whatever started all of them is the controller."""
TOLD = "stop signals to everyone"
TOLD_TOO = "stop signals to everyone, agents too"
"""Agents die of them, and their episodes are refused: the run may end with an error before it stops."""
TO_ALL = ((signal.SIGTERM,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP,), (signal.SIGINT, signal.SIGTERM))


class Life:
    """A run from its start or resume to its end, in a thread; its processes are known by the one that forks.

    Attributes:
        done: what was done to it.
    """

    def __init__(self, runs: Runs, arguments: Sequence[str], sums: Sums, run: Path) -> None:
        self.finished: Finished | None = None
        self.seen: dict[int, str] = {}
        self.run, self.done = run, list[str]()
        self._ends = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._live, args=(runs, arguments, sums), daemon=True)
        self._runs = runs
        self._thread.start()

    def _live(self, runs: Runs, arguments: Sequence[str], sums: Sums) -> None:
        self.finished = runs.run(*arguments, path=[sums.folder], timeout_seconds=RUN_SECONDS)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Until the end, or so long; notes processes meanwhile. After the end its directory and ports are let be."""
        deadline = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < deadline:
            self.look()
            time.sleep(0.05)
        if self.is_over:
            self._ends.close()

    def look(self) -> dict[str, list[int]]:
        """Living processes by role."""
        found: dict[str, list[int]] = {}
        for number, pid in enumerate(descendants(self._runs.pid)):
            role = "controller" if number == 0 else role_of(pid)
            if role:
                found.setdefault(role, []).append(pid)
                self.seen[pid] = role
        return found

    def until_its_end(self, undo: Callable[[], object]) -> None:
        """Has this undone when the run has ended."""
        self._ends.callback(undo)

    def problems(self) -> list[str]:
        """Returns what is wrong with the end of the run, once the run has ended."""
        assert self.finished is not None
        said, status, problems = self.finished.output, self.finished.status, list[str]()
        harmless = [each for each in self.done if each.startswith(("STOP", "strangers"))]
        # A fork that has just begun has no handlers yet; it has said nothing, too.
        is_early = status == -signal.SIGTERM and not said
        if {*self.done} - {*harmless} == {TOLD} and self.done.count(TOLD) == 1 and status not in (0, 75):
            problems += [] if is_early else [f"ended with {status} after {self.done}: {said[-1500:]}"]
        if any(map(is_refusal, self.done)) and shows_our_traceback(said):
            problems.append(f"shows a traceback after {self.done}: {said[-3000:]}")
        return problems


def shows_our_traceback(said: str) -> bool:
    """Agents print theirs on the same output, and an error quotes the end of a server's log: those do not count."""
    return re.search(r'File "[^"]*/moerl/[^"]*\.py", line', said) is not None


def is_refusal(kind: str) -> bool:
    return "full" in kind or "read-only" in kind


def role_of(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return next((role for role, mark in ROLES.items() if mark in line), "")


def disturb(rng: random.Random, life: Life, roles: Sequence[str]) -> str:
    """One disturbance; what it was, empty where the run had ended or had nothing of the kind."""
    alive = life.look()
    role = rng.choice(roles)
    pids = alive.get(role, [])
    if not pids:
        return ""
    try:
        if role == "controller" and rng.random() < 0.5:
            return rng.choice(OF_RUNS)(rng, life, pids[0])
        return _signal(rng, life, role, rng.choice(pids))
    except (ProcessLookupError, FileNotFoundError):
        return ""


def _signal(rng: random.Random, life: Life, role: str, pid: int) -> str:
    kind = rng.choice(["KILL"] * 5 + ["STOP"] * 2 + (["TERM"] * 2 if role == "controller" else []))
    os.kill(pid, getattr(signal, f"SIG{kind}"))
    if kind == "STOP":
        life.wait(STOP_SECONDS)
        os.kill(pid, signal.SIGCONT)
    return f"{kind} {role}"


def _full_disk(rng: random.Random, life: Life, controller: int) -> str:
    """Whatever it writes from now on is refused."""
    _limit_files(controller, 0)
    return "full disk"


def _full_disk_at_the_journal(rng: random.Random, life: Life, controller: int) -> str:
    """A part of the next record finds room."""
    segments = _segments(life.run)
    if not segments:
        return ""
    _limit_files(controller, segments[-1].stat().st_size + rng.randrange(1, 4000))
    return "full disk at the journal"


def _limit_files(pid: int, num_bytes: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _read_only(rng: random.Random, life: Life, controller: int) -> str:
    name = rng.choice(["journal", "journal", "checkpoints", "rollouts", ""])
    folder = life.run / name
    before = folder.stat().st_mode
    folder.chmod(0o555)
    life.until_its_end(lambda: folder.chmod(before))
    return f"read-only {name or 'run directory'}"


def _signals_to_everyone(rng: random.Random, life: Life, controller: int) -> str:
    everyone = family(controller)
    has_agents = any(role_of(pid) == "agent" for pid in everyone)
    tell_all(everyone, rng.choice(TO_ALL))
    return TOLD_TOO if has_agents else TOLD


def _strangers(rng: random.Random, life: Life, controller: int) -> str:
    """They call at every port that the run listens on, and stay."""
    ports = listening(controller)
    for _, host, port in ports:
        for _ in range(STRANGERS):
            with contextlib.suppress(OSError):  # closed by now
                caller = socket.create_connection((host, port), timeout=1.0)
                life.until_its_end(caller.close)
                caller.sendall(rng.choice([b"", *SAYINGS.values()]))
    return "strangers at its ports" if ports else ""


OF_RUNS: Sequence[Callable[[random.Random, Life, int], str]] = (
    *(_signals_to_everyone, _signals_to_everyone, _strangers),
    *(_full_disk, _full_disk_at_the_journal, _full_disk_at_the_journal, _read_only, _read_only),
)
"""Disturbances of all of a run, or of what its controller writes."""

_MAGIC, _PREFIX = b"GRUP", struct.Struct("<4sIIQ")
"""Magic of a record of the journal, and its prefix: magic, checksum, bytes of header and frame; a checksum follows."""


def tear(rng: random.Random, run: Path) -> str:
    """Leaves at the end of a file what a power cut leaves: a part of a record, or NUL bytes in its place. What it was,
    empty where there is nothing to tear."""
    segments, metrics = _segments(run), run / "metrics.jsonl"
    whole = segments[-1].read_bytes() if segments else b""
    if rng.random() < 0.5 and _is_whole(whole):
        _, _, header_bytes, frame_bytes = _PREFIX.unpack_from(whole)
        part = whole[: rng.randrange(1, _PREFIX.size + 4 + header_bytes + frame_bytes)]
        _append(segments[-1], rng.choice([part, bytes(len(part))]))
        return "torn journal"
    if rng.random() < 0.3 and metrics.exists():
        _append(metrics, b'{"stage": "rl", "st')
        return "torn metrics"
    return ""


def _is_whole(segment: bytes) -> bool:
    """It has records, and nothing behind the last one. A run cuts off what is torn before it writes again, so nothing
    is torn twice."""
    at = 0
    while segment[at:].startswith(_MAGIC) and len(segment) - at > _PREFIX.size:
        _, _, header_bytes, frame_bytes = _PREFIX.unpack_from(segment, at)
        at += _PREFIX.size + 4 + header_bytes + frame_bytes
    return 0 < at == len(segment)


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _segments(run: Path) -> list[Path]:
    return sorted((run / "journal").glob("*.journal"))
