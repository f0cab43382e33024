"""All checks of the data contract, and what comes of them. Torch-free; any process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from moerl.errors import MoerlError
from moerl.rollout.conformance import answer_checks, reference_checks, sampling_checks, sequence_checks
from moerl.rollout.conformance.bench import Bench, FailedCheckError
from moerl.rollout.conformance.subject import CannotAskError


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


CHECKS = (
    ConformanceCheck(
        "answers", "Is each request answered with as many tokens as asked for?", answer_checks.answers_come
    ),
    ConformanceCheck("stop-ids", "Does a stop id end an answer, and stay in it?", answer_checks.stop_ids_end),
    ConformanceCheck(
        "seeds", "Do equal seeds give equal tokens, whatever runs beside?", sampling_checks.seeds_reproduce
    ),
    ConformanceCheck("routing-there", "Are there routes?", answer_checks.routes_are_there),
    ConformanceCheck(
        "routing-rows",
        "Has every input token one row, prompts too, and the last token none?",
        answer_checks.routes_have_rows,
    ),
    ConformanceCheck(
        "routing-shape", "Are routes [S-1, MoE layers, experts per token]?", answer_checks.routes_have_shape
    ),
    ConformanceCheck(
        "routing-experts", "Are expert ids in range, and distinct in a row?", answer_checks.routes_have_experts
    ),
    ConformanceCheck(
        "batch", "Are routes the same alone and in a mixed batch?", sequence_checks.batches_change_nothing
    ),
    ConformanceCheck(
        "prefix-cache",
        "Do hits of a prefix cache bring whole and equal routes?",
        sequence_checks.prefix_hits_change_nothing,
    ),
    ConformanceCheck(
        "long-prompts",
        "Are routes of long prompts, prefilled in pieces, whole and right?",
        sequence_checks.long_prompts_are_whole,
    ),
    ConformanceCheck(
        "retraction",
        "Does a request that is retracted and computed again keep its routes?",
        sequence_checks.retractions_change_nothing,
    ),
    ConformanceCheck(
        "abort", "Does an aborted request keep what it has, aligned?", sequence_checks.aborts_keep_what_there_is
    ),
    ConformanceCheck(
        "resume", "Does an answer go on behind a prefix, routes aligned?", sequence_checks.resumed_answers_go_on
    ),
    ConformanceCheck("turns", "Do several turns have each row once?", sequence_checks.turns_have_each_row_once),
    ConformanceCheck(
        "weight-update",
        "Has each token the version and the routes of the weights that sampled it?",
        sequence_checks.updates_keep_versions_and_routes,
    ),
    ConformanceCheck("kept-there", "Has every cut token a kept set, and no other?", answer_checks.kept_sets_are_there),
    ConformanceCheck("kept-token", "Is the sampled token in its kept set?", answer_checks.kept_sets_hold_the_token),
    ConformanceCheck(
        "kept-order", "Are kept ids in range and strictly ascending?", answer_checks.kept_sets_are_ordered
    ),
    ConformanceCheck(
        "kept-size", "Are kept sets no larger than top-k, greedy ones single?", answer_checks.kept_sets_are_bounded
    ),
    ConformanceCheck(
        "logprobs", "Are log-probs at most 0, and 0 in a kept set of one?", answer_checks.logprobs_are_negative
    ),
    ConformanceCheck("temperature", "Is temperature applied before the cut?", sampling_checks.temperature_is_honoured),
    ConformanceCheck("top-k", "Is top-k honoured, and renormalised?", sampling_checks.top_k_is_honoured),
    ConformanceCheck("top-p", "Is top-p honoured, and renormalised?", sampling_checks.top_p_is_honoured),
    ConformanceCheck("min-p", "Is min-p honoured, and renormalised?", sampling_checks.min_p_is_honoured),
    ConformanceCheck("greedy", "Does temperature 0 take the most likely token?", sampling_checks.greedy_is_greedy),
    ConformanceCheck("contract", "Does the trainer's contract accept the answers?", answer_checks.contract_accepts),
    ConformanceCheck(
        "reference-routes",
        "Are routes those of transformers?",
        reference_checks.routes_are_those_of_the_reference,
    ),
    ConformanceCheck(
        "reference-logprobs",
        "Are log-probs those of transformers, with the recorded experts and kept sets?",
        reference_checks.logprobs_are_those_of_the_reference,
    ),
)


def run_checks(bench: Bench, checks: Sequence[ConformanceCheck] = CHECKS) -> Iterator[CheckResult]:
    """Runs checks one after the other; yields as each is done."""
    for check in checks:
        yield _run(bench, check)


def _run(bench: Bench, check: ConformanceCheck) -> CheckResult:
    try:
        return CheckResult(check.name, check.asks, Outcome.PASS, check.run(bench))
    except CannotAskError as error:
        return CheckResult(check.name, check.asks, Outcome.CANNOT_ASK, str(error))
    except FailedCheckError as error:
        return CheckResult(check.name, check.asks, Outcome.FAIL, error.what, error.seen, error.expected)
    except MoerlError as error:
        # The engine refused, or its answer cannot be read.
        return CheckResult(check.name, check.asks, Outcome.FAIL, error.what, error.seen or "", error.expected or "")
