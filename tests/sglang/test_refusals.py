"""Servers and installations that are not ours: what the user is told."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_live
from sglang_installations import copy_of, rename_release, take_patches_out

from moerl.cli import main
from moerl.errors import EngineError
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.sglang import server as server_module
from moerl.rollout.sglang.launchers import OwnServer
from moerl.rollout.sglang.server import ServerOptions, SGLangServer, launch_options

pytestmark = pytest.mark.sglang

OTHER_RELEASE = "0.5.23"


@pytest.fixture(scope="module")
def unpatched(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release as it was published."""
    made = copy_of(environment, tmp_path_factory.mktemp("unpatched") / "env")
    take_patches_out(made)
    return made


@pytest.fixture(scope="module")
def other_release(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = copy_of(environment, tmp_path_factory.mktemp("release") / "env")
    rename_release(made, OTHER_RELEASE)
    return made


@pytest.fixture(scope="module")
def unpatched_server(
    unpatched: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    """Started by somebody who does not check it."""

    def upstream_options(options: ServerOptions, port: int) -> dict[str, object]:
        known = launch_options(options, port)
        # Without the first patch a CPU server that captures routes does not start.
        del known["enable-return-routed-experts"]
        return known

    options = ServerOptions(model_folder, unpatched, device="cpu", dtype="float32", max_pool_tokens=1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "verify_patches", lambda *arguments: None)
        patch.setattr(server_module, "launch_options", upstream_options)
        with sglang_live.running(options, tmp_path_factory.mktemp("unpatched-server")) as started:
            patch.undo()
            yield started


def refusal_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that fails writes."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert main(arguments) != 0
    finally:
        # `serve` takes them, as it would until it ends.
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return capsys.readouterr().err


def test_the_client_refuses_a_running_server_without_patches(unpatched_server: SGLangServer, model: ModelFacts):
    with pytest.raises(EngineError, match=r"no contract in its internal state.*a patched server") as refusal:
        sglang_live.connect(unpatched_server.endpoint, model=model)
    assert "moerl sglang install" in str(refusal.value)


def test_moerl_sglang_check_refuses_a_running_server_without_patches(
    unpatched_server: SGLangServer, environment: Path, capsys
):
    file = unpatched_server.folder / "server.json"
    said = refusal_of(["sglang", "check", "--env", str(environment), "--server", str(file)], capsys)
    assert "no contract in its internal state" in said


def test_an_installation_without_patches_is_refused_and_never_started(
    unpatched: Path, model_folder: Path, tmp_path: Path, capsys
):
    for arguments in (
        ["sglang", "check", "--env", str(unpatched)],
        ["serve", "--env", str(unpatched), "--model", str(model_folder), "--folder", str(tmp_path), "--device", "cpu"],
    ):
        assert "not patched" in refusal_of(arguments, capsys)
    with pytest.raises(EngineError, match="not patched"):
        OwnServer(ServerOptions(model_folder, unpatched, device="cpu"), tmp_path, 10.0).open()
    assert list(tmp_path.iterdir()) == []


def test_an_installation_of_another_release_is_refused_by_name(
    other_release: Path, model_folder: Path, tmp_path: Path, capsys
):
    env = ["--env", str(other_release)]
    for arguments in (
        ["sglang", "check", *env],
        ["serve", *env, "--model", str(model_folder), "--folder", str(tmp_path), "--device", "cpu"],
    ):
        said = refusal_of(arguments, capsys)
        assert OTHER_RELEASE in said
        assert "0.5.21, which the patches were made for" in said
    with pytest.raises(EngineError, match=r"0\.5\.23"):
        OwnServer(ServerOptions(model_folder, other_release, device="cpu"), tmp_path, 10.0).open()
    assert list(tmp_path.iterdir()) == []
