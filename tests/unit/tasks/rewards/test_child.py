"""The process of a reward function: what ends with it, what it may write and take, and what of it is shown."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scored_process import ScoredProcess
from waiting import eventually, is_alive

from moerl.errors import RewardError
from moerl.tasks.rewards import child
from moerl.tasks.rewards.child import RewardChild

ROOT = Path(__file__).parents[4]

Start = Callable[..., ScoredProcess]

# --- what ends with the run -------------------------------------------------------------------------------------------

LEAVES = """
import os, signal, subprocess, sys, time

def leave(row, response):
    # One child in the function's group, and one that left it.
    near = subprocess.Popen(["sleep", "3600"])
    far = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    with open(row["pids"], "w") as file:
        file.write(f"{os.getpid()} {near.pid} {far.pid}")
    if response == "exit":
        os._exit(7)
    if response == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "fork":
        # The child keeps every descriptor of its parent.
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(7)
    if response == "hang":
        while True:
            pass
    return 1.0
"""


def pids_in(file: Path) -> list[int]:
    eventually(lambda: file.exists() and len(file.read_text().split()) == 3)
    return [int(each) for each in file.read_text().split()]


@pytest.mark.parametrize("response", ["exit", "crash", "fork", "hang"])
def test_children_of_a_function_that_ends_by_itself_end_too(start: Start, tmp_path: Path, response: str):
    (tmp_path / "leaves.py").write_text(LEAVES)
    process = start("leaves:leave", timeout_seconds=3.0 if response == "hang" else 60.0)
    with pytest.raises(RewardError):
        process.score({"pids": str(tmp_path / "pids")}, response)
    for pid in pids_in(tmp_path / "pids"):
        eventually(lambda pid=pid: not is_alive(pid))


def test_closing_ends_children_that_left_the_group(start: Start, tmp_path: Path):
    (tmp_path / "leaves.py").write_text(LEAVES)
    process = start("leaves:leave")
    process.score({"pids": str(tmp_path / "pids")}, "fine")
    process.close()
    assert not any(is_alive(pid) for pid in pids_in(tmp_path / "pids"))


def test_everything_ends_when_the_run_is_killed(tmp_path: Path):
    (tmp_path / "leaves.py").write_text(LEAVES)
    code = (
        "from moerl.tasks.rewards.process import RewardProcess\n"
        "process = RewardProcess('leaves:leave', 600.0, 1 << 32)\n"
        f"process.score_all([{{'pids': {str(tmp_path / 'pids')!r}}}], ['hang'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}) as run:
        pids = pids_in(tmp_path / "pids")
        run.kill()
    for pid in pids:
        eventually(lambda pid=pid: not is_alive(pid))


DEEP = """
def deep(row, response, depth=300):
    while depth == 0:
        pass
    return deep(row, response, depth - 1)
"""


def test_where_a_function_hangs_that_has_called_itself_often_is_not_waited_for(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """faulthandler leaves the outermost calls of a deep stack out."""
    monkeypatch.setattr(child, "DUMP_SECONDS", 1e6)
    (tmp_path / "deeper.py").write_text(DEEP)
    with pytest.raises(RewardError, match=r"time limit passed.*in deep \("):
        start("deeper:deep", timeout_seconds=2.0).score({}, "x")


DAEMON = """
import os, time

def leave(row, response):
    # A daemon by the book: its parent ends at once, and it has a session and an environment of its own.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", "3600"], {})
        os._exit(0)
    os.wait()
    return 1.0
"""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [each for each in found if is_alive(each) and parent_of(each) == pid]
    return children_of(pid)


@pytest.mark.parametrize("which", ["that the run started", "that watches the function"])
def test_a_daemon_ends_when_a_guard_is_killed(start: Start, tmp_path: Path, which: str):
    (tmp_path / "daemon.py").write_text(DAEMON)
    process = start("daemon:leave")
    process.score({}, "x")
    [guard] = [each for each in children_of(os.getpid()) if b"guard.py" in Path(f"/proc/{each}/cmdline").read_bytes()]
    below = [pid for child in children_of(guard) for pid in (child, *children_of(child))]
    assert any(b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below)
    killed = guard if which == "that the run started" else parent_of(max(below))
    os.kill(killed, signal.SIGKILL)
    process.close()
    assert not any(is_alive(pid) for pid in below)


# --- replies ---------------------------------------------------------------------------------------------------------

FORGES = r"""
import json, os, sys

def forge(row, response):
    for number in range(256):
        try:
            os.write(number, response.encode())
        except OSError:
            pass
    return 0.0

def close_all(row, response):
    os.closerange(3, 256)
    return 0.0

def endless(row, response):
    while True:
        for number in range(3, 32):
            try:
                os.write(number, b"x" * 65536)
            except OSError:
                pass

def look_around(row, response):
    # Answers every descriptor with each text that the frames of the caller hold.
    frame, texts = sys._getframe(), set()
    while frame is not None:
        for value in list(frame.f_locals.values()):
            texts.update([value] if isinstance(value, str) else [])
            texts.update([value.decode("latin-1")] if isinstance(value, bytes) else [])
        frame = frame.f_back
    for text in texts:
        line = json.dumps({"call": text, "rewards": {"reward": 1.0, "accuracy": 1.0}}) + "\n"
        for number in range(3, 16):
            try:
                os.write(number, line.encode())
            except OSError:
                pass
    return 0.0

def many(row, response):
    return {"reward": 1.0, **{f"part{i}": 1.0 for i in range(int(response))}}
