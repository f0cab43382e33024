"""Servers' environment, keys and sockets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import status_of

from moerl.launch.doctor.servers import (
    Listener,
    check_binds,
    check_environment,
    check_server_files,
    check_token_files,
    listening,
    own_listeners,
    program_of,
    server_files,
    token_files,
)
from moerl.rollout.fleet.endpoint import Endpoint, write_endpoint
from moerl.rollout.sglang.patches import DEFAULT_RELEASE, STAMP, read_patches

ENDPOINT = Endpoint("http://127.0.0.1:30000", "a" * 64, "b" * 64)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """One that is finished as far as its marker, its release and its stamp say; nothing of SGLang is in it."""
    made = tmp_path / "env"
    site = made / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for folder in (made / "bin", site / "sglang", site / f"sglang-{DEFAULT_RELEASE}.dist-info"):
        folder.mkdir(parents=True)
    (made / "bin" / "python").symlink_to(sys.executable)
    (made / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n")
    (made / "moerl-sglang.json").write_text(json.dumps({"sglang": DEFAULT_RELEASE, "device": "cpu"}))
    (site / STAMP).write_text(json.dumps({"fingerprint": read_patches().fingerprint}))
    return made


def stamp(environment: Path) -> Path:
    return next(environment.glob(f"lib/*/*/{STAMP}"))


def test_an_environment_that_nobody_needs_may_be_missing(tmp_path: Path) -> None:
    assert check_environment(tmp_path / "none", has_gpus=False).level == "green"


def test_an_environment_without_patches_that_no_run_asks_for_is_a_note(environment: Path) -> None:
    stamp(environment).unlink()
    found = check_environment(environment, has_gpus=False)
    assert found.level == "yellow"
    assert "not patched" in found.seen
    assert found.expected == read_patches().fingerprint


def test_a_missing_patch_is_named(environment: Path) -> None:
    # The stamp says that all patches are there; the files say otherwise.
    found = check_environment(environment, has_gpus=False)
    assert found.level == "yellow"
    assert re.search(r"does not fit|no list of its files|not as released|not there", found.seen), found


def test_server_files_for_their_owner_alone_are_found(tmp_path: Path) -> None:
    write_endpoint(ENDPOINT, tmp_path / "serve" / "server.json")
    write_endpoint(ENDPOINT, tmp_path / "run" / "sglang" / "0" / "server.json")
    files = server_files(tmp_path)
    assert len(files) == 2
    assert check_server_files(files).seen.startswith("2, each with both keys")


def test_a_server_file_that_others_may_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    write_endpoint(ENDPOINT, file)
    file.chmod(0o644)
    found = check_server_files([file])
    assert found.level == "red"
    assert "mode 0644" in found.seen
    assert f"chmod 600 {file}" in found.remedy


def test_a_server_without_a_key_is_named(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    write_endpoint(Endpoint(ENDPOINT.url, "", ENDPOINT.admin_key), file)
    found = check_server_files([file])
    assert (found.level, "a key that cannot be one" in found.seen) == ("red", True)


def test_a_token_file_that_others_may_read_is_named(tmp_path: Path) -> None:
    files = token_files(tmp_path, None)
    assert check_token_files(files).level == "green"
    files[0].parent.mkdir(parents=True)
    files[0].write_text("hf_token")
    files[0].chmod(0o644)
    found = check_token_files(files)
    assert found.level == "red"
    assert f"{files[0]} has mode 0644" in found.seen
    files[0].chmod(0o600)
    assert check_token_files(files).level == "green"


def test_the_token_is_looked_for_where_the_hub_keeps_it(tmp_path: Path) -> None:
    assert token_files(Path("/home/me"), tmp_path)[0] == tmp_path / "token"


LISTEN = """
import os, socket, sys
if sys.argv[2] == "alone":
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
server = socket.create_server((sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


# Tests run side by side, and each sees all processes of the machine.
PLANTED = f"planted-server-{os.getpid()}"
PROGRAMS = re.compile(rf"^({PLANTED})$")


@contextmanager
def listener(host: str, namespace: str) -> Iterator[tuple[int, int]]:
    """Pid and port of a process that listens. namespace: alone = in a network of its own, where nobody can reach it."""
    words = [sys.executable, "-c", LISTEN, host, namespace, PLANTED]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.stdin.close()
            status_of(process, 60.0)


def can_unshare() -> bool:
    code = "import os; os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="sockets of processes are read from /proc")
def test_a_server_on_loopback_is_safe() -> None:
    with listener("127.0.0.1", "shared") as (pid, port):
        found = own_listeners(PROGRAMS)
    assert found == [Listener(pid, PLANTED, "127.0.0.1", port)]
    assert check_binds(found).level == "green"


@pytest.mark.skipif(not can_unshare(), reason="needs a network namespace of its own: no socket may be open to others")
@pytest.mark.parametrize("host", ["0.0.0.0", *(["::"] if Path("/proc/net/if_inet6").exists() else [])])
def test_a_server_on_all_addresses_is_named(host: str) -> None:
    with listener(host, "alone") as (pid, port):
        found = check_binds(own_listeners(PROGRAMS))
        of_a_run = check_binds(own_listeners(PROGRAMS), others_are_used=False)
    assert found.level == "red"
    assert found.seen == f"{PLANTED} (process {pid}) on {host}:{port}"
    assert (of_a_run.level, of_a_run.seen) == ("yellow", found.seen)


def test_sockets_that_do_not_listen_are_left_out() -> None:
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 00000000:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0 100 0\n"
        "   1: 0100007F:7531 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 4243 1 0 100 0\n"
    )
    assert sys.byteorder == "little"
    assert dict(listening(table)) == {"4242": ("0.0.0.0", 30000)}


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("/usr/bin/python -m moerl train", "moerl"),
        ("srun --overlap python -m moerl doctor", None),
        ("/opt/venv/bin/moerl", "moerl"),
        ("moerl.cli", "moerl"),
        ("sglang.launch_server", "sglang"),
        ("sglang::scheduler_TP0", "sglang"),
        ("/x/site-packages/ray/core/src/ray/raylet/raylet", "ray"),
        ("/usr/bin/raylet", "raylet"),
        ("ray::Worker", "ray"),
        ("/home/me/moerl/notes.txt", None),
        ("library/array/x", None),
    ],
)
def test_programs_are_told_by_their_command_lines(line: str, program: str | None) -> None:
    assert program_of(line.split()) == program
