"""Checks of a run's servers at its start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_fake import FakeServer

from moerl.config.load import load_config
from moerl.config.schema import RunConfig
from moerl.errors import EngineError
from moerl.launch.checks.facts import Facts
from moerl.launch.checks.inputs import look_at_environment, look_at_server_files
from moerl.launch.servers import listen_for_servers
from moerl.machine.interfaces import LOOPBACK
from moerl.rollout.fleet.endpoint import Endpoint, write_endpoint
from moerl.rollout.sglang.patches import DEFAULT_RELEASE, STAMP, read_patches


def own(environment: Path) -> RunConfig:
    return load_config(["recipe=tiny", "rollout=sglang", f"rollout.environment='{environment}'"], command="train")


def named(*files: Path) -> RunConfig:
    listed = ",".join(f"'{file}'" for file in files)
    return load_config(["recipe=tiny", "rollout=sglang_server", f"rollout.server=[{listed}]"], command="train")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """One that was finished, as far as its marker, its release and its stamp say; nothing of SGLang is in it."""
    made = tmp_path / "env"
    site = made / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for folder in (made / "bin", site / "sglang", site / f"sglang-{DEFAULT_RELEASE}.dist-info"):
        folder.mkdir(parents=True)
    (made / "bin" / "python").symlink_to(sys.executable)
    (made / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n")
    (made / "moerl-sglang.json").write_text(json.dumps({"sglang": DEFAULT_RELEASE, "device": "cpu"}))
    (site / STAMP).write_text(json.dumps({"fingerprint": read_patches().fingerprint}))
    return made


BROKEN = {
    "nothing": (lambda env: os.rename(env, env.with_name("away")), "not there"),
    "not finished": (lambda env: (env / "moerl-sglang.json").unlink(), "not there"),
    "a marker of something else": (lambda env: (env / "moerl-sglang.json").write_text("[]"), "cannot be read"),
    "a marker that is no text": (lambda env: (env / "moerl-sglang.json").write_bytes(b"\xff\0"), "cannot be read"),
    "no interpreter": (lambda env: (env / "bin" / "python").unlink(), "not there"),
    "an interpreter that does not run": (lambda env: broken_interpreter(env), "find its packages"),
    "another release": (lambda env: rename(env, "sglang-0.5.22.dist-info"), r"0\.5\.22"),
    "no release": (lambda env: rename(env, "away"), "not installed"),
    "no stamp": (lambda env: next(env.glob(f"lib/*/*/{STAMP}")).unlink(), "not patched"),
    "a stamp of something else": (lambda env: next(env.glob(f"lib/*/*/{STAMP}")).write_text("{"), "not patched"),
    "other patches": (
        lambda env: next(env.glob(f"lib/*/*/{STAMP}")).write_text('{"fingerprint": "f"}'),
        "other patches",
    ),
    "files that are missing": (lambda env: None, "does not fit"),
}


def broken_interpreter(environment: Path) -> None:
    python = environment / "bin" / "python"
    python.unlink()
    python.write_text("no program")


def rename(environment: Path, name: str) -> None:
    (info,) = environment.glob("lib/*/*/sglang-*.dist-info")
    info.rename(info.with_name(name))


@pytest.mark.parametrize("kind", BROKEN)
def test_an_environment_that_no_server_can_be_started_from_is_refused_by_name(kind: str, environment: Path):
    damage, said = BROKEN[kind]
    damage(environment)
    with pytest.raises(EngineError, match=said) as refusal:
        look_at_environment(Facts("train", own(environment)))
    assert "moerl sglang install" in str(refusal.value)


def test_every_server_file_is_read(tmp_path: Path):
    write_endpoint(Endpoint("http://127.0.0.1:1", "key", "admin"), tmp_path / "first.json")
    look_at_server_files(Facts("train", named(tmp_path / "first.json")))
    with pytest.raises(EngineError, match=r"second\.json: cannot be read"):
        look_at_server_files(Facts("train", named(tmp_path / "first.json", tmp_path / "second.json")))


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_server_whose_process_has_ended_is_refused_and_one_that_starts_is_waited_for(tmp_path: Path):
    file, url = tmp_path / "server.json", "http://127.0.0.1:1"
    write_endpoint(Endpoint(url, "key", "admin", ended_process()), file)
    with pytest.raises(EngineError, match="has ended"):
        look_at_server_files(Facts("train", named(file)))
    write_endpoint(Endpoint(url, "key", "admin", os.getpid()), file)
    look_at_server_files(Facts("train", named(file)))


def test_a_server_that_answers_is_taken_whatever_its_pid_is_called_here(tmp_path: Path):
    server, file = FakeServer(), tmp_path / "server.json"
    try:
        write_endpoint(Endpoint(server.endpoint.url, "key", "admin", ended_process()), file)
        look_at_server_files(Facts("train", named(file)))
    finally:
        server.close()


def test_process_groups_of_the_run_listen_on_loopback_unless_the_user_chose(tmp_path: Path):
    embedded = load_config(["recipe=tiny"], command="train").rollout
    inherited: dict[str, str] = {}
    listen_for_servers(embedded, inherited)
    assert inherited == {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    chosen = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7"}
    listen_for_servers(embedded, chosen)
    assert set(chosen.values()) == {"eth7"}


def test_process_groups_of_the_run_listen_where_a_server_on_another_machine_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "moerl.launch.servers.own_address", lambda host, port: {("10.1.2.3", 7): "10.0.0.1"}[host, port]
    )
    monkeypatch.setattr("moerl.launch.servers.interface_variables", lambda address, known: {"at": address})
    for name, url in (("here", "http://127.0.0.1:1"), ("there", "http://10.1.2.3:7")):
        write_endpoint(Endpoint(url, "key", "admin"), tmp_path / f"{name}.json")
    inherited: dict[str, str] = {}
    listen_for_servers(named(tmp_path / "here.json", tmp_path / "there.json").rollout, inherited)
    assert inherited == {"at": "10.0.0.1"}
