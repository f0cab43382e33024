"""One run directory, one run: who is refused, and what frees the directory again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually, output_of, status_of

from moerl import cli
from moerl.config.load import dump_config, load_config
from moerl.errors import ConfigError
from moerl.launch import run_lock as run_lock_module
from moerl.launch.run_lock import LOCK_FILE, holder, run_lock

ROOT = Path(__file__).parents[3]
MOERL = """
import sys, types
stand_in = types.ModuleType("moerl.orchestration.commands")
def command(config, **settings):
    print("training", flush=True)
    sys.stdin.read()
    return 0
for name in ("train", "sft", "rollout", "eval"):
    setattr(stand_in, f"run_{name}", command)
sys.modules[stand_in.__name__] = stand_in
from moerl import cli
cli.MODULES_OF_RUNS = ()
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command line; instead of importing what trains and training, it waits until its standard input is closed."""

Process = subprocess.Popen[str]


@pytest.fixture
def started() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[Process], *arguments: str) -> Process:
    process = subprocess.Popen(
        [sys.executable, "-c", MOERL, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started.append(process)
    return process


def says_it_trains(process: Process) -> bool:
    """Reads its output until it does, or to the end."""
    assert process.stdout is not None
    return "training\n" in iter(process.stdout.readline, "")


def finish(process: Process) -> int:
    output_of(process, 60)
    return process.returncode


@pytest.mark.slow
def test_of_two_runs_started_at_once_in_one_directory_exactly_one_trains(
    tmp_path: Path, started: list[Process]
) -> None:
    run = tmp_path / "run"
    both = [start(started, "train", "recipe=tiny", f"run_dir='{run}'") for _ in range(2)]
    trains = [says_it_trains(process) for process in both]
    assert sorted(trains) == [False, True]
    winner, loser = (both[trains.index(each)] for each in (True, False))
    assert finish(loser) == 2
    assert finish(winner) == 0


def test_who_comes_second_is_refused_with_pid_and_host_until_the_first_is_killed(
    tmp_path: Path, started: list[Process], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    first = start(started, "train", "recipe=tiny", f"run_dir='{run}'")
    assert says_it_trains(first)
    (run / "config.yaml").write_text(dump_config(load_config(["recipe=tiny"], command="train")))
    for arguments in (["train", f"resume={run}"], ["train", "recipe=tiny", f"run_dir='{run}'"]):
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: run_dir: another run is using it")
        assert f"process {first.pid} on host {socket.gethostname()}" in error
    first.send_signal(signal.SIGKILL)
    status_of(first, 30.0)
    assert json.loads((run / LOCK_FILE).read_text())["pid"] == first.pid
    second = start(started, "train", f"resume={run}")
    assert says_it_trains(second)
    assert finish(second) == 0


def test_a_lock_leaves_nothing_behind(tmp_path: Path) -> None:
    with run_lock(tmp_path / "runs" / "new"):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]
    (tmp_path / "file").touch()
    with run_lock(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "file"}


def test_the_lock_can_be_taken_again_and_again(tmp_path: Path) -> None:
    for _ in range(3):
        with run_lock(tmp_path), pytest.raises(ConfigError, match="another run is using it"), run_lock(tmp_path):
            pass


@pytest.fixture
def left_behind(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A process that took the lock of `tmp_path / "run"` and was killed, and its child, which holds it on."""
    parent = f"""
import subprocess, sys
from pathlib import Path
from moerl.launch.run_lock import run_lock
child = "import time, pathlib; pathlib.Path({str(tmp_path / "ready")!r}).touch(); time.sleep(600)"
with run_lock(Path({str(tmp_path / "run")!r})) as lock:
    subprocess.run([sys.executable, "-c", child], pass_fds=[lock])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True
    )
    eventually((tmp_path / "ready").exists)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    status_of(process, 30.0)
    yield process.pid, int(child)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(child), signal.SIGKILL)


def test_a_process_that_inherits_the_lock_holds_it_when_its_parent_is_gone(
    tmp_path: Path, left_behind: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock_module, "LEAVING_SECONDS", 0.1)
    named = f"process {left_behind[0]} on host {socket.gethostname()}, which is gone, but not all that it started"
    assert holder(tmp_path / "run") == named
    with pytest.raises(ConfigError, match=named), run_lock(tmp_path / "run"):
        pass


@pytest.mark.parametrize("waits", ["who asks", "who takes it"])
def test_a_rank_of_a_killed_run_gets_time_to_be_gone(waits: str, tmp_path: Path, left_behind: tuple[int, int]) -> None:
    leaving = threading.Timer(2 * run_lock_module.WAIT_SECONDS, os.kill, (left_behind[1], signal.SIGKILL))
    leaving.start()
    if waits == "who asks":
        assert holder(tmp_path / "run") == ""
    else:
        with run_lock(tmp_path / "run"):
            pass
    leaving.join()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_can_open_the_lock_and_so_hold_it(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with run_lock(tmp_path):
            assert mode_of(tmp_path / LOCK_FILE) == 0o600
    finally:
        os.umask(before)


def test_the_lock_that_a_killed_run_left_open_to_all_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).touch()
    (tmp_path / LOCK_FILE).chmod(0o666)
    with run_lock(tmp_path):
        assert mode_of(tmp_path / LOCK_FILE) == 0o600


@pytest.mark.parametrize("kind", ["another user's", "a symbolic link", "a pipe"])
def test_a_lock_that_others_may_hold_is_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / LOCK_FILE
    if kind == "a symbolic link":
        (tmp_path / "else").touch()
        path.symlink_to(tmp_path / "else")
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.touch()
        monkeypatch.setattr(run_lock_module.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=rf"run_dir: {LOCK_FILE} is not ours.*: {kind}"), run_lock(tmp_path):
        pass


def test_a_process_that_is_no_run_and_holds_the_lock_is_named(tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    code = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, 2); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        named = rf"process {other.pid} \(python.*\) on this host, which is no run"
        with pytest.raises(ConfigError, match=named), run_lock(tmp_path):
            pass
        other.communicate(b"")


def test_who_cannot_read_the_lock_is_told_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LOCK_FILE).touch()

    def refused(*arguments: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(run_lock_module.os, "open", refused)
    assert holder(tmp_path) == f"perhaps: the lock is of user {os.getuid()}, who alone can open it"
    monkeypatch.setattr(run_lock_module.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="is not ours"), run_lock(tmp_path):
        pass


@pytest.mark.parametrize("place", ["a file", "below a file", "where nobody can make anything"])
def test_a_directory_that_cannot_be_written_is_refused_by_its_key(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    run_dir = {"a file": file, "below a file": file / "run"}.get(place, Path("/proc/nowhere/run"))
    assert cli.main(["train", "recipe=tiny", f"run_dir='{run_dir}'"]) == 2
    assert f"error: run_dir: cannot be written; seen: {run_dir}: " in capsys.readouterr().err


def test_a_read_only_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*arguments: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(run_lock_module.os, "open", read_only)
    with pytest.raises(ConfigError, match=r"cannot be written; seen: .*Read-only file system"), run_lock(tmp_path):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.raises(ConfigError, match=r"its file system cannot lock files.*No locks available"), run_lock(tmp_path):
        pass


def test_a_full_disk_is_not_taken_for_one_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_lock_module.os, "write", full)
    with pytest.raises(ConfigError, match=r"cannot be written; seen: .*No space left"), run_lock(tmp_path):
        pass
    monkeypatch.undo()
    with run_lock(tmp_path):
        pass
