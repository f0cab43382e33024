from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moerl.machine.interfaces import LOOPBACK
from moerl.machine.server_environment import server_environment


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_our_own_python_does_not_leak_into_the_servers(device: str):
    ours = {"PYTHONPATH": "x", "PYTHONHOME": "y", "VIRTUAL_ENV": "z", "PATH": "/bin", "HF_HOME": "/cache"}
    made = server_environment(device, 1, ours)
    assert not {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} & set(made)
    assert (made["PATH"], made["HF_HOME"]) == ("/bin", "/cache")


def test_on_cpu_every_rank_has_one_core_of_its_own_while_there_are_enough():
    bound = {n: server_environment("cpu", n, {}, (2, 5, 7))["SGLANG_CPU_OMP_THREADS_BIND"] for n in (1, 2, 4)}
    assert bound == {1: "7", 2: "7|5", 4: "7|5|2|7"}


def test_on_gpus_threads_are_left_alone():
    assert server_environment("cuda", 2, {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"
    assert "OMP_NUM_THREADS" not in server_environment("cuda", 2, {})


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_process_groups_of_a_server_listen_where_it_does(device: str):
    assert server_environment(device, 1, {}, host="127.0.0.1")["GLOO_SOCKET_IFNAME"] == LOOPBACK
    assert server_environment(device, 1, {"GLOO_SOCKET_IFNAME": "eth7"})["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize("start", [["-c", "import json"], ["-m", "json.tool", os.devnull]])
def test_nothing_of_the_current_directory_is_imported_by_a_server_or_what_it_starts(start: list[str], tmp_path: Path):
    (tmp_path / "json.py").write_text("raise SystemExit('json of the current directory')")
    environment = server_environment("cpu", 1)
    done = subprocess.run([sys.executable, *start], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "current directory" not in done.stderr


def test_a_server_on_cpu_opens_no_nccl():
    assert not Path(server_environment("cpu", 2, {})["SGLANG_NCCL_SO_PATH"]).exists()
    assert "SGLANG_NCCL_SO_PATH" not in server_environment("cuda", 2, {})