"""


@pytest.fixture
def forges(start: Start, tmp_path: Path) -> Callable[..., ScoredProcess]:
    (tmp_path / "forges.py").write_text(FORGES)
    return lambda name, seconds=60.0: start(f"forges:{name}", seconds)


@pytest.mark.parametrize(
    "forged",
    [
        '{"rewards": {"reward": 1.0, "accuracy": 1.0}}\n',
        '{"call": "1", "rewards": {"reward": 1.0, "accuracy": 1.0}}\n',
        "[]\n",
        "\n",
        "no line",
        "\udcff\n".encode("utf-8", "surrogateescape").decode("latin-1"),
    ],
)
def test_a_function_that_writes_to_every_descriptor_is_refused(forges: Start, forged: str):
    process = forges("forge")
    with pytest.raises(RewardError, match="something else than the reward process wrote to the pipe of the replies"):
        process.score({}, forged)


def test_a_function_that_closes_every_descriptor_fails_its_sample(forges: Start):
    with pytest.raises(RewardError, match="its process ended"):
        forges("close_all").score({}, "x")


def test_a_reply_without_an_end_is_refused(forges: Start):
    with pytest.raises(RewardError, match="longer than 65,536 bytes"):
        forges("endless").score({}, "x")


def test_a_mapping_of_too_many_names_is_refused(forges: Start):
    process = forges("many")
    assert len(process.score({}, "62")) == 64
    # With the accuracy that is added it would be one more than a trajectory may have.
    with pytest.raises(RewardError, match="64 names"):
        process.score({}, "63")


def test_a_reply_is_not_kept_in_the_process_of_the_function_before_it_is_due(forges: Start):
    with pytest.raises(RewardError, match="something else than the reward process wrote"):
        forges("look_around").score({}, "x")


def test_output_that_does_not_end_does_not_put_off_the_time_limit(start: Start, monkeypatch: pytest.MonkeyPatch):
    gives_up_at = time.monotonic() + 120.0

    def take_nothing(child: RewardChild) -> None:
        assert time.monotonic() < gives_up_at, "the time limit was put off"

    # There is always more to read.
    monkeypatch.setattr(RewardChild, "_show", take_nothing)
    with pytest.raises(RewardError, match="time limit passed"):
        start("odd_rewards:behave", timeout_seconds=1.0).score({}, "print and hang")


# --- limits ----------------------------------------------------------------------------------------------------------

GREEDY = """
import ctypes, os, signal, sys

held = []

def take(row, response):
    held.append(bytearray(row["bytes"]))
    return 1.0

def take_all(row, response):
    try:
        while True:
            held.append(bytearray(1 << 16))
    except MemoryError:
        while True:
            try:
                held.append([0] * 8)
            except MemoryError:
                return 1.0

def talk(row, response):
    for _ in range(row["times"]):
        print(response)
        print(response, file=sys.stderr, flush=True)
    return 1.0

def fault(row, response):
    ctypes.string_at(0)

def terminate(row, response):
    for pid in (os.getpid(), os.getppid()):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
    return 1.0

def orphan(row, response):
    os.kill(os.getppid(), signal.SIGKILL)
    while True:
        pass
"""


@pytest.fixture
def greedy(start: Start, tmp_path: Path) -> Callable[..., ScoredProcess]:
    (tmp_path / "greedy.py").write_text(GREEDY)
    return lambda name, memory_bytes=1 << 32: start(f"greedy:{name}", memory_bytes=memory_bytes)


def test_a_function_that_takes_more_memory_than_it_may_is_told_so(greedy: Start):
    process = greedy("take", 1 << 28)
    assert process.score({"bytes": 1 << 20}, "x")["reward"] == 1.0
    with pytest.raises(
        RewardError, match=r"ran out of memory; seen: MemoryError: , in take \(.*greedy\.py:7\)"
    ) as caught:
        process.score({"bytes": 1 << 30}, "x")
    assert "268,435,456 bytes (task.reward_memory_bytes)" in str(caught.value)
    assert process.score({"bytes": 1 << 20}, "x")["reward"] == 1.0


def test_a_function_that_leaves_no_memory_to_answer_with_is_told_so(greedy: Start):
    process = greedy("take_all", 1 << 27)

    # What is left after the first call depends on the interpreter; for the second request it is too little.
    def score_twice() -> None:
        process.score({}, "x")
        process.score({}, "x" * 5_000_000)

    with pytest.raises(RewardError, match="ran out of memory; seen: its process had no memory left to answer with"):
        score_twice()


def test_a_segmentation_fault_says_where(greedy: Start):
    with pytest.raises(RewardError, match=r"ended by signal SIGSEGV, in fault \(.*greedy\.py:28\), below it string_at"):
        greedy("fault").score({}, "x")


def test_what_a_function_prints_reaches_the_terminal_in_small_parts_and_without_control_characters(
    greedy: Start, capsys: pytest.CaptureFixture[str]
):
    process = greedy("talk")
    process.score({"times": 1}, "a\x1b[2Jb" + "c" * 1000)
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["reward function: a\\x1b[2Jb" + "c" * 294 + "..."] * 2
    process.score({"times": 100_000}, "d")
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["reward function: d"] * 98 + ["reward function: more lines, which are not shown"]


def test_signals_to_the_whole_job_leave_the_reward_to_the_run(greedy: Start):
    assert greedy("terminate").score({}, "x")["reward"] == 1.0


def test_a_function_that_kills_its_guard_ends(greedy: Start):
    process = greedy("orphan")
    with pytest.raises(RewardError, match="ended by signal SIGKILL"):
        process.score({}, "x")
