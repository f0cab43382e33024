"""Checks of single answers: tokens, rows of routing, kept sets, log-probs, and the data contract as a whole.

Each returns what it saw, or raises `FailedCheckError` or `CannotAskError`. Torch-free; any process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from moerl.contract.trajectory import FinishReason, ModelSpec, Trajectory
from moerl.rollout.conformance.bench import Bench, FailedCheckError, kept_of, logprobs_of, rows_of
from moerl.rollout.conformance.subject import Answer, Ask
from moerl.rollout.segments import Segment, trajectory_values

_ROUNDING = 1e-6
"""Least amount by which a float32 log-prob may be too large."""


def answers_come(bench: Bench) -> str:
    asks = bench.mixed("answers", 12)
    for ask, answer in _answered(bench, asks):
        num_tokens = len(answer.token_ids)
        if num_tokens != ask.max_new_tokens or answer.finish_reason != FinishReason.LENGTH:
            raise FailedCheckError(
                f"length of an answer without stop ids, {ask.sampling}",
                seen=f"{num_tokens} tokens, reason {answer.finish_reason}",
                expected=f"{ask.max_new_tokens} tokens, reason length",
            )
        _require_ids("sampled tokens", answer.token_ids, bench.subject.facts.spec.vocab_size)
    return f"{len(asks)} answers of 12 tokens"


def stop_ids_end(bench: Bench) -> str:
    """Makes a token that an answer has anyway its stop id: the answer must end there, and keep the token."""
    asks = bench.mixed("stop", 6)
    whole = bench.fresh(asks, "stop-whole")
    stopping = [replace(ask, stop_ids=(int(answer.token_ids[4]),)) for ask, answer in zip(asks, whole, strict=True)]
    num_stopped = 0
    for ask, answer in _answered(bench, stopping):
        is_stop = [token in ask.stop_ids for token in answer.token_ids.tolist()]
        ended = any(is_stop)
        reason = FinishReason.STOP if ended else FinishReason.LENGTH
        num_stopped += ended
        if any(is_stop[:-1]) or answer.finish_reason != reason:
            raise FailedCheckError(
                f"place where an answer with stop id {ask.stop_ids[0]} ends",
                seen=f"tokens {answer.token_ids.tolist()}, reason {answer.finish_reason}",
                expected="the first stop id is the last token, and the reason is stop",
            )
    if not num_stopped:
        raise FailedCheckError(
            "stop ids", seen="none of them was sampled again", expected="that of the greedy request at least"
        )
    return f"{num_stopped} of {len(asks)} answers ended by a stop id"


# --- routing ---------------------------------------------------------------------------------------------------------


def routes_are_there(bench: Bench) -> str:
    asks = bench.mixed("routes", 6)
    for _, answer in _answered(bench, asks):
        if answer.expert_ids is None:
            raise FailedCheckError("routes", seen="none in the answer", expected="expert ids of every input token")
    return f"in {len(asks)} answers"


def routes_have_rows(bench: Bench) -> str:
    """Counts rows of routing, also of prompts and answers of one token."""
    asks = [*bench.mixed("rows", 12), *(replace(ask, max_new_tokens=1) for ask in bench.mixed("short", 3))]
    asks.append(replace(asks[0], prompt_ids=asks[0].prompt_ids[:1], max_new_tokens=1))
    num_rows = 0
    for ask, answer in _answered(bench, asks):
        expected = len(ask.prompt_ids) + len(answer.token_ids) - 1
        if len(rows_of(answer)) != expected:
            raise FailedCheckError(
                f"rows of routing of {len(ask.prompt_ids)} prompt and {len(answer.token_ids)} sampled tokens",
                seen=len(rows_of(answer)),
                expected=f"{expected}: one for every token but the last, which is no input",
            )
        num_rows += expected
    return f"{num_rows} rows in {len(asks)} answers"


def routes_have_shape(bench: Bench) -> str:
    spec = bench.subject.facts.spec
    for _, answer in _answered(bench, bench.mixed("shape", 6)):
        shape = rows_of(answer).shape
        if shape[1:] != (spec.num_moe_layers, spec.experts_per_token):
            raise FailedCheckError(
                "shape of the routes",
                seen=list(shape),
                expected=f"[S-1, {spec.num_moe_layers} MoE layers, {spec.experts_per_token} experts]; dense layers have"
                " no rows",
            )
    return f"[S-1, {spec.num_moe_layers}, {spec.experts_per_token}]"


def routes_have_experts(bench: Bench) -> str:
    spec, num_rows = bench.subject.facts.spec, 0
    for _, answer in _answered(bench, bench.mixed("experts", 12)):
        rows = rows_of(answer).astype(np.int64)
        _require_ids("expert ids", rows, spec.num_experts)
        repeated = np.argwhere((np.diff(np.sort(rows, -1), axis=-1) == 0).any(-1))
        if len(repeated):
            row, layer = (int(i) for i in repeated[0])
            raise FailedCheckError(
                f"experts of row {row}, MoE layer {layer} ({len(repeated)} such rows x layers)",
                seen=rows[row, layer].tolist(),
                expected=f"{spec.experts_per_token} different experts",
            )
        num_rows += rows.shape[0] * rows.shape[1]
    return f"{num_rows} rows x layers"


# --- kept sets -------------------------------------------------------------------------------------------------------


def kept_sets_are_there(bench: Bench) -> str:
    return _each_token(bench, "kept-there", _require_listed)


def kept_sets_hold_the_token(bench: Bench) -> str:
    return _each_token(bench, "kept-token", _require_held)


def kept_sets_are_ordered(bench: Bench) -> str:
    return _each_token(bench, "kept-order", _require_ordered)


def kept_sets_are_bounded(bench: Bench) -> str:
    return _each_token(bench, "kept-size", _require_bounded)


_TokenCheck = Callable[[Ask, int, Any, ModelSpec], None]
"""Check of one sampled token. Takes the request, the token, its kept set and the model; raises `FailedCheckError`."""


def _each_token(bench: Bench, name: str, require: _TokenCheck) -> str:
    num_cut = num_open = 0
    for ask, answer in _answered(bench, bench.mixed(name, 12)):
        kept = kept_of(answer)
        if len(kept) != len(answer.token_ids):
            raise FailedCheckError(f"kept sets, {ask.sampling}", seen=len(kept), expected=len(answer.token_ids))
        for token, ids in zip(answer.token_ids.tolist(), kept, strict=True):
            require(ask, token, ids, bench.subject.facts.spec)
        num_cut += len(kept) * ask.sampling.cuts
        num_open += len(kept) * (not ask.sampling.cuts)
    return f"{num_cut} cut tokens, {num_open} drawn from the full vocabulary"


def _require_listed(ask: Ask, token: int, ids: Any, spec: ModelSpec) -> None:
    if (len(ids) > 0) != ask.sampling.cuts:
        expected = "at least the sampled token" if ask.sampling.cuts else "no list: nothing is cut"
        raise FailedCheckError(f"kept set of a token, {ask.sampling}", seen=f"{len(ids)} ids", expected=expected)


def _require_held(ask: Ask, token: int, ids: Any, spec: ModelSpec) -> None:
    if ask.sampling.cuts and token not in ids.tolist():
        raise FailedCheckError(
            f"kept set of a token, {ask.sampling}", seen=f"{ids.tolist()}", expected=f"sampled token {token} among them"
        )


def _require_ordered(ask: Ask, token: int, ids: Any, spec: ModelSpec) -> None:
    _require_ids("kept ids", ids, spec.vocab_size)
    if len(ids) > 1 and not (np.diff(ids.astype(np.int64)) > 0).all():
        raise FailedCheckError(f"kept set, {ask.sampling}", seen=ids.tolist(), expected="strictly ascending ids")


def _require_bounded(ask: Ask, token: int, ids: Any, spec: ModelSpec) -> None:
    limit = 1 if ask.sampling.is_greedy else min(ask.sampling.effective_top_k or 0, spec.vocab_size)
    if len(ids) > limit:
        raise FailedCheckError(f"kept set, {ask.sampling}", seen=f"{len(ids)} ids", expected=f"at most {limit}")


# --- log-probs -------------------------------------------------------------------------------------------------------


def logprobs_are_negative(bench: Bench) -> str:
    """Checks that tokens that are greedy, or of a kept set of one, have log-prob 0, and that no mass is missing if
    nothing is cut."""
    count = 0
    for ask, answer in _answered(bench, bench.mixed("logprobs", 12)):
        values = logprobs_of(answer)
        _require_logs(f"log-probs, {ask.sampling}", values, len(answer.token_ids))
        if answer.kept_logmass is not None:
            _require_logs(f"log mass of kept sets, {ask.sampling}", answer.kept_logmass, len(values))
            if not ask.sampling.cuts and answer.kept_logmass.any():
                raise FailedCheckError(
                    "log mass of kept sets if nothing is cut", seen=answer.kept_logmass.min(), expected=0
                )
        sizes = [1 if ask.sampling.is_greedy else 0] * len(values)
        if answer.kept_sets is not None:
            sizes = [len(ids) for ids in answer.kept_sets]
        for value, size in zip(values.tolist(), sizes, strict=True):
            if size == 1 and abs(value) > _ROUNDING:
                raise FailedCheckError(f"log-prob of a kept set of one, {ask.sampling}", seen=value, expected=0)
        count += len(values)
    return f"{count} tokens"


def _require_logs(what: str, values: Any, count: int) -> None:
    if len(values) != count:
        raise FailedCheckError(what, seen=f"{len(values)} numbers", expected=f"{count}, one for every sampled token")
    if not np.isfinite(values).all() or (values > _ROUNDING).any():
        raise FailedCheckError(what, seen=values[~(values <= _ROUNDING)][0], expected="finite, at most 0")


# --- the contract as a whole -----------------------------------------------------------------------------------------


def contract_accepts(bench: Bench) -> str:
    asks = bench.mixed("contract", 12)
    for ask, answer in _answered(bench, asks):
        as_trajectory(ask, answer, bench.subject.facts.spec)
    return f"{len(asks)} trajectories"


def as_trajectory(ask: Ask, answer: Answer, spec: ModelSpec) -> Trajectory:
    """Returns an answer with all its rows as the trainer would get it.

    Raises:
        ContractError: it breaks an invariant. FailedCheckError: something that the contract needs is not there.
    """
    parts = {
        "routes": answer.expert_ids,
        "log-probs": answer.logprobs,
        "mass of kept sets": answer.kept_logmass,
        "kept sets": answer.kept_sets,
        "weight versions": answer.versions,
    }
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        raise FailedCheckError("what the contract needs", seen=f"no {', no '.join(missing)}", expected="all of them")
    assert answer.expert_ids is not None
    assert answer.kept_sets is not None
    segment = Segment(
        answer.token_ids.astype(np.int32),
        np.asarray(answer.logprobs, np.float32),
        np.asarray(answer.kept_logmass, np.float32),
        np.asarray(answer.versions, np.int32),
        np.array([len(ids) for ids in answer.kept_sets], np.int64),
        np.concatenate([*answer.kept_sets, np.zeros(0, np.int32)]).astype(np.int32),
        _narrowed(answer.expert_ids, spec),
    )
    return Trajectory(**trajectory_values(ask.request(), [segment], FinishReason(answer.finish_reason), spec))


def _narrowed(expert_ids: Any, spec: ModelSpec) -> Any:
    """Returns the ids in the contract's dtype if they fit; the contract refuses the others."""
    narrow = expert_ids.astype(spec.expert_dtype)
    return narrow if np.array_equal(narrow, expert_ids) else expert_ids


def _require_ids(what: str, ids: Any, limit: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < limit):
        raise FailedCheckError(what, seen=f"{ids.min()} to {ids.max()}", expected=f"in [0, {limit})")


def _answered(bench: Bench, asks: list[Ask]) -> list[tuple[Ask, Answer]]:
    return list(zip(asks, bench.fresh(asks, "answers"), strict=True))
