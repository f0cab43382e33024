"""`make setup` in a fresh copy of the checkout, by either installer."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from waiting import eventually, is_alive, status_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a clone would hold."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        target = tmp_path / "moerl" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return tmp_path / "moerl"


def set_up(checkout: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{path}:{environment['PATH']}" if path else environment["PATH"]
    command = ["make", "setup", f"PYTHON={getattr(sys, '_base_executable', sys.executable)}", *arguments]
    # Installers write beside the set-up's own clock, also into the middle of a character.
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, encoding="utf-8", errors="replace"
    )


def uv_folder(tmp_path: Path) -> str:
    """A folder with uv, for PATH."""
    if found := shutil.which("uv"):
        return str(Path(found).parent)
    venv.create(tmp_path / "uv", with_pip=True)
    pip = [str(tmp_path / "uv/bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "uv"], check=True)
    return str(tmp_path / "uv/bin")


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_setup_installs_what_is_locked(checkout: Path, tmp_path: Path, installer: str) -> None:
    done = set_up(checkout, f"INSTALLER={installer}", path=uv_folder(tmp_path) if installer == "uv" else "")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{installer}; about 6 GB" in done.stdout
    python = str(checkout / ".venv/bin/python")
    frozen = [python, "-m", "pip", "--disable-pip-version-check", "freeze", "--all", "--exclude-editable"]
    installed = subprocess.run(frozen, capture_output=True, text=True, check=True).stdout.lower().replace("_", "-")
    for name in ("torch==2.13.0", "megatron-core==0.19.2", "megatron-bridge==0.6.2"):
        assert name in installed.split()
    locked = "".join((checkout / "requirements" / name).read_text() for name in ("build.lock", "run.lock"))
    unlocked = [line for line in installed.split() if not line.startswith("pip==") and f"{line} " not in locked]
    assert unlocked == []
    shutil.rmtree(checkout / ".venv")


@pytest.mark.slow
def test_setup_refuses_a_download_whose_hash_is_another(checkout: Path) -> None:
    lock = checkout / "requirements/build.lock"
    lock.write_text(re.sub(r"sha256:[0-9a-f]{16}", "sha256:" + "0" * 16, lock.read_text()))
    done = set_up(checkout, "INSTALLER=pip")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (checkout / ".venv/.ready").exists()


PIP = """#!/bin/sh
case "$*" in
*-r*{name}.lock*) {does} ;;
*version_info*) ;;
*) yes of another | head -n 100 ;;
esac
"""


def stand_in(checkout: Path, name: str, does: str) -> None:
    """Makes an interpreter whose pip does this with a lock of this name."""
    python = checkout / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    (checkout / ".venv/lib/python3.12/site-packages").mkdir(parents=True)
    python.write_text(PIP.format(name=name, does=does))
    python.chmod(0o755)


@pytest.mark.parametrize("half", ["torch", "others"])
def test_the_last_that_setup_tells_of_packages_is_the_half_that_failed(checkout: Path, half: str) -> None:
    stand_in(checkout, half, "echo of the half that fails; exit 1")
    done = set_up(checkout, "INSTALLER=pip")
    assert done.returncode != 0
    *_, told, error = (line for line in done.stderr.splitlines() if not line.startswith("make"))
    assert told == "of the half that fails"
    assert error.startswith("error: all packages could not be installed; ")
    assert not (checkout / ".venv/.ready").exists()
    halves = "".join((checkout / ".venv" / f"{name}.lock").read_text() for name in ("torch", "others"))
    assert sorted(halves.splitlines()) == sorted((checkout / "requirements/run.lock").read_text().splitlines())


# Ctrl-C reaches the script and make; a SIGTERM may reach make alone, which sends it on.
@pytest.mark.parametrize(
    ("command", "name", "status"),
    [
        ("bash scripts/setup.sh", "SIGINT", 130),
        ("bash scripts/setup.sh", "SIGTERM", 143),
        ("bash scripts/setup.sh", "SIGHUP", 143),
        ("make setup", "SIGTERM", -signal.SIGTERM),
    ],
)
def test_what_setup_started_ends_with_it(checkout: Path, tmp_path: Path, command: str, name: str, status: int) -> None:
    pids = tmp_path / "pids"
    stand_in(checkout, "[to][ot][rh]*", f"echo $$ >> {pids}; exec sleep 600")
    started = ["env", "--default-signal=INT", "INSTALLER=pip", *command.split()]
    process = subprocess.Popen(started, cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        process.send_signal(signal.Signals[name])
        assert status_of(process, 30.0) == status
        eventually(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))
    finally:
        process.kill()
        process.wait()
        for pid in pids.read_text().split() if pids.exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def test_setup_says_before_any_download_that_the_disk_is_too_full(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    full = tmp_path / "bin" / "df"
    full.write_text("#!/bin/sh\necho Filesystem 1024-blocks Used Available\necho /dev/full 99000000 94500000 4500000\n")
    full.chmod(0o755)
    done = set_up(checkout, "INSTALLER=pip", path=str(tmp_path / "bin"))
    assert done.returncode != 0
    assert f"error: 4 GB are free in {checkout}, and about 6 are needed" in done.stderr
    assert not (checkout / ".venv").exists()
