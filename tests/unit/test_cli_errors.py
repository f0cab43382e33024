"""Errors of the operating system at the edge of the command line: one line, a status, and no error hidden."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moerl import cli
from moerl.errors import EngineError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/one/anything")
SAID = "No space left on device; expected: that it is done; remedy: "


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`moerl train` with what it does, and further options; the exit status."""

    def main(run: Callable[[], None], *options: str) -> int:
        def run_train(*_: Any, **__: Any) -> int:
            run()
            return 0

        fake: Any = types.ModuleType("moerl.orchestration.commands")
        fake.run_train = fake.run_sft = run_train
        monkeypatch.setitem(sys.modules, "moerl.orchestration.commands", fake)
        monkeypatch.setattr("moerl.orchestration.commands", fake, raising=False)
        return cli.main(["train", f"run_dir='{tmp_path}'", *options])

    return main


def fail(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FULL, f"error: the system refused runs/one/anything; seen: {SAID}"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), f"error: the system refused what was asked; seen: {SAID}"),
        (TimeoutError("timed out"), "error: the system refused what was asked; seen: TimeoutError: timed out; "),
    ],
    ids=["of a file", "of none", "of another kind"],
)
def test_an_error_of_the_system_is_one_line_and_status_1(
    error: OSError, said: str, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(fail(error)) == 1
    told = capsys.readouterr().err
    assert told.startswith(said)
    assert told.count("\n") == 1
    assert "--traceback" in told
    with pytest.raises(OSError, match=re.escape(str(error))):
        train(fail(error), "--traceback")


class FullLog(io.StringIO):
    """Standard error in a file on a full disk."""

    def write(self, text: str) -> int:
        raise FULL


def test_an_error_that_cannot_be_printed_has_its_status_all_the_same(
    train: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", FullLog())
    assert train(fail(FULL)) == 1


def test_a_run_directory_that_turns_read_only_hides_neither_the_error_nor_how_the_run_goes_on(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def run() -> None:
        (tmp_path / "checkpoints" / "1-rl-000004").mkdir(parents=True)
        for call in ("unlink", "rmdir"):
            monkeypatch.setattr(Path, call, refuse)
        raise EngineError("the engine stopped", remedy="start again")

    assert train(run) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: the engine stopped; remedy: start again"
    assert second == f"go on from the last checkpoint: moerl train resume={tmp_path}"
