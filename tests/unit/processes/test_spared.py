"""One module starts processes, and stop signals to all of a run end none of its children, from their first instruction
on."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_sinks import make_sink, told
from process_tree import descendants, signals_to_children
from tiny_moe import write_model
from used_names import places_of, used_names
from waiting import eventually, is_alive

from moerl.errors import closing
from moerl.launch.sweeps.hosts import LocalHost, SweepJob
from moerl.orchestration.templates import Templates
from moerl.processes.child import Child
from moerl.processes.guard import HANDED_ON
from moerl.processes.host import PIPE, end_group, end_guarded, run_command, start_guarded, start_spared
from moerl.processes.spared import STOP_SIGNALS
from moerl.ranks.away import PROGRAM
from moerl.rollout.engine_process.local import LocalProcess, dismiss
from moerl.rollout.engine_process.messages import CloseEngine, encode
from moerl.rollout.sglang import server as sglang
from moerl.rollout.sglang.install import site_packages
from moerl.scorers.model import ModelScorer
from moerl.tasks.rewards.child import RewardChild
from moerl.tasks.rewards.code import run_program
from moerl.tasks.rewards.worker import DUMP_SIGNAL
from moerl.telemetry.terminal import ShownLines

# --- where children are started -------------------------------------------------------------------------------------

BY_OTHER_MEANS = {
    "processes/host.py": "the one place",
    "processes/guard.py": "the fork of a guard, which is spared, before it becomes its command",
    "ranks/on_ray/cluster.py": "a cluster of the run's own, within `sparing`",
    "ranks/on_ray/nodes.py": "a look at a cluster that is there",
    "tasks/rewards/sandbox/start.py": "the fork of a sandbox, which is spared, before it becomes the program",
}
"""Files that start processes by other means, and why they may."""

STARTS = {
    *(f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output", "getoutput")),
    *("subprocess.getstatusoutput", "multiprocessing.pool.Pool", "multiprocessing.Manager"),
    *(f"os.{name}" for name in ("fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp", "spawnv")),
    *(f"os.{name}" for name in ("execv", "execve", "execvp", "execvpe", "execl", "execlp")),
    *("multiprocessing.Process", "multiprocessing.Pool", "multiprocessing.get_context", "pty.spawn"),
    *("concurrent.futures.ProcessPoolExecutor", "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    *(
        "ray.init",
        "moerl.ranks.on_ray.library.ray.init",
        "torch.multiprocessing.spawn",
        "torch.multiprocessing.Process",
        "torch.multiprocessing.get_context",
    ),
}


def test_one_module_starts_processes_but_for_forks_of_sandbox_and_guard_and_the_processes_of_ray() -> None:
    assert places_of(STARTS) == BY_OTHER_MEANS.keys()


@pytest.mark.parametrize(
    "program",
    [
        "import subprocess\nsubprocess.run([])",
        "import subprocess as s\ns.Popen([])",
        "from subprocess import Popen as p\np([])",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "from os import fork\nfork()",
    ],
)
def test_a_start_is_found_however_it_is_written(program: str) -> None:
    assert used_names(ast.parse(program)) & STARTS


def test_a_signal_that_ends_the_start_of_a_child_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Told(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            # To this thread: others may be there, which do not block it.
            signal.raise_signal(signal.SIGTERM)

    def stop(number: int, frame: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(subprocess, "Popen", Told)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(InterruptedError):
            start_spared(["sleep", "600"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [child.returncode for child in started] == [-signal.SIGKILL]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


# --- each kind of child ---------------------------------------------------------------------------------------------

KINDS: dict[str, str | tuple[str, ...]] = {
    "processes/child.py": (
        "test_a_process_of_chat_templates_is_spared",
        *("test_a_rank_is_spared", "test_an_engine_of_its_own_is_spared", "test_a_tracker_is_spared"),
        "test_a_model_that_scores_is_spared",
    ),
    "launch/checks/containers.py": "test_a_command_is_spared",
    "launch/checks/gpus.py": "test_a_command_is_spared",
    "launch/doctor/accelerators.py": "test_a_command_is_spared",
    "launch/slurm/submit.py": "test_a_command_is_spared",
    "launch/sweeps/hosts.py": "test_a_run_of_a_sweep_takes_stop_signals_itself",
    "rollout/sglang/install.py": "test_the_question_for_packages_of_an_environment_is_spared",
    "rollout/sglang/server.py": "test_a_server_is_spared_with_its_processes_whatever_handlers_it_sets",
    "tasks/rewards/child.py": "test_a_reward_is_spared_and_what_it_starts_is_not",
    "tasks/rewards/code.py": "test_a_program_that_is_scored_is_spared",
    "tasks/tools/mcp_server.py": "test_a_guarded_command_is_spared",
}
"""Files that start children, and the tests below of the programs that these are."""


def test_every_kind_of_child_has_its_test() -> None:
    starts = ("start_spared", "start_logged", "start_guarded", "run_command")
    assert places_of({f"moerl.processes.host.{name}" for name in starts}) == KINDS.keys()
    # Ray's own processes: `tests/ray/test_clusters.py`.
    assert places_of({"moerl.processes.spared.sparing"}) == {"processes/host.py", "ranks/on_ray/cluster.py"}
    tests = [name for names in KINDS.values() for name in ([names] if isinstance(names, str) else names)]
    assert {*tests} <= globals().keys()
    # Each program of a `Child` is one of these.
    programs = {
        *("orchestration/templates.py", "ranks/away.py", "rollout/engine_process/local.py", "scorers/model.py"),
        "telemetry/trackers/sink.py",
    }
    assert places_of({"moerl.processes.child.module_program"}) == programs


def signals_of(pid: int, field: str) -> set[int]:
    """Numbers in SigIgn (ignored) or SigBlk (blocked) of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")), 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def ignores_all(pid: int) -> bool:
    assert is_alive(pid)
    return signals_of(pid, "SigIgn") >= {*STOP_SIGNALS}


