"""An engine under test: what it is asked, what it answers, and what an adapter of an engine has to offer.

An adapter passes on what the engine said and repairs nothing. What an engine does not return is None; what it cannot be
asked raises `CannotAskError` with the reason. Legend: T = sampled tokens of an answer, R = its rows of routing, L = MoE
layers, K = experts per token. Torch-free; any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moerl.contract.trajectory import ModelSpec, SamplingParams
from moerl.errors import EngineError


class CannotAskError(EngineError):
    """The engine, or this way of reaching it, has no means for a question; the message says which."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    prompt_ids: all tokens that are there, sampled ones and observations too. first_row: of which input on rows of
    routing are asked for; those before it are there already. cache_key: requests with other keys share no entries of a
    prefix cache, where the engine knows such keys.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    first_row: int = 0
    cache_key: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Answer of an engine, unchecked.

    token_ids: int [T]. finish_reason: stop, length or abort. expert_ids: int [R, L, K], as many as came.
    logprobs: float [T], of the distribution that was sampled from. kept_logmass: float [T].
    kept_sets: int arrays, one per token as they came; empty if nothing is listed. versions: int [T].
    cached_tokens: tokens of the prompt from a prefix cache. retractions: how often the request was retracted.
    """

    token_ids: NDArray[Any]
    finish_reason: str
    expert_ids: NDArray[Any] | None = None
    logprobs: NDArray[Any] | None = None
    kept_logmass: NDArray[Any] | None = None
    kept_sets: tuple[NDArray[Any], ...] | None = None
    versions: NDArray[Any] | None = None
    cached_tokens: int | None = None
    retractions: int | None = None


@dataclass(frozen=True, slots=True)
class SubjectFacts:
    """Facts about an engine, from the engine itself or from its model.

    name: for people. max_tokens: prompt and new tokens of one request. dtype: of weights and activations.
    pool_tokens: tokens of its key-value pool; None if the engine does not say, 0 if it has no pool.
    """

    name: str
    spec: ModelSpec
    max_tokens: int
    dtype: str
    pool_tokens: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AcrossUpdate:
    """Answers that were under way when weights changed.

    The new weights compute the same function with their experts numbered otherwise.

    old_version, new_version: of the weights before and after. renumbered_LE: int [L, E]; the new number of an expert.
    """

    answers: tuple[Answer, ...]
    old_version: int
    new_version: int
    renumbered_LE: NDArray[np.int64]


class Subject(Protocol):
    """An engine under test, as an adapter offers it. Every method raises `EngineError` where the engine fails, and
    `CannotAskError` where it cannot be asked at all."""

    @property
    def facts(self) -> SubjectFacts: ...

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        """The answers to requests that run side by side, in their order.

        Raises:
            ContractError: an answer cannot be read.
        """
        ...

    def abort_midway(self, asks: Sequence[Ask]) -> list[Answer | None]:
        """The same, but all are aborted when the first one has finished; None where one had no token yet."""
        ...

    def across_update(self, asks: Sequence[Ask]) -> AcrossUpdate:
        """The same, with a weight update when the first one has finished; the old weights come back at the end."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """An answer by the reference. own_ids: int [S-1, L, K], experts that its routers choose. logprobs: float [T], nats,
    with the recorded experts, inside of the recorded kept sets."""

    own_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]


class ReferenceJudge(Protocol):
    """An implementation of the same model that the engine's answers are compared with."""

    def judge(self, ask: Ask, answer: Answer) -> Judged:
        """Raises ContractError where the answer breaks the data contract."""
        ...
