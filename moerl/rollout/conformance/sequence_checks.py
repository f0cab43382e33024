"""Checks that compare answers: batches, prefix caches, long prompts, retraction, aborts, resuming, turns, updates; and
another implementation of the same model, the caller's `ReferenceJudge`.

A row of routing depends on the tokens up to its own alone. So rows of equal beginnings are equal however they were
computed; each check here is one way to get them. Each returns what it saw, or raises `FailedCheckError` or
`CannotAskError`. Torch-free; any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moerl.rollout.conformance.bench import (
    GREEDY,
    Bench,
    FailedCheckError,
    RouteComparison,
    num_common,
    rows_of,
    tokens_of,
)
from moerl.rollout.conformance.subject import Answer, Ask, CannotAskError, Judged

_MAX_LONG_PROMPT = 10_000
"""Longer than the pieces that servers prefill at a time by default (8192)."""

_MAX_POOL = 16_384
"""Tokens of the largest key-value pool that a check fills on purpose."""

_MAX_REQUESTS = 96


def batches_change_nothing(bench: Bench) -> str:
    asks = bench.mixed("batch", 8)
    routes = RouteComparison(bench.tolerances.routes)
    together = bench.fresh(asks, "batch-together")
    for ask, seen, expected in zip(asks, together, bench.alone(asks, "batch-alone"), strict=True):
        routes.add_common(f"{ask.sampling} in a batch of {len(asks)}", ask, seen, expected)
    return routes.finish()


def prefix_hits_change_nothing(bench: Bench) -> str:
    """Asks the same prompt twice, and one that goes on behind it, with the entries of the first one in the cache."""
    long = min(160, bench.subject.facts.max_tokens - 16)
    prompt = bench.prompt("prefix", long)
    asks = [Ask(prompt[: long // 2], GREEDY, 8), Ask(prompt[: long // 2], GREEDY, 8), Ask(prompt, GREEDY, 8)]
    expected = bench.alone(asks, "prefix-fresh")
    routes, cached = RouteComparison(bench.tolerances.routes), list[int | None]()
    for number, (ask, fresh) in enumerate(zip(bench.keyed(asks, "prefix-shared"), expected, strict=True)):
        (answer,) = bench.subject.ask([ask])
        what = f"prompt of {len(ask.prompt_ids)} tokens" + (", its beginning in the prefix cache" if number else "")
        routes.add_common(what, ask, answer, fresh)
        cached.append(answer.cached_tokens)
    said = routes.finish()
    if None in cached:
        return f"{said}; the engine does not say what came from a cache"
    if not any(cached):
        raise CannotAskError(f"no prefix was taken from a cache; without one: {said}")
    return f"{said}; {sum(each or 0 for each in cached)} tokens from the cache"


def long_prompts_are_whole(bench: Bench) -> str:
    """Compares a prompt that servers prefill in pieces with its own beginnings, each computed by itself."""
    facts = bench.subject.facts
    longest = min(facts.max_tokens - 12, _MAX_LONG_PROMPT, (facts.pool_tokens or _MAX_LONG_PROMPT) - 16)
    prompt = bench.prompt("long", longest)
    (whole,) = bench.fresh([Ask(prompt, GREEDY, 4)], "long")
    if len(rows_of(whole)) != longest + len(whole.token_ids) - 1:
        raise FailedCheckError(
            f"rows of routing of a prompt of {longest} tokens",
            seen=len(rows_of(whole)),
            expected=longest + len(whole.token_ids) - 1,
        )
    routes = RouteComparison(bench.tolerances.routes)
    for part in (longest // 4, longest // 2, 3 * longest // 4):
        (beginning,) = bench.fresh([Ask(prompt[:part], GREEDY, 1)], f"long-{part}")
        routes.add(f"prompt of {longest} tokens", rows_of(whole)[:part], rows_of(beginning))
    return f"{longest} tokens: {routes.finish()}"


def retractions_change_nothing(bench: Bench) -> str:
    facts = bench.subject.facts
    if facts.pool_tokens == 0:
        raise CannotAskError("the engine has no pool that requests share: none is ever retracted")
    if facts.pool_tokens is None:
        raise CannotAskError("the engine does not say how many tokens its key-value pool holds")
    new_tokens = min(160, facts.max_tokens - 32, facts.pool_tokens // 3)
    count = -(-3 * facts.pool_tokens // new_tokens)
    if facts.pool_tokens > _MAX_POOL or count > _MAX_REQUESTS:
        raise CannotAskError(
            f"the key-value pool holds {facts.pool_tokens} tokens, too many to fill; start a server with a smaller one"
            " (moerl serve --max-pool-tokens 2048)"
        )
    # Servers that keep room for all tokens of requests without stop ids retract none of these.
    stop_ids = bench.prompt("pressure-stop", 1)
    asks = [Ask(bench.prompt(f"pressure-{i}", 24), replace(GREEDY, seed=i), new_tokens, stop_ids) for i in range(count)]
    answers = bench.fresh(asks, "pressure")
    retracted = [(ask, answer) for ask, answer in zip(asks, answers, strict=True) if answer.retractions]
    if not retracted:
        raise CannotAskError(f"{count} requests of {new_tokens + 24} tokens did not lead to a retraction")
    routes = RouteComparison(bench.tolerances.routes)
    for number, (ask, answer) in enumerate(retracted[:4]):
        (calm,) = bench.fresh([ask], f"calm-{number}")
        _require_rows("retracted request", ask, answer)
        routes.add_common("retracted request", ask, answer, calm)
    return f"{len(retracted)} of {count} requests retracted: {routes.finish()}"


def aborts_keep_what_there_is(bench: Bench) -> str:
    asks = _long_and_one_short(bench, "abort")
    whole = bench.fresh(asks, "abort-whole")
    cut = bench.subject.abort_midway(bench.keyed(asks, "abort"))
    routes, num_cut = RouteComparison(bench.tolerances.routes), 0
    for ask, answer, expected in zip(asks, cut, whole, strict=True):
        if answer is None or answer.finish_reason != "abort":
            continue
        num_cut += 1
        _require_aligned("aborted request", ask, answer)
        routes.add_common("aborted request", ask, answer, expected)
    if not num_cut:
        raise CannotAskError(f"all {len(asks)} requests had finished, or had no token, when they were aborted")
    return f"{num_cut} requests cut short: {routes.finish()}"


def resumed_answers_go_on(bench: Bench) -> str:
    """Asks for rows from the first one that is not there yet."""
    ask = Ask(bench.prompt("resume", 21), GREEDY, 16)
    (whole,) = bench.fresh([ask], "resume-whole")
    routes, num_prompt = RouteComparison(bench.tolerances.routes), len(ask.prompt_ids)
    for there in (1, 8, 15):
        first = num_prompt + there - 1
        prompt = (*ask.prompt_ids, *whole.token_ids[:there].tolist())
        rest = replace(ask, prompt_ids=prompt, max_new_tokens=16 - there, first_row=first)
        (answer,) = bench.fresh([rest], f"resume-{there}")
        what = f"answer that goes on behind {there} of 16 tokens"
        _require_rows(what, rest, answer)
        count = num_common(answer.token_ids.tolist(), whole.token_ids[there:].tolist())
        if count == 0:
            raise FailedCheckError(
                what, seen=answer.token_ids.tolist(), expected=f"{whole.token_ids[there:].tolist()}, as without a break"
            )
        routes.add(what, rows_of(answer)[:count], rows_of(whole)[first : first + count])
    return routes.finish()


def turns_have_each_row_once(bench: Bench) -> str:
    """Asks for three turns, with observations between them; each must bring the rows that the turns before have not."""
    tokens, parts, num_rows = bench.prompt("turns", 17), list[np.ndarray](), 0
    last, num_tokens = tokens, 0
    for turn in range(3):
        ask = Ask(tokens, GREEDY, 6, first_row=num_rows, cache_key=f"{bench.run_id}-turns")
        (answer,) = bench.subject.ask([ask])
        _require_rows(f"turn {turn + 1}", ask, answer)
        parts.append(rows_of(answer))
        num_rows += len(parts[-1])
        last, num_tokens = tokens, len(tokens) + len(answer.token_ids)
        tokens = (*tokens_of(ask, answer), *bench.prompt(f"observation-{turn}", 5))
    once = np.concatenate(parts)
    (whole,) = bench.fresh([Ask(last, GREEDY, 6)], "turns-whole")
    if len(once) != num_tokens - 1:
        raise FailedCheckError("rows of three turns", seen=len(once), expected=f"{num_tokens - 1}, one for every input")
    routes, count = RouteComparison(bench.tolerances.routes), min(len(last), len(once))
    routes.add("three turns", once[:count], rows_of(whole)[:count])
    return routes.finish()


def updates_keep_versions_and_routes(bench: Bench) -> str:
    """Checks answers across an update to weights that number the experts otherwise and compute the same: each row tells
    which weights made it."""
    if not bench.updates_weights:
        raise CannotAskError("weights are replaced only with --update-weights (and --model)")
    asks = _long_and_one_short(bench, "update")
    calm = bench.fresh(asks, "update-calm")
    across = bench.subject.across_update(bench.keyed(asks, "update"))
    routes, num_changed = RouteComparison(bench.tolerances.routes), 0
    layers = np.arange(bench.subject.facts.spec.num_moe_layers)
    _require_versions(across.answers[0], (across.old_version,))  # it had finished before the update began
    for ask, answer, expected in zip(asks, across.answers, calm, strict=True):
        what = "request under way in an update"
        _require_aligned(what, ask, answer)
        versions = _require_versions(answer, (across.old_version, across.new_version))
        num_changed += len(set(versions.tolist())) > 1
        # Row t counts under the weights that sampled token t + 1; that of a prompt under those of the first token.
        count = min(len(rows_of(answer)), len(rows_of(expected)))
        common = num_common(tokens_of(ask, answer), tokens_of(ask, expected))
        count = min(count, common - 1 if common < len(tokens_of(ask, answer)) else count)
        number = np.maximum(np.arange(count) + 1 - len(ask.prompt_ids), 0)
        is_new = versions[number] == across.new_version
        plain = rows_of(expected)[:count].astype(np.int64)
        renumbered = across.renumbered_LE[layers[None, :, None], plain]
        routes.add(what, rows_of(answer)[:count], np.where(is_new[:, None, None], renumbered, plain))
    if not num_changed:
        raise CannotAskError("no request had tokens of both versions")
    return f"{num_changed} answers of two versions: {routes.finish()}"


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


def _long_and_one_short(bench: Bench, name: str) -> list[Ask]:
    """Returns a short request and long ones; the end of the short one is the sign to interrupt the others."""
    longest = min(200, bench.subject.facts.max_tokens - 20)
    kinds = bench.mixed(name, 6)
    asks = [replace(ask, prompt_ids=ask.prompt_ids[:12], max_new_tokens=longest) for ask in kinds]
    return [replace(asks[0], max_new_tokens=4), *asks[1:]]


def _require_rows(what: str, ask: Ask, answer: Answer) -> None:
    expected = len(ask.prompt_ids) + len(answer.token_ids) - 1 - ask.first_row
    if len(rows_of(answer)) != expected:
        raise FailedCheckError(f"{what}: rows of routing", seen=len(rows_of(answer)), expected=expected)


def _require_aligned(what: str, ask: Ask, answer: Answer) -> None:
    """Raises FailedCheckError unless everything that came is there for every token."""
    _require_rows(what, ask, answer)
    parts: dict[str, Sequence[object] | None] = {
        "log-probs": None if answer.logprobs is None else answer.logprobs.tolist(),
        "kept sets": answer.kept_sets,
        "weight versions": None if answer.versions is None else answer.versions.tolist(),
    }
    for name, part in parts.items():
        if part is not None and len(part) != len(answer.token_ids):
            raise FailedCheckError(
                f"{what}: {name}", seen=len(part), expected=f"{len(answer.token_ids)}, one for every sampled token"
            )


def _require_versions(answer: Answer, known: tuple[int, ...]) -> np.ndarray:
    if answer.versions is None:
        raise CannotAskError("the engine does not say which weights sampled a token")
    versions = np.asarray(answer.versions)
    if not np.isin(versions, known).all() or (np.diff(versions) < 0).any():
        raise FailedCheckError(
            "weight versions of a request", seen=versions.tolist(), expected=", then ".join(map(str, known))
        )
    return versions


def _judged(bench: Bench) -> list[tuple[Ask, Answer, Judged]]:
    if bench.judge is None:
        raise CannotAskError("no reference: give the model with --model HF_DIR")
    asks = bench.mixed("reference", 12)
    answers = bench.fresh(asks, "reference")
    for answer in answers:
        rows_of(answer)
    return [(ask, answer, bench.judge.judge(ask, answer)) for ask, answer in zip(asks, answers, strict=True)]
