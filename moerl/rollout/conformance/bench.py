"""Tools of the checks: prompts, sampling, tolerances, comparisons. Torch-free; any process."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.trajectory import SamplingParams
from moerl.errors import MoerlError
from moerl.rollout.conformance.subject import Answer, Ask, CannotAskError, ReferenceJudge, Subject

GREEDY = SamplingParams(temperature=0.0)
KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.8),
    SamplingParams(top_k=5),
    SamplingParams(temperature=1.2, top_p=0.9, top_k=8, min_p=0.02),
    GREEDY,
    SamplingParams(min_p=0.1),
)
"""Every kind of sampling that the contract knows."""


class FailedCheckError(MoerlError):
    """The engine did something else than the contract asks for."""


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Differences that rounding may cause between two computations of the same tokens."""

    routes: float
    """Share of rows, times layers, whose experts may differ."""
    nats: float
    """Largest difference of two log-probs."""


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine under test and what it is tested with."""

    subject: Subject
    """Engine under test."""
    run_id: str
    """Another one for every run, so that no prefix cache remembers the one before."""
    judge: ReferenceJudge | None = None
    """None without a model."""
    updates_weights: bool = False
    """True if the caller allows it."""

    @property
    def tolerances(self) -> Tolerances:
        """Tolerances for the precision of weights and activations."""
        return Tolerances(1e-3, 1e-4) if self.subject.facts.dtype == "float32" else Tolerances(0.1, 0.25)

    def prompt(self, name: str, length: int) -> tuple[int, ...]:
        """Returns random ids, the same for the same name."""
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return tuple(rng.integers(0, self.subject.facts.spec.vocab_size, length).tolist())

    def mixed(self, name: str, count: int, max_new_tokens: int = 12) -> list[Ask]:
        """Returns requests of all kinds of sampling, with prompts of 1 to 40 tokens and seeds of their own."""
        lengths = np.random.default_rng(zlib.crc32(name.encode())).integers(1, 41, count)
        return [
            Ask(self.prompt(f"{name}-{i}", int(length)), replace(KINDS[i % len(KINDS)], seed=100 + i), max_new_tokens)
            for i, length in enumerate(lengths)
        ]

    def keyed(self, asks: Sequence[Ask], key: str) -> list[Ask]:
        """Returns the same requests, with a part of a prefix cache of their own."""
        return [replace(ask, cache_key=f"{self.run_id}-{key}") for ask in asks]

    def fresh(self, asks: Sequence[Ask], key: str) -> list[Answer]:
        """Returns answers to requests that run side by side, with no entry of a prefix cache that others left."""
        return self.subject.ask(self.keyed(asks, key))

    def alone(self, asks: Sequence[Ask], key: str) -> list[Answer]:
        """Returns answers to requests that run one after the other."""
        return [self.fresh([ask], f"{key}-{number}")[0] for number, ask in enumerate(asks)]


def rows_of(answer: Answer) -> NDArray[Any]:
    """Returns the rows of routing of an answer, [R, L, K].

    Raises:
        CannotAskError: it has none.
    """
    if answer.expert_ids is None:
        raise CannotAskError("the engine returns no routes")
    return answer.expert_ids


def logprobs_of(answer: Answer) -> NDArray[Any]:
    """Returns the log-probs of an answer. Raises CannotAskError if it has none of the distribution that was sampled
    from."""
    if answer.logprobs is None:
        raise CannotAskError("the engine returns no log-probs of the distribution that it samples from")
    return answer.logprobs


def kept_of(answer: Answer) -> tuple[NDArray[Any], ...]:
    """Returns the kept sets of an answer. Raises CannotAskError if it has none."""
    if answer.kept_sets is None:
        raise CannotAskError("the engine returns no kept sets")
    return answer.kept_sets


def tokens_of(ask: Ask, answer: Answer) -> list[int]:
    """Returns prompt and sampled tokens."""
    return [*ask.prompt_ids, *answer.token_ids.tolist()]


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many leading tokens agree."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


class RouteComparison:
    """A comparison of routes of equal tokens, which counts.

    Args:
        share: of rows, times layers, that may differ by rounding.
    """

    def __init__(self, share: float) -> None:
        self._share, self._compared, self._differing, self._first = share, 0, 0, ""

    def add(self, what: str, seen: NDArray[Any], expected: NDArray[Any]) -> None:
        """Adds rows of the same inputs.

        Raises:
            FailedCheckError: they are not equally many.
        """
        if seen.shape != expected.shape:
            raise FailedCheckError(f"{what}: rows of routing", seen=seen.shape, expected=expected.shape)
        differs_RL = (np.sort(seen, -1) != np.sort(expected, -1)).any(-1)
        self._compared += differs_RL.size
        self._differing += int(differs_RL.sum())
        if differs_RL.any() and not self._first:
            row, layer = (int(i) for i in np.argwhere(differs_RL)[0])
            self._first = (
                f"{what}, row {row}, MoE layer {layer}: {seen[row, layer].tolist()}"
                f" instead of {expected[row, layer].tolist()}"
            )

    def add_common(self, what: str, ask: Ask, seen: Answer, expected: Answer) -> None:
        """Adds two answers to one request, as far as their tokens agree."""
        last = num_common(tokens_of(ask, seen), tokens_of(ask, expected))
        # Rows are those of inputs; the last token of an answer has none.
        longest = [len(ask.prompt_ids) + len(answer.token_ids) - 1 for answer in (seen, expected)]
        count = min(last, *longest)
        self.add(what, rows_of(seen)[:count], rows_of(expected)[:count])

    def finish(self) -> str:
        """Returns a line with how many rows, times layers, were compared, and how many of them differ.

        Raises:
            FailedCheckError: more differ than rounding explains.
        """
        if self._differing > self._share * self._compared:
            raise FailedCheckError(
                f"routes differ ({self._first})",
                seen=f"{self._differing} of {self._compared} rows x layers",
                expected=f"at most {int(self._share * self._compared)}, by rounding",
            )
        return f"{self._compared} rows x layers, {self._differing} differ"
