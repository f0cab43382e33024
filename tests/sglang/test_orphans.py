"""Nothing of a server outlives it, however early it is killed; and nothing ends it but who started it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import sglang_live
from process_tree import family, signals_to_children, tell_all
from waiting import eventually, is_alive

from moerl.processes.spared import STOP_SIGNALS
from moerl.rollout.sglang.server import ServerOptions

pytestmark = pytest.mark.sglang

SERVER = """
import multiprocessing, os, sys, time

def child(folder):
    # The server dies while its child still imports; SGLang's processes ask to die with it only after that.
    open(folder + "/pid", "w").write(str(os.getpid()))
    from sglang.srt.utils.common import kill_itself_when_parent_died
    while os.getppid() == int(open(folder + "/parent").read()):
        time.sleep(0.05)
    kill_itself_when_parent_died()
    open(folder + "/outlived", "w").write("")
    time.sleep(600)

if __name__ == "__main__":
    folder = sys.argv[1]
    open(folder + "/parent", "w").write(str(os.getpid()))
    multiprocessing.get_context("spawn").Process(target=child, args=(folder,)).start()
    while not os.path.exists(folder + "/pid"):
        time.sleep(0.05)
    os.kill(os.getpid(), 9)
"""


def test_a_process_of_a_server_that_died_while_it_started_ends(environment: Path, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    done = subprocess.run([environment / "bin" / "python", script, tmp_path], check=False)
    assert done.returncode == -9
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not is_alive(pid), 240.0)
    assert not (tmp_path / "outlived").exists()


def test_stop_signals_to_all_processes_of_a_server_leave_it_to_the_run(model_folder: Path, tmp_path: Path) -> None:
    options = ServerOptions(
        model=model_folder, environment=sglang_live.ENVIRONMENT, device="cpu", dtype="float32", max_pool_tokens=4096
    )
    with signals_to_children():
        manager = sglang_live.running(options, tmp_path)
        server = manager.__enter__()
    try:
        pids = family(server.endpoint.pid)
        assert len(pids) >= 3
        # By now all handlers that it wants are set.
        tell_all(pids, STOP_SIGNALS)
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
        assert sglang_live.post(server.endpoint, "/generate", body).status_code == 200
        assert all(map(is_alive, pids))
    finally:
        manager.__exit__(None, None, None)
    eventually(lambda: not any(map(is_alive, pids)))
