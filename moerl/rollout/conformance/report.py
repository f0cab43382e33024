"""Results of the checks, as lines for people and as JSON for scripts. Torch-free; any process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from moerl.printable import printable
from moerl.rollout.conformance.suite import CheckResult, Outcome

SCHEMA = "moerl-conformance-1"

_NAME, _OUTCOME = 20, 17
"""Widths of columns."""


def verdict_lines(verdict: CheckResult) -> list[str]:
    """Returns a row of the table; if the check failed, also what was asked, seen and expected, below it."""
    lines = [f"{verdict.check:<{_NAME}}{verdict.outcome.upper():<{_OUTCOME}}{verdict.what}"]
    if verdict.outcome == Outcome.FAIL:
        below = {"asks": verdict.asks, "seen": verdict.seen, "expected": verdict.expected}
        lines += [f"{'':<{_NAME}}{name + ':':<10}{text}" for name, text in below.items() if text]
    return [printable(line) for line in lines]


def counts(verdicts: Sequence[CheckResult]) -> str:
    """Returns the last line: how many checks had each outcome."""
    number = Counter(verdict.outcome for verdict in verdicts)
    return ", ".join(f"{number[outcome]} {outcome}" for outcome in Outcome)


def as_json(engine: str, verdicts: Sequence[CheckResult]) -> str:
    """Returns one document: schema, engine, whether it conforms, and every verdict."""
    document = {
        "schema": SCHEMA,
        "engine": engine,
        "conforms": conforms(verdicts),
        "checks": [asdict(verdict) for verdict in verdicts],
    }
    return json.dumps(document, indent=1)


def conforms(verdicts: Sequence[CheckResult]) -> bool:
    """Returns whether no check failed."""
    return all(verdict.outcome != Outcome.FAIL for verdict in verdicts)
