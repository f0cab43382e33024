"""Servers and installations that are not ours: what the user is told."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import sglang_live
from sglang_installations import copy_of, rename_release

from moerl.cli import main
from moerl.errors import EngineError
from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.sglang.launchers import OwnServer
from moerl.rollout.sglang.server import ServerOptions, SGLangServer

pytestmark = pytest.mark.sglang

OTHER_RELEASE = "0.5.22"


@pytest.fixture(scope="module")
def other_release(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = copy_of(environment, tmp_path_factory.mktemp("release") / "env")
    rename_release(made, OTHER_RELEASE)
    return made


def refusal_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command that fails; returns what it writes to stderr."""
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
        assert "0.5.21 or 0.5.23, which there are patches for" in said
    with pytest.raises(EngineError, match=r"0\.5\.22"):
        OwnServer(ServerOptions(model_folder, other_release, device="cpu"), tmp_path, 10.0).open()
    assert list(tmp_path.iterdir()) == []
