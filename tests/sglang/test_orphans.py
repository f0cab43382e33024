"""Nothing of a server outlives it, however early it is killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from waiting import eventually, is_alive

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
