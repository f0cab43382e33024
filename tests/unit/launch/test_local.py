"""Starting ranks, watching over them, and ending them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from waiting import eventually, is_alive

from moerl.config.interfaces import LOOPBACK
from moerl.launch.local import launch_local

ROOT = Path(__file__).parents[3]


def program(tmp_path: Path, body: str) -> list[str]:
    """A rank's program; `here` is its rank, `folder` is tmp_path."""
    head = f"""
        import os, sys, time, signal, pathlib
        here = int(os.environ['RANK'])
        folder = pathlib.Path({str(tmp_path)!r})
    """
    path = tmp_path / "rank.py"
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return [sys.executable, str(path)]


def launch(command: list[str], run_dir: Path, world_size: int = 2, grace_seconds: float = 10.0) -> int:
    return launch_local(command, run_dir=run_dir, world_size=world_size, num_threads=3, grace_seconds=grace_seconds)


def test_every_rank_gets_its_place_and_its_share_of_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    command = program(
        tmp_path,
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MOERL_RENDEZVOUS", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
        (folder / f"env-{here}").write_text(" ".join(os.environ[name] for name in names))
        """,
    )
    assert launch(command, tmp_path / "run") == 0
    first, second = ((tmp_path / f"env-{rank}").read_text().split() for rank in (0, 1))
    assert first[:3] == ["0", "0", "2"]
    assert second[:3] == ["1", "1", "2"]
    assert first[3:] == second[3:]
    assert first[3].startswith(f"file://{tmp_path.resolve()}/run/")
    assert first[4:] == [LOOPBACK, "1"]


def test_the_users_network_interface_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    command = program(tmp_path, '(folder / f"env-{here}").write_text(os.environ["GLOO_SOCKET_IFNAME"])')
    assert launch(command, tmp_path / "run") == 0
    assert [(tmp_path / f"env-{rank}").read_text() for rank in (0, 1)] == ["eth7", "eth7"]


def test_rank_0_keeps_the_terminal_and_the_others_write_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    command = program(tmp_path, "print('out of', here); print('err of', here, file=sys.stderr)")
    assert launch(command, tmp_path / "run") == 0
    captured = capfd.readouterr()
    assert captured.out == "out of 0\n"
    assert captured.err == "err of 0\n"
    assert sorted((tmp_path / "run" / "logs" / "rank-1.log").read_text().splitlines()) == ["err of 1", "out of 1"]


def test_a_failing_rank_ends_the_others_and_is_named_with_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    command = program(
        tmp_path,
        """
        (folder / f"pid-{here}").write_text(str(os.getpid()))
        if here == 1:
            while not (folder / "pid-0").exists(): time.sleep(0.01)
            print('what went wrong', flush=True)
            sys.exit(7)
        time.sleep(600)
        """,
    )
    assert launch(command, tmp_path / "run") == 7
    error = capfd.readouterr().err
    assert "rank 1 ended with status 7" in error
    assert str(tmp_path / "run" / "logs" / "rank-1.log") in error
    assert not is_alive(int((tmp_path / "pid-0").read_text()))


def test_a_rank_that_ignores_every_signal_is_killed(tmp_path: Path):
    command = program(
        tmp_path,
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        (folder / f"pid-{here}").write_text(str(os.getpid()))
        if here == 1:
            while not (folder / "pid-0").exists(): time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """,
    )
    assert launch(command, tmp_path / "run", grace_seconds=0.2) == 128 + signal.SIGKILL
    assert not is_alive(int((tmp_path / "pid-0").read_text()))


def test_the_rendezvous_file_and_empty_logs_are_gone_afterwards(tmp_path: Path):
    command = program(tmp_path, "pathlib.Path(os.environ['MOERL_RENDEZVOUS'].removeprefix('file://')).write_text('x')")
    assert launch(command, tmp_path / "run") == 0
    assert list((tmp_path / "run").iterdir()) == []


LAUNCHER = """
import sys
from pathlib import Path
from moerl.launch.local import launch_local
sys.exit(launch_local(sys.argv[2:], run_dir=Path(sys.argv[1]), world_size=2, num_threads=2))
"""


def start_launcher(tmp_path: Path, body: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A launcher in a process of its own, once both of its ranks run; and the ranks' pids."""
    command = program(tmp_path, body)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "run"), *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    eventually(lambda: all(path.exists() and path.read_text() for path in files))
    return launcher, [int(path.read_text()) for path in files]


STOPPING = """
def stop(number, frame):
    (folder / f"got-{here}").write_text(str(number))
    sys.exit(STATUS)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, stop)
(folder / f"pid-{here}").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)],
)
def test_a_stop_signal_reaches_every_rank(tmp_path: Path, number: signal.Signals, status: int):
    launcher, pids = start_launcher(tmp_path, STOPPING.replace("STATUS", "75" if status == 75 else "1"))
    launcher.send_signal(number)
    assert launcher.wait(30) == status
    assert [(tmp_path / f"got-{rank}").read_text() for rank in (0, 1)] == [str(int(number))] * 2
    assert not any(map(is_alive, pids))


def test_a_rank_that_takes_no_notice_yet_is_ended_by_the_signal_itself(tmp_path: Path):
    body = """
        (folder / f"pid-{here}").write_text(str(os.getpid()))
        time.sleep(600)
        """
    launcher, pids = start_launcher(tmp_path, body)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(30) == 75
    assert not any(map(is_alive, pids))


def test_ranks_that_fail_when_they_are_told_to_stop_are_a_failure(tmp_path: Path):
    launcher, _ = start_launcher(tmp_path, STOPPING.replace("STATUS", "1"))
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 1


def test_a_rank_that_fails_after_another_has_stopped_is_a_failure(tmp_path: Path):
    body = STOPPING.replace("sys.exit(STATUS)", "(time.sleep(0.5), sys.exit(3)) if int(here) == 0 else sys.exit(75)")
    assert "sys.exit(3)" in body
    launcher, _ = start_launcher(tmp_path, body)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent-death signal")
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path):
    launcher, pids = start_launcher(
        tmp_path,
        """
        from moerl.launch.rank import die_with_launcher
        die_with_launcher()
        (folder / f"pid-{here}").write_text(str(os.getpid()))
        time.sleep(600)
        """,
    )
    launcher.kill()
    launcher.wait(30)
    eventually(lambda: not any(map(is_alive, pids)))
