"""The command line of `moerl conformance`."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl import cli
from moerl.launch.conformance import checks_of, parser, target_of
from moerl.rollout.conformance.subject import EngineUnderTest
from moerl.rollout.conformance.suite import CHECKS


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_an_engine_is_an_address_a_server_file_or_a_model_directory(model: Path):
    server = model / "server.json"
    server.write_text("{}")
    url, file, embedded = (
        target_of(parser().parse_args([engine]))
        for engine in ("http://127.0.0.1:30000/", str(server), f"embedded:{model}")
    )
    assert (url.url, url.server_file, url.embedded) == ("http://127.0.0.1:30000", None, None)
    assert (file.url, file.server_file, file.embedded) == ("", server, None)
    assert (embedded.url, embedded.server_file, embedded.embedded) == ("", None, model)
    assert checks_of(None) == CHECKS


def test_single_checks_run_in_the_order_of_the_suite():
    options = parser().parse_args(["http://h:1", "--check", "top-k", "--check", "answers", "--json"])
    assert [check.name for check in checks_of(options.check)] == ["answers", "top-k"]
    assert target_of(options) == EngineUnderTest("http://h:1")
    assert options.json


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "required: ENGINE"),
        (["nowhere/server.json"], "http://HOST:PORT, the server.json"),
        (["embedded:nowhere"], "ENGINE: not a Hugging Face model directory"),
        (["http://h:1", "--model", "nowhere"], "--model: not a Hugging Face model directory"),
        (["http://h:1", "--check", "top_k"], "--check: unknown check; seen: top_k; expected: one of answers"),
        (["http://h:1", "--update-weights"], "give it with --model HF_DIR"),
    ],
)
def test_a_wrong_command_line_is_refused_with_what_would_be_right(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["conformance", *arguments]) == 2
    assert part in capsys.readouterr().err


def test_help_names_every_kind_of_engine(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["conformance", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: moerl conformance ENGINE")
    assert all(word in text for word in ("--update-weights", "server.json", "embedded:HF_DIR", "http://"))