def test_a_rank_is_spared(tmp_path: Path) -> None:
    with signals_to_children():
        child = Child(PROGRAM, tmp_path / "log")
        eventually(lambda: ignores_all(child.pid), 60)
    child.kill()
    child.release()
    assert not (tmp_path / "log").exists()


@pytest.mark.slow
def test_an_engine_of_its_own_is_spared(tmp_path: Path) -> None:
    with signals_to_children():
        process = LocalProcess(tmp_path / "log")
        eventually(lambda: ignores_all(process.pid), 60)
        # It may not have imported torch yet, for which `dismiss` waits a few seconds alone.
        process.send(encode(CloseEngine()))
        eventually(lambda: not is_alive(process.pid), 120)
        dismiss(process)
    assert "it ended with status 0" in process.describe_end()


def test_a_tracker_is_spared(tmp_path: Path) -> None:
    with signals_to_children():
        sink = make_sink(tmp_path)
        sink.open()
        sink.write("rl", 1, {"reward/mean": 0.5})
        sink.close()
    assert told(tmp_path, "finished") == [0]


@pytest.mark.slow
def test_a_model_that_scores_is_spared(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tied=True, seed=0)
    with signals_to_children():
        scorer = ModelScorer(kind="model", path=folder).open("scorers.teacher", tmp_path / "log")
        try:
            scorer.start()
            assert ignores_all(scorer.pid)
        finally:
            scorer.close()


def test_a_process_of_chat_templates_is_spared() -> None:
    request = {
        "template": "{{ messages[0].content }}",
        "values": {},
        "messages": [{"role": "user", "content": "hello"}],
    }
    with signals_to_children(), closing(Templates()) as templates:
        assert templates.variables("{{ a }}") == {"a"}
        assert templates.write({**request, "tools": [], "ask": False, "day": None}) == "hello"


STARTS_ONE = """
import os, subprocess, sys

def score(row, response):
    if row["fork"]:
        pid = os.fork()
        if not pid:
            os.execlp("sleep", "sleep", "600")
    else:
        pid = subprocess.Popen(["sleep", "600"]).pid
    return float(pid)
"""


