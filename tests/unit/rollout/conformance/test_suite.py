"""Reports of the checks, for people and scripts."""

from __future__ import annotations

import json

from moerl.rollout.conformance.suite import CHECKS, CheckResult, Outcome, as_json, conforms, counts, verdict_lines

PASS = CheckResult("answers", "Are there answers?", Outcome.PASS, "12 answers")
LACKS = CheckResult("batch", "Are routes the same?", Outcome.CANNOT_ASK, "the engine returns no routes")
FAIL = CheckResult("routing-rows", "Has every token a row?", Outcome.FAIL, "rows\x1b[2J", "3", "4")


def test_names_of_checks_are_unique_and_their_questions_end_as_such():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.asks.endswith("?") for check in CHECKS)


def test_a_failed_check_says_what_was_asked_seen_and_expected():
    head, asks, seen, expected = verdict_lines(FAIL)
    assert head.startswith("routing-rows        FAIL             rows")
    assert "\x1b" not in head
    assert [line.split() for line in (seen, expected)] == [["seen:", "3"], ["expected:", "4"]]
    assert asks.endswith("Has every token a row?")
    assert len(verdict_lines(PASS)) == len(verdict_lines(LACKS)) == 1


def test_an_engine_conforms_where_nothing_failed():
    assert conforms([PASS, LACKS])
    assert not conforms([PASS, FAIL])
    assert counts([PASS, LACKS, FAIL]) == "1 pass, 1 fail, 1 cannot be asked"


def test_the_json_document_holds_every_verdict():
    document = json.loads(as_json("an engine", [PASS, FAIL]))
    assert (document["schema"], document["engine"], document["conforms"]) == ("moerl-conformance-1", "an engine", False)
    assert [check["outcome"] for check in document["checks"]] == ["pass", "fail"]
