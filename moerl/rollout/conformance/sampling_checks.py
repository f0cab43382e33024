"""Checks of the sampling distribution, without knowing the model: draws of one token, many times.

If the kept set is small, all of its tokens come up, and what their log-probs must add up to is known. Each returns what
it saw, or raises `FailedCheckError` or `CannotAskError`. Torch-free; any process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moerl.contract.trajectory import SamplingParams
from moerl.rollout.conformance.bench import GREEDY, Bench, FailedCheckError, kept_of, logprobs_of
from moerl.rollout.conformance.subject import Answer, Ask, CannotAskError

_NUM_DRAWS = 48
_TOP_K = 4


@dataclass(frozen=True, slots=True)
class _Draws:
    """Draws from one distribution. logprobs: of each token that came up, nats."""

    sampling: SamplingParams
    logprobs: dict[int, float]
    answers: list[Answer]

    @property
    def mass(self) -> float:
        return sum(map(math.exp, self.logprobs.values()))


def _draws(bench: Bench, sampling: SamplingParams, name: str) -> _Draws:
    """Draws one token behind one prompt, with many seeds.

    Raises:
        FailedCheckError: a token has two log-probs.
    """
    prompt = bench.prompt("draws", 9)
    asks = [Ask(prompt, replace(sampling, seed=seed), 1) for seed in range(_NUM_DRAWS)]
    answers, drawn = bench.fresh(asks, f"draws-{name}"), dict[int, float]()
    for answer in answers:
        token, value = int(answer.token_ids[0]), float(logprobs_of(answer)[0])
        if abs(drawn.setdefault(token, value) - value) > bench.tolerances.nats:
            raise FailedCheckError(
                f"log-prob of token {token}, {sampling}", seen=f"{drawn[token]}, {value}", expected="one"
            )
    return _Draws(sampling, drawn, answers)


def _require_whole(draws: _Draws, size: int) -> None:
    """Raises FailedCheckError unless the probabilities of a kept set add up to 1 if all of its tokens came up, else to
    1 at most."""
    tolerance, mass = 1e-3, draws.mass
    if mass > 1 + tolerance or (len(draws.logprobs) == size and mass < 1 - tolerance):
        raise FailedCheckError(
            f"sum of the probabilities of {len(draws.logprobs)} tokens, kept set of {size}, {draws.sampling}",
            seen=f"{mass:.4f}",
            expected="1: log-probs are renormalised over the kept set",
        )


def top_k_is_honoured(bench: Bench) -> str:
    draws = _draws(bench, SamplingParams(temperature=2.0, top_k=_TOP_K), "top-k")
    if len(draws.logprobs) > _TOP_K:
        raise FailedCheckError("different tokens drawn, top_k 4", seen=len(draws.logprobs), expected="at most 4")
    _require_whole(draws, _TOP_K)
    for answer in draws.answers:
        if answer.kept_sets is not None and len(answer.kept_sets[0]) != _TOP_K:
            raise FailedCheckError("kept set, top_k 4", seen=f"{len(answer.kept_sets[0])} ids", expected=_TOP_K)
    return f"{len(draws.logprobs)} of {_TOP_K} tokens drawn, probabilities add up to {draws.mass:.4f}"


def temperature_is_honoured(bench: Bench) -> str:
    """Checks that log-probs of two tokens are half as far apart at twice the temperature."""
    one = _draws(bench, SamplingParams(top_k=_TOP_K), "temperature-1")
    two = _draws(bench, SamplingParams(temperature=2.0, top_k=_TOP_K), "temperature-2")
    both = sorted(one.logprobs.keys() & two.logprobs.keys())
    if len(both) < 2:
        raise CannotAskError(f"{_NUM_DRAWS} draws brought fewer than two tokens that both temperatures drew")
    first, *others = both
    for token in others:
        apart = one.logprobs[token] - one.logprobs[first]
        seen = two.logprobs[token] - two.logprobs[first]
        if abs(seen - apart / 2) > 4 * bench.tolerances.nats:
            raise FailedCheckError(
                f"difference of the log-probs of tokens {first} and {token} at temperature 2",
                seen=f"{seen:.5f}",
                expected=f"{apart / 2:.5f}, half of that at temperature 1",
            )
    return f"{len(both)} tokens at temperatures 1 and 2"


def top_p_is_honoured(bench: Bench) -> str:
    """Checks that the kept set has at least top_p of the mass, and less without its least likely token."""
    top_p = 0.5
    draws = _draws(bench, SamplingParams(temperature=0.7, top_p=top_p), "top-p")
    sizes = {len(kept_of(answer)[0]) for answer in draws.answers}
    (size,) = sizes if len(sizes) == 1 else (0,)
    if not size:
        raise FailedCheckError(
            "sizes of kept sets of one distribution", seen=sorted(sizes), expected="one size, above 0"
        )
    _require_whole(draws, size)
    masses = [math.exp(float(a.kept_logmass[0])) for a in draws.answers if a.kept_logmass is not None]
    if not masses:
        raise CannotAskError("the engine does not say what mass a kept set has")
    # The least likely token of the set is no likelier than the least likely one that was drawn.
    least = math.exp(min(draws.logprobs.values()))
    for mass in masses:
        if mass < top_p - 1e-3 or mass * (1 - least) >= top_p + 1e-3:
            raise FailedCheckError(
                f"mass of the kept set, top_p {top_p}",
                seen=f"{mass:.4f}, {mass * (1 - least):.4f} without its least likely token",
                expected=f"at least {top_p} with it, less without it",
            )
    return f"kept sets of {size} tokens with mass {masses[0]:.3f}"


def min_p_is_honoured(bench: Bench) -> str:
    min_p = 0.3
    draws = _draws(bench, SamplingParams(min_p=min_p), "min-p")
    values = list(draws.logprobs.values())
    if math.exp(min(values) - max(values)) < min_p * (1 - 1e-3):
        raise FailedCheckError(
            f"least likely token over most likely one, min_p {min_p}",
            seen=f"{math.exp(min(values) - max(values)):.4f}",
            expected=f"at least {min_p}",
        )
    sizes = {len(ids) for answer in draws.answers for ids in answer.kept_sets or ()}
    if len(sizes) == 1:
        _require_whole(draws, sizes.pop())
    return f"{len(values)} tokens drawn"


def greedy_is_greedy(bench: Bench) -> str:
    """Checks that the same token comes every time, the one that sampling from two tokens finds more likely."""
    prompt = bench.prompt("draws", 9)
    greedy = bench.fresh([Ask(prompt, replace(GREEDY, seed=seed), 1) for seed in range(4)], "greedy")
    tokens = {int(answer.token_ids[0]) for answer in greedy}
    if len(tokens) > 1:
        raise FailedCheckError("greedy tokens behind one prompt", seen=sorted(tokens), expected="one")
    draws = _draws(bench, SamplingParams(temperature=2.0, top_k=2), "greedy-two")
    best = max(draws.logprobs, key=draws.logprobs.__getitem__)
    if len(draws.logprobs) == 2 and best not in tokens:
        raise FailedCheckError("greedy token", seen=tokens.pop(), expected=f"{best}, the most likely one")
    return f"token {best} of {sorted(draws.logprobs)}"


def seeds_reproduce(bench: Bench) -> str:
    """Checks that equal seeds give equal tokens, alone, in a batch and behind a beginning, and that not all seeds
    do."""
    asks = bench.mixed("seeds", 6)
    alone = bench.alone(asks, "seeds-alone")
    for ask, one, other in zip(asks, alone, bench.fresh(asks, "seeds-together"), strict=True):
        if one.token_ids.tolist() != other.token_ids.tolist():
            raise FailedCheckError(
                f"tokens of one request, alone and in a batch, {ask.sampling}",
                seen=other.token_ids.tolist(),
                expected=one.token_ids.tolist(),
            )
    ask, whole = asks[0], alone[0].token_ids.tolist()
    behind = replace(ask, prompt_ids=(*ask.prompt_ids, *whole[:5]), max_new_tokens=len(whole) - 5)
    (rest,) = bench.fresh([behind], "seeds-behind")
    if rest.token_ids.tolist() != whole[5:]:
        raise FailedCheckError(
            "tokens behind a beginning of 5: draws depend on seed and position alone",
            seen=rest.token_ids.tolist(),
            expected=whole[5:],
        )
    others = [replace(ask, sampling=SamplingParams(temperature=2.0, seed=seed)) for seed in range(8)]
    different = {tuple(answer.token_ids.tolist()) for answer in bench.fresh(others, "seeds-others")}
    if len(different) < 2:
        raise FailedCheckError("answers with 8 seeds", seen="one", expected="different ones")
    return f"{len(asks)} requests alike, {len(different)} answers with 8 seeds"
