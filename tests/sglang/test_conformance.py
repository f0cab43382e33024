"""`moerl conformance` on live servers: with our patches, asked as upstream is, and without patches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moerl.cli import main
from moerl.errors import EngineError
from moerl.models.description import read_model
from moerl.offline.conformance import open_subject
from moerl.rollout.conformance.bench import Bench
from moerl.rollout.conformance.dialects import UpstreamDialect
from moerl.rollout.conformance.servers import ServerSubject
from moerl.rollout.conformance.suite import CHECKS, ConformanceOptions, Outcome, run_checks
from moerl.rollout.sglang.server import SGLangServer

pytestmark = pytest.mark.sglang


def outcomes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    status = main(["conformance", *arguments, "--json"])
    document = json.loads(capsys.readouterr().out)
    return status, {check["check"]: check["outcome"] for check in document["checks"]}


def test_a_server_with_a_tight_pool_and_small_prefills_passes_every_check(
    pressed_server: SGLangServer, model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    file = str(pressed_server.folder / "server.json")
    status, found = outcomes([file, "--model", str(model_folder), "--update-weights"], capsys)
    assert found == dict.fromkeys((check.name for check in CHECKS), "pass")
    assert status == 0


def test_a_server_whose_pool_is_large_cannot_be_made_to_retract(
    server: SGLangServer, capsys: pytest.CaptureFixture[str]
):
    file = str(server.folder / "server.json")
    assert outcomes([file, "--check", "retraction", "--check", "answers"], capsys) == (
        0,
        {"answers": "pass", "retraction": "cannot be asked"},
    )


def test_fields_of_upstream_are_judged_as_they_are(server: SGLangServer, model_folder: Path):
    """The same server, asked as if it had no patches: routes are whole, kept sets unsorted."""
    subject, judge = open_subject(ConformanceOptions(server_file=server.folder / "server.json", model=model_folder))
    dialect = UpstreamDialect(subject.facts.spec, read_model(model_folder).num_layers, takes_seeds=True)
    upstream = ServerSubject(server.endpoint, subject.facts, dialect, seconds=120.0, update=None)
    found = {verdict.check: verdict.outcome for verdict in run_checks(Bench(upstream, "upstream", judge))}
    passed = {name for name, outcome in found.items() if outcome == Outcome.PASS}
    assert passed >= {"routing-rows", "routing-experts", "batch", "prefix-cache", "resume", "turns", "top-p", "abort"}
    assert passed >= {"reference-routes", "reference-logprobs"}
    assert (found["kept-order"], found["contract"]) == (Outcome.FAIL, Outcome.FAIL)


def test_a_server_without_patches_fails_with_reasons(
    unpatched_server: SGLangServer, model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    """On a CPU it captures no routes; its draws have no seeds."""
    status, found = outcomes([str(unpatched_server.folder / "server.json")], capsys)
    assert status == 1
    assert (found["answers"], found["top-p"], found["kept-token"]) == ("pass", "pass", "pass")
    assert (found["routing-there"], found["seeds"], found["contract"]) == ("fail", "fail", "fail")
    assert found["routing-rows"] == found["reference-routes"] == "cannot be asked"


def test_a_wrong_key_is_said(server: SGLangServer):
    with pytest.raises(EngineError, match="does not know our key"):
        open_subject(ConformanceOptions(url=server.endpoint.url))
