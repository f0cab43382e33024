"""One rollout of a dump, whoever wrote it: less strict than the data contract, for it may be what is wrong.

A reader checks what it can name without a model: types and shapes. What is inconsistent beyond that (routes of another
number of rows, a kept set without its token, experts named twice) is kept as it came: finding it is the purpose of
`moerl diagnose`. Shape legend: S = tokens, L = MoE layers, K = experts per token; the contract's where not said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moerl.contract.trajectory import KeptSets, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class DumpedRollout:
    """One rollout as a dump has it. Arrays are read-only by convention: a repair makes new ones.

    name: of the rollout, unique in its dump. group, engine: names, empty where the dump has none.
    step: the training step that it belongs to, -1 where not said.
    token_ids: int32 [S]. sampled: bool [S]; sampled[0] is False, at least one is True.
    rollout_logprobs: float32 [S], nats, as the engine gave them; 0 where not sampled.
    temperatures, top_ps: float32 [S], as the dump says; 1 where not sampled or not said.
    policy_versions: int32 [S], the version that sampled token t; -1 where not sampled or not said.
    turns: int16 [S], number of the turn of each token, from 0; a turn ends where `sampled` changes.
    expert_ids: int32 [R, L, K] as recorded, R = S - 1 in a sound dump; None where it has no routes. routed: bool [R],
        False for rows that the dump says were not captured.
    kept: kept sets per token, empty rows where nothing is listed; None where the dump has no kept sets.
    prefix_versions: int32 [S], the version under which the cached keys and values of a token were computed; -1 where
        not cached or not said; None where the dump says nothing of it.
    trainer_logprobs: float32 [S], nats, 0 where not sampled: the log-probs of the other side, by scorer. Names of
        `moerl.telemetry.metrics.SCORERS`, or "trainer" where the dump does not say what was kept.
    trainer_expert_ids: int32 [S - 1, L, K], the experts that the trainer's routers chose; None where not dumped.
    prompt, response: texts, empty where the dump has none. says_temperature, says_top_p: False if `temperatures` or
    `top_ps` are assumed.
    rewards: by name; `reward` is the one that is trained. finish_reason: a value of the contract's. kept_logmass:
    float32 [S], nats. Empty, or None, if the dump says nothing of them.
    trajectory: the rollout of a dump of ours, as the contract has it; None for others.
    """

    name: str
    token_ids: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    top_ps: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    turns: NDArray[np.int16]
    expert_ids: NDArray[np.int32] | None = None
    routed: NDArray[np.bool_] | None = None
    kept: KeptSets | None = None
    prefix_versions: NDArray[np.int32] | None = None
    trainer_logprobs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    trainer_expert_ids: NDArray[np.int32] | None = None
    group: str = ""
    engine: str = ""
    step: int = -1
    prompt: str = ""
    response: str = ""
    says_temperature: bool = True
    says_top_p: bool = True
    rewards: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str = ""
    kept_logmass: NDArray[np.float32] | None = None
    trajectory: Trajectory | None = None

    def __len__(self) -> int:
        """S, the number of tokens."""
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())

    @property
    def num_prompt(self) -> int:
        """Tokens before the first sampled one."""
        return int(self.sampled.argmax())


@dataclass(slots=True)
class Unusable:
    """Rows of a dump that cannot be read: counts and the first example by reason. Filled while a dump is read."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str) -> None:
        """reason: a short sentence without numbers, such as "log-probs missing". example: which row, what was seen."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, example)

    def add_all(self, other: Unusable, prefix: str) -> None:
        """Adds the rows of another dump, each reason behind a prefix."""
        for reason, count in other.counts.items():
            self.counts[prefix + reason] += count
            self.examples.setdefault(prefix + reason, other.examples[reason])


@dataclass(frozen=True, slots=True)
class Dump:
    """A dump that is being read.

    format: its name. rollouts: read once, one after the other; unusable and notes fill meanwhile. notes: what the
    format leaves open, for people ("no routes in this format"), each once.
    """

    format: str
    rollouts: Iterator[DumpedRollout]
    unusable: Unusable
    notes: list[str] = field(default_factory=list)


def turns_of(sampled: NDArray[np.bool_]) -> NDArray[np.int16]:
    """int16 [S]: a new turn begins where `sampled` changes."""
    return np.concatenate([[0], np.cumsum(sampled[1:] != sampled[:-1])]).astype(np.int16)
