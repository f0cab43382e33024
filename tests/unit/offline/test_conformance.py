"""`moerl conformance` on the embedded engine: status and output."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest

from moerl.cli import main
from moerl.errors import EngineError
from moerl.offline.conformance import open_subject
from moerl.rollout.conformance.suite import ConformanceOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_model(tmp_path_factory.mktemp("model") / "hf", families.FAMILIES["olmoe"], seed=0)


def test_an_engine_that_conforms_has_status_0(folder: Path, capsys: pytest.CaptureFixture[str], one_thread: None):
    checks = ["--check", "routing-rows", "--check", "retraction", "--check", "reference-logprobs"]
    assert main(["conformance", f"embedded:{folder}", *checks]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"embedded engine, {folder}")
    assert [line.split()[:2] for line in lines[2:5]] == [
        ["routing-rows", "PASS"],
        ["retraction", "CANNOT"],
        ["reference-logprobs", "PASS"],
    ]
    assert lines[-1] == "2 pass, 0 fail, 1 cannot be asked"


def test_an_engine_with_other_weights_than_the_reference_has_status_1(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
):
    other = families.write_model(tmp_path / "other", families.FAMILIES["olmoe"], seed=1)
    status = main(["conformance", f"embedded:{folder}", "--model", str(other), "--check", "reference-routes", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (status, document["conforms"], document["checks"][0]["outcome"]) == (1, False, "fail")
    assert "routes differ" in document["checks"][0]["what"]


def test_a_reference_of_another_architecture_is_a_usage_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = families.write_model(tmp_path / "other", families.FAMILIES["deepseek_v3"], seed=1)
    assert main(["conformance", f"embedded:{folder}", "--model", str(other)]) == 2
    assert "--model: not the model of the engine" in capsys.readouterr().err


def test_a_server_that_cannot_be_reached_is_named():
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        open_subject(ConformanceOptions(url="http://127.0.0.1:9"))
