"""Text of servers and files reaches nobody's terminal with what a terminal obeys."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
from rich.console import Console

from moerl import cli
from moerl.errors import ContractError, EngineError
from moerl.printable import printable
from moerl.telemetry.progress import HeartbeatProgress, LiveProgress

HOSTILE = "\x1b[2J\x1b]0;owned\x07\rall is well\x9b1A\u202e\u2028\x00\x7f"


def is_clean(text: str) -> bool:
    return all(character in "\n\t" or character.isprintable() for character in text)


def test_control_characters_become_visible_and_text_stays_as_it_is():
    assert printable("\x1b[31mred\r") == "\\x1b[31mred\\r"
    assert is_clean(printable(HOSTILE))
    assert printable("\ud800") == "\\ud800"
    for text in ("two\nlines\tand a tab", "déjà vu 数学 🙂", r"a \x1b that was visible before"):
        assert printable(text) == text


def test_errors_are_clean_from_the_beginning():
    error = EngineError(f"server {HOSTILE}", seen=HOSTILE, expected=HOSTILE, remedy=HOSTILE)
    error.add_note(f"last lines of its log:\n{HOSTILE}")
    for made in (error, ContractError("wrong_type", field=HOSTILE, seen=HOSTILE), copy.copy(error)):
        assert is_clean(str(made))
        assert is_clean(repr(made))
    assert is_clean(error.__notes__[0])


def test_an_error_of_a_command_is_printed_clean(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(arguments: list[str]) -> int:
        error = KeyboardInterrupt()
        error.add_note(HOSTILE)
        raise error

    monkeypatch.setattr(cli, "_dispatch", interrupted)
    assert cli.main([]) == 130
    said = capsys.readouterr().err
    assert "owned" in said
    assert is_clean(said)


@pytest.mark.parametrize("where", ["main thread", "thread"])
def test_tracebacks_are_printed_clean_causes_included(where: str):
    program = """
import sys, threading
from moerl import cli
def fail(*arguments):
    try:
        raise ValueError("\\x1b[2Jowned")
    except ValueError as error:
        raise RuntimeError("could not") from error
if sys.argv[1] == "thread":
    cli.main(["--version"])
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
else:
    cli._dispatch = fail
    cli.main([])
"""
    done = subprocess.run([sys.executable, "-c", program, where], capture_output=True, text=True, check=False)
    assert "RuntimeError: could not" in done.stderr
    assert "ValueError: \\x1b[2Jowned" in done.stderr
    assert is_clean(done.stderr)


@pytest.mark.parametrize("display", [HeartbeatProgress, LiveProgress])
def test_lines_of_a_run_are_printed_clean(display: type[HeartbeatProgress | LiveProgress]):
    output = io.StringIO()
    display(Console(file=output, width=200)).note(f"WARNING: {HOSTILE}")
    assert "owned" in output.getvalue()
    assert is_clean(output.getvalue())
