"""An engine under test: what it is asked, what it answers, and what an adapter of an engine has to offer.

An adapter passes on what the engine said and repairs nothing. What an engine does not return is None; what it cannot be
asked raises `CannotAskError` with the reason. Legend: T = sampled tokens of an answer, R = its rows of routing, L = MoE
layers, K = experts per token. Torch-free; any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, ModelSpec, SamplingParams
from moerl.errors import EngineError


class CannotAskError(EngineError):
    """The engine, or this way of reaching it, has no means for a question; the message says which."""


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """Engine under test: one of `embedded`, `server_file` and `url`."""

    url: str = ""
    """Address of a server, http or https; empty if the engine is given in another way."""
    server_file: Path | None = None
    """server.json of a `moerl serve`; None if the engine is given in another way."""
    embedded: Path | None = None
    """Model directory for the embedded engine; None if the engine is given in another way."""
    model: Path | None = None
    """Model directory of the reference; None = no reference, for the embedded engine its own directory."""
    updates_weights: bool = False
    """True if the checks may replace the engine's weights, and put them back."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt_ids: tuple[int, ...]
    """All tokens that are there, sampled ones and observations too."""
    sampling: SamplingParams
    """Sampling parameters, seed included."""
    max_new_tokens: int
    """New tokens, at most."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the answer, and stay in it."""
    first_row: int = 0
    """Index of the first input whose row of routing is asked for; earlier rows are there already."""
    cache_key: str = ""
    """Requests with other keys share no entries of a prefix cache, if the engine knows such keys."""

    def request(self, rollout_id: str = "conformance") -> RolloutRequest:
        """Returns the request as our port has it: without first row and cache key."""
        lineage = Lineage(rollout_id, rollout_id, rollout_id)
        return RolloutRequest(lineage, self.prompt_ids, self.sampling, self.max_new_tokens, self.stop_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Answer of an engine, unchecked. A field is None if the engine does not return it."""

    token_ids: NDArray[Any]
    """int [T]."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    expert_ids: NDArray[Any] | None = None
    """int [R, L, K], as many rows as came."""
    logprobs: NDArray[Any] | None = None
    """float [T], nats, of the distribution that was sampled from."""
    kept_logmass: NDArray[Any] | None = None
    """float [T], nats."""
    kept_sets: tuple[NDArray[Any], ...] | None = None
    """int arrays, one per token as they came; empty if nothing is listed."""
    versions: NDArray[Any] | None = None
    """int [T], policy version of the weights that sampled each token."""
    cached_tokens: int | None = None
    """Tokens of the prompt that came from a prefix cache."""
    retractions: int | None = None
    """Number of times that the request was retracted."""


@dataclass(frozen=True, slots=True)
class SubjectFacts:
    """Facts about an engine, from the engine itself or from its model."""

    name: str
    """Name for people."""
    spec: ModelSpec
    """Spec of the model."""
    max_tokens: int
    """Prompt and new tokens of one request, at most."""
    dtype: str
    """Dtype of weights and activations."""
    pool_tokens: int | None = None
    """Tokens of its key-value pool; None if the engine does not say, 0 if it has no pool."""


@dataclass(frozen=True, slots=True, eq=False)
class AcrossUpdate:
    """Answers that were under way when weights changed.

    The new weights compute the same function with their experts numbered otherwise.
    """

    answers: tuple[Answer, ...]
    """One per request, in their order."""
    old_version: int
    """Policy version of the weights before."""
    new_version: int
    """Policy version of the weights after."""
    renumbered_LE: NDArray[np.int64]
    """int64 [L, E], the new number of an expert."""


class Subject(Protocol):
    """An engine under test, as an adapter offers it. Every method raises `EngineError` if the engine fails, and
    `CannotAskError` if it cannot be asked at all."""

    @property
    def facts(self) -> SubjectFacts: ...

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        """Returns the answers to requests that run side by side, in their order.

        Raises:
            ContractError: an answer cannot be read.
        """
        ...

    def abort_midway(self, asks: Sequence[Ask]) -> list[Answer | None]:
        """Asks as `ask` does, but aborts all when the first one has finished; None for a request that had no token
        yet."""
        ...

    def across_update(self, asks: Sequence[Ask]) -> AcrossUpdate:
        """Asks as `ask` does, with a weight update when the first one has finished; the old weights come back at the
        end."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """An answer by the reference."""

    own_ids: NDArray[np.int64]
    """int64 [S-1, L, K], experts that its routers choose."""
    logprobs: NDArray[np.float64]
    """float64 [T], nats, with the recorded experts, inside of the recorded kept sets."""


class ReferenceJudge(Protocol):
    """An implementation of the same model that the engine's answers are compared with."""

    def judge(self, ask: Ask, answer: Answer) -> Judged:
        """Computes an answer again. Raises ContractError if the answer breaks the data contract."""
        ...
