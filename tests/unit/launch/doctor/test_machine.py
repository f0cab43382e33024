"""Ports, room, locks and speed, with faults that are real: a taken port, a full disk, a limit."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import run_within

from moerl.launch.doctor.machine import (
    GIB,
    MIB,
    check_disk,
    check_locks,
    check_loopback,
    check_port,
    check_port_range,
    judge_rate,
    machine_checks,
    port_range,
    room_for_checkpoints,
)


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(mount, capture_output=True).returncode == 0


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process may be larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_this_machine_has_no_fault_and_nothing_is_left_behind(tmp_path: Path) -> None:
    found, rate = machine_checks(tmp_path / "runs" / "one", [], has_run=False)
    assert rate is not None
    assert rate > 0
    assert [check for check in found if check.level == "red"] == []
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = check_port(port)
    assert (found.level, found.name) == ("red", f"port {port}")
    assert f"127.0.0.1:{port}" in found.seen
    assert check_port(port).level == "green"


def test_few_ports_to_give_out_are_a_note() -> None:
    assert check_port_range("40000\t40100\n").level == "yellow"
    assert check_port_range(port_range()).level == "green"


def test_checkpoints_that_new_ones_replace_count_as_room(tmp_path: Path) -> None:
    old = tmp_path / "run" / "checkpoints" / "rl-000001" / "rank-0.bin"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(3 << 20))
    others = shutil.disk_usage(tmp_path).free
    assert room_for_checkpoints(tmp_path / "run") - others == pytest.approx(3 << 20, abs=1 << 20)
    assert room_for_checkpoints(tmp_path / "none") == pytest.approx(others, abs=64 << 20)


ON_A_SMALL_DISK = """
import dataclasses, json, sys
from pathlib import Path
from moerl.launch.doctor.machine import check_disk, check_room
disk = Path(sys.argv[1])
found = [check_room(disk), check_disk(disk)[0]]
print(json.dumps([dataclasses.asdict(each) for each in found]))
assert list(disk.iterdir()) == []
"""


@pytest.mark.skipif(not can_mount(), reason="needs a file system of its own: Linux with user namespaces")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=8m none "$1" && exec "$2" -W ignore -c "$3" "$1"'
    words = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, ON_A_SMALL_DISK]
    done = run_within(words, 120)
    assert done.returncode == 0, done.stderr
    room, disk = json.loads(done.stdout)
    assert (room["level"], disk["level"]) == ("red", "red")
    assert room["seen"].startswith("0.0 GiB free of 0.0")
    assert "No space left on device" in disk["seen"]


def test_a_limit_on_files_is_named(tmp_path: Path) -> None:
    with file_limit(MIB):
        found, rate = check_disk(tmp_path, 4 * MIB)
    assert rate is None
    assert found.level == "red"
    assert "File too large" in found.seen
    assert "ulimit -f" in found.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    there = tmp_path / "file"
    there.write_text("")
    found = [check_locks(there), check_disk(there)[0]]
    assert [check.level for check in found] == ["red", "red"]
    assert "Not a directory" in found[0].seen


def test_locks_work_here(tmp_path: Path) -> None:
    assert check_locks(tmp_path).level == "green"


def test_bytes_arrive_over_loopback() -> None:
    assert check_loopback(4 * MIB).level != "red"


def test_a_slow_link_is_a_note_and_no_fault() -> None:
    slow = judge_rate("disk", 1e6, 50e6, "move")
    assert dataclasses.astuple(slow)[2:] == ("yellow", "1 MB/s", "50 MB/s", "move")
    assert judge_rate("disk", float(GIB), 50e6, "move").level == "green"
