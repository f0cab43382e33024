"""Errors of a run, as the command line shows them, and how the run goes on."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moerl import cli
from moerl.config.load import load_config
from moerl.config.schema import RunConfig
from moerl.errors import EngineError
from moerl.launch.going_on import can_go_on


def test_a_run_that_fails_has_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, handed_over: list[object]
):
    def fail(config: RunConfig, **settings: object) -> int:
        raise EngineError("the engine stopped", remedy="start again")

    monkeypatch.setattr(sys.modules["moerl.orchestration.commands"], "run_train", fail)
    assert cli.main(["train", f"run_dir='{tmp_path}'"]) == 1
    assert capsys.readouterr().err == "error: the engine stopped; remedy: start again\n"


def test_the_error_is_the_last_line_of_a_log_of_both_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handed_over: list[object]
):
    def fail(config: RunConfig, **settings: object) -> int:
        print("what a library says")
        raise EngineError("the engine stopped")

    monkeypatch.setattr(sys.modules["moerl.orchestration.commands"], "run_train", fail)
    log = tmp_path / "run.out"
    with log.open("a") as buffered, log.open("a", buffering=1) as errors:
        monkeypatch.setattr(sys, "stdout", buffered)
        monkeypatch.setattr(sys, "stderr", errors)
        assert cli.main(["train", f"run_dir='{tmp_path / 'run'}'"]) == 1
    assert log.read_text().endswith("what a library says\nerror: the engine stopped\n")


def test_an_error_is_told_if_stdout_is_closed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["status", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: status: this is no run directory; seen: /nowhere")


def test_the_time_of_a_run_counts_from_the_begin_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handed_over: list[object]
):
    loaded: list[float] = []

    def load(*overrides: Any, **settings: Any) -> RunConfig:
        loaded.append(time.monotonic())
        return load_config(*overrides, **settings)

    monkeypatch.setattr("moerl.config.load.load_config", load)
    begins: list[float] = []
    monkeypatch.setattr(
        sys.modules["moerl.orchestration.commands"],
        "run_train",
        lambda config, *, started, **settings: begins.append(started) or 0,
    )
    before = time.monotonic()
    assert cli.main(["train", f"run_dir='{tmp_path}'"]) == 0
    assert before <= begins[0] <= loaded[0]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/one/anything")
SAID = "No space left on device; expected: that it is done; remedy: "


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FULL, f"error: the system refused runs/one/anything; seen: {SAID}"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), f"error: the system refused what was asked; seen: {SAID}"),
        (
            TimeoutError("timed out"),
            "error: the system refused what was asked; seen: TimeoutError: timed out; expected: ",
        ),
    ],
)
def test_an_error_of_the_system_is_one_line_and_status_1(
    error: OSError,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    handed_over: list[object],
):
    def fail(config: RunConfig, **settings: object) -> int:
        raise error

    monkeypatch.setattr(sys.modules["moerl.orchestration.commands"], "run_train", fail)
    assert cli.main(["train", f"run_dir='{tmp_path}'"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(said)
    assert told.count("\n") == 1
    assert "--traceback" in told
    with pytest.raises(OSError, match=re.escape(str(error))):
        cli.main(["train", f"run_dir='{tmp_path}'", "--traceback"])


class Full(io.StringIO):
    """A log on a full disk."""

    def write(self, text: str) -> int:
        raise FULL


def test_an_error_that_cannot_be_printed_has_its_status_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handed_over: list[object]
):
    def fail(config: RunConfig, **settings: object) -> int:
        raise FULL

    monkeypatch.setattr(sys.modules["moerl.orchestration.commands"], "run_train", fail)
    monkeypatch.setattr(sys, "stderr", Full())
    assert cli.main(["train", f"run_dir='{tmp_path}'"]) == 1


def test_a_run_directory_that_turns_read_only_hides_neither_the_error_nor_how_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, handed_over: list[object]
):
    def fail(config: RunConfig, **settings: object) -> int:
        (tmp_path / "checkpoints" / "1-rl-000004").mkdir(parents=True)
        for call in ("unlink", "rmdir"):
            monkeypatch.setattr(Path, call, refuse)
        raise EngineError("the engine stopped", remedy="start again")

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(sys.modules["moerl.orchestration.commands"], "run_train", fail)
    assert cli.main(["train", f"run_dir='{tmp_path}'"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: the engine stopped; remedy: start again"
    assert second == f"go on from the last checkpoint: moerl train resume={tmp_path}"


@pytest.mark.parametrize(("name", "is_ours"), [("1-rl-000004", True), ("best", False), (".1-rl-000004.partial", False)])
def test_only_a_checkpoint_of_our_own_is_gone_on_from(name: str, is_ours: bool, tmp_path: Path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / name).mkdir()
    config = load_config(["recipe=tiny", f"run_dir='{tmp_path / 'run'}'"], command="train")
    assert can_go_on(config.run_dir) == is_ours
