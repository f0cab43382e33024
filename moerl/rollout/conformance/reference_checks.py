"""Checks against another implementation of the same model. Torch-free; the `ReferenceJudge` is the caller's.

Each returns what it saw, or raises `FailedCheckError` or `CannotAskError`. Any process.
"""

from __future__ import annotations

import numpy as np

from moerl.rollout.conformance.bench import Bench, FailedCheckError, RouteComparison, rows_of
from moerl.rollout.conformance.subject import Answer, Ask, CannotAskError, Judged


def routes_are_those_of_the_reference(bench: Bench) -> str:
    routes = RouteComparison(bench.tolerances.routes)
    for ask, answer, judged in _judged(bench):
        routes.add(f"transformers, {ask.sampling}", rows_of(answer), judged.own_ids)
    return routes.finish()


def logprobs_are_those_of_the_reference(bench: Bench) -> str:
    """Compares log-probs, with the recorded experts and over the recorded kept sets."""
    largest, count = 0.0, 0
    for ask, answer, judged in _judged(bench):
        apart = np.abs(np.asarray(answer.logprobs, np.float64) - judged.logprobs)
        largest, count = max(largest, float(apart.max())), count + len(apart)
        if largest > bench.tolerances.nats:
            token = int(apart.argmax())
            assert answer.logprobs is not None
            raise FailedCheckError(
                f"log-prob of sampled token {token}, {ask.sampling}",
                seen=f"{answer.logprobs[token]:.6f}",
                expected=f"{judged.logprobs[token]:.6f} by transformers, within {bench.tolerances.nats:g} nats",
            )
    return f"{count} tokens, at most {largest:.1e} nats apart"


def _judged(bench: Bench) -> list[tuple[Ask, Answer, Judged]]:
    if bench.judge is None:
        raise CannotAskError("no reference: give the model with --model HF_DIR")
    asks = bench.mixed("reference", 12)
    answers = bench.fresh(asks, "reference")
    for answer in answers:
        rows_of(answer)
    return [(ask, answer, bench.judge.judge(ask, answer)) for ask, answer in zip(asks, answers, strict=True)]
