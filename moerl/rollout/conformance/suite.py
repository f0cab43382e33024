"""All checks of the data contract, and what comes of them, as lines for people and as JSON for scripts.

Torch-free; any process.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from moerl.errors import MoerlError
from moerl.printable import printable
from moerl.rollout.conformance import answer_checks as answers
from moerl.rollout.conformance import sampling_checks as sampling
from moerl.rollout.conformance import sequence_checks as sequences
from moerl.rollout.conformance.bench import Bench
from moerl.rollout.conformance.subject import CannotAskError

SCHEMA = "moerl-conformance-1"

_NAME, _OUTCOME = 20, 17
"""Widths of columns."""


class Outcome(StrEnum):
    """Outcome of one check."""

    PASS = "pass"
    FAIL = "fail"
    CANNOT_ASK = "cannot be asked"


@dataclass(frozen=True, slots=True)
class ConformanceCheck:
    """A question about the data contract, and the function that asks an engine."""

    name: str
    """Stable name, for scripts."""
    asks: str
    """Question for people, one sentence."""
    run: Callable[[Bench], str]
    """Returns what it saw; raises `FailedCheckError` or `CannotAskError`."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check."""

    check: str
    """`ConformanceCheck.name`."""
    asks: str
    """`ConformanceCheck.asks`."""
    outcome: Outcome
    """Passed, failed or cannot be asked."""
    what: str
    """Text on what the check saw, or why it failed or could not ask."""
    seen: str = ""
    """Text on what was seen; empty unless the check failed."""
    expected: str = ""
    """Text on what was expected; empty unless the check failed."""


_CHECKS: tuple[tuple[str, str, Callable[[Bench], str]], ...] = (
    ("answers", "Is each request answered with as many tokens as asked for?", answers.answers_come),
    ("stop-ids", "Does a stop id end an answer, and stay in it?", answers.stop_ids_end),
    ("seeds", "Do equal seeds give equal tokens, whatever else runs?", sampling.seeds_reproduce),
    ("routing-there", "Are there routes?", answers.routes_are_there),
    ("routing-rows", "Has every input token one row, prompts too, and the last token none?", answers.routes_have_rows),
    ("routing-shape", "Are routes [S-1, MoE layers, experts per token]?", answers.routes_have_shape),
    ("routing-experts", "Are expert ids in range, and distinct in a row?", answers.routes_have_experts),
    ("batch", "Are routes the same alone and in a mixed batch?", sequences.batches_change_nothing),
    ("prefix-cache", "Do hits of a prefix cache bring whole and equal routes?", sequences.prefix_hits_change_nothing),
    (
        "long-prompts",
        "Are routes of long prompts, prefilled in pieces, whole and right?",
        sequences.long_prompts_are_whole,
    ),
    (
        "retraction",
        "Does a request that is retracted and computed again keep its routes?",
        sequences.retractions_change_nothing,
    ),
    ("abort", "Does an aborted request keep what it has, aligned?", sequences.aborts_keep_what_there_is),
    ("resume", "Does an answer go on behind a prefix, routes aligned?", sequences.resumed_answers_go_on),
    ("turns", "Do several turns have each row once?", sequences.turns_have_each_row_once),
    (
        "weight-update",
        "Has each token the version and the routes of the weights that sampled it?",
        sequences.updates_keep_versions_and_routes,
    ),
    ("kept-there", "Has every cut token a kept set, and no other?", answers.kept_sets_are_there),
    ("kept-token", "Is the sampled token in its kept set?", answers.kept_sets_hold_the_token),
    ("kept-order", "Are kept ids in range and strictly ascending?", answers.kept_sets_are_ordered),
    ("kept-size", "Are kept sets no larger than top-k, greedy ones single?", answers.kept_sets_are_bounded),
    ("logprobs", "Are log-probs at most 0, and 0 in a kept set of one?", answers.logprobs_are_negative),
    ("temperature", "Are logits divided by the temperature?", sampling.temperature_is_honoured),
    ("top-k", "Is top-k honoured, and renormalised?", sampling.top_k_is_honoured),
    ("top-p", "Is top-p honoured, and renormalised?", sampling.top_p_is_honoured),
    ("min-p", "Is min-p honoured, and renormalised?", sampling.min_p_is_honoured),
    ("greedy", "Does temperature 0 take the most likely token?", sampling.greedy_is_greedy),
    ("contract", "Does the trainer's contract accept the answers?", answers.contract_accepts),
    ("reference-routes", "Are routes those of transformers?", sequences.routes_are_those_of_the_reference),
    (
        "reference-logprobs",
        "Are log-probs those of transformers, with the recorded experts and kept sets?",
        sequences.logprobs_are_those_of_the_reference,
    ),
)
CHECKS = tuple(ConformanceCheck(name, asks, run) for name, asks, run in _CHECKS)
"""Checks of the suite, in its order."""


def run_checks(bench: Bench, checks: Sequence[ConformanceCheck] = CHECKS) -> Iterator[CheckResult]:
    """Runs checks one after the other; yields as each is done."""
    for check in checks:
        try:
            result = CheckResult(check.name, check.asks, Outcome.PASS, check.run(bench))
        except CannotAskError as error:
            result = CheckResult(check.name, check.asks, Outcome.CANNOT_ASK, str(error))
        except MoerlError as error:  # the check failed, the engine refused, or its answer cannot be read
            seen, expected = error.seen or "", error.expected or ""
            result = CheckResult(check.name, check.asks, Outcome.FAIL, error.what, seen, expected)
        yield result


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