@pytest.mark.parametrize("fork", [True, False])
def test_a_reward_is_spared_and_what_it_starts_is_not(fork: bool, tmp_path: Path) -> None:
    (tmp_path / "starts_one.py").write_text(STARTS_ONE)
    with signals_to_children():
        child = RewardChild(1 << 32, ShownLines(""), tmp_path)
        hello = {"function": "starts_one:score", "sys_path": [*sys.path, str(tmp_path)]}
        assert child.ask(hello, 60.0) == {"ready": True}
    try:
        reply = child.ask({"rows": [{"fork": fork}], "responses": ["x"]}, 60.0)
        pid = int(reply["results"][0]["rewards"]["reward"])
        eventually(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
        assert not signals_of(pid, "SigIgn") & {*STOP_SIGNALS}
        assert not signals_of(pid, "SigBlk") & {*STOP_SIGNALS}
    finally:
        child.kill()


def test_no_stop_signal_has_a_reward_dump_its_stack() -> None:
    assert DUMP_SIGNAL == HANDED_ON
    assert DUMP_SIGNAL not in STOP_SIGNALS


def test_a_program_that_is_scored_is_spared() -> None:
    with signals_to_children():
        done = run_program("import time\ntime.sleep(1)\nprint('done')", "", 30.0, 1 << 30)
    assert (done.outcome, done.output) == ("passed", "done\n")


def test_a_command_is_spared() -> None:
    with signals_to_children():
        done = run_command([sys.executable, "-c", "import time; time.sleep(1); print('done')"], 30.0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_command_that_takes_too_long_is_killed_with_an_error_that_names_it() -> None:
    with pytest.raises(TimeoutError, match=r"sleep has not ended after 0\.1 s"):
        run_command(["sleep", "600"], 0.1)
    assert not [pid for pid in descendants(os.getpid()) if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]


def test_a_guarded_command_is_spared() -> None:
    told, status = os.pipe()
    with signals_to_children(), open(told, "rb") as said:
        process = start_guarded(["/bin/sleep", "600"], 1 << 30, status, stdin=PIPE)
        os.close(status)
        command = int(said.readline().split()[1])
        eventually(lambda: Path(f"/proc/{command}/comm").read_text() == "sleep\n")
        assert signals_of(command, "SigBlk") >= {*STOP_SIGNALS}
        end_guarded(process, lambda: b"")
    assert not is_alive(command)


def test_a_run_of_a_sweep_takes_stop_signals_itself(tmp_path: Path) -> None:
    host = LocalHost(1, ["sh", "-c", "sleep 600"])
    host.start(SweepJob("one", [], tmp_path / "log"))
    host.stop(signal.SIGTERM)
    found = dict[str, int]()
    eventually(lambda: bool(found.update(host.ended()) or found))
    assert found == {"one": -signal.SIGTERM}
    host.close()


def test_the_question_for_packages_of_an_environment_is_spared(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(1)\nprint('/there')\n")
    python.chmod(0o755)
    with signals_to_children():
        assert site_packages(tmp_path) == Path("/there")


FAKE_SERVER = """
import asyncio, multiprocessing, os, signal, sys, threading, time

def serve():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(3))

async def run():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 4)
    open("ready", "w").close()
    await asyncio.sleep(600)

def work():
    time.sleep(600)

if __name__ == "__main__":
    # Starts multiprocessing's tracker of resources, which unblocks signals.
    multiprocessing.get_context("spawn").Process(target=work, daemon=True).start()
    serve()
    asyncio.run(run())
"""


def test_a_server_is_spared_with_its_processes_whatever_handlers_it_sets(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(FAKE_SERVER)
    command = [sys.executable, "-c", sglang._BOOT, str(os.getpid())]
    with signals_to_children():
        server = start_spared(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
        try:
            eventually(lambda: (tmp_path / "ready").exists() or server.poll() is not None)
            assert server.poll() is None
            scheduler = [*descendants(server.pid)]
            assert len(scheduler) == 2
            eventually(lambda: all(ignores_all(pid) for pid in (server.pid, scheduler[-1])))
        finally:
            end_group(server)
