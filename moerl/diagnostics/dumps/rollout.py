"""One rollout of a dump, whoever wrote it: less strict than the data contract, for it may be at fault.

A reader checks types and shapes, which need no model. Values that are inconsistent beyond that (routes of another
number of rows, a kept set without its token, experts named twice) are kept as they came: finding them is the purpose of
`moerl diagnose`. Shape legend: S = tokens, L = MoE layers, K = experts per token; all else as in the contract.
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
    """One rollout as a dump has it. Arrays are read-only by convention: a repair makes new ones."""

    name: str
    """Unique in its dump."""
    token_ids: NDArray[np.int32]
    """int32 [S]."""
    sampled: NDArray[np.bool_]
    """bool [S]; sampled[0] is False, at least one is True."""
    rollout_logprobs: NDArray[np.float32]
    """float32 [S], nats, as the engine gave them; 0 where not sampled."""
    temperatures: NDArray[np.float32]
    """float32 [S], as the dump says; 1 where not sampled or not said."""
    top_ps: NDArray[np.float32]
    """float32 [S], as the dump says; 1 where not sampled or not said."""
    policy_versions: NDArray[np.int32]
    """int32 [S], the version that sampled token t; -1 if not sampled or not said."""
    turns: NDArray[np.int16]
    """int16 [S], number of the turn of each token, from 0; a turn ends when `sampled` changes."""
    expert_ids: NDArray[np.int32] | None = None
    """int32 [R, L, K] as recorded, R = S - 1 in a sound dump; None if it has no routes."""
    routed: NDArray[np.bool_] | None = None
    """bool [R], False for rows that were not captured; None: all were, or there are no routes."""
    kept: KeptSets | None = None
    """Kept sets per token, empty if nothing is listed for it; None if the dump has no kept sets."""
    prefix_versions: NDArray[np.int32] | None = None
    """int32 [S], the version under which the cached keys and values of a token were computed; -1 if not cached or not
    said; None if the dump has no such versions."""
    trainer_logprobs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """float32 [S], nats, 0 where not sampled: the log-probs of the trainer, by scorer. Names of
    `moerl.telemetry.metrics.SCORERS`, or "trainer" if the dump does not say what was kept."""
    trainer_expert_ids: NDArray[np.int32] | None = None
    """int32 [S - 1, L, K], the experts that the trainer's routers chose; None if not dumped."""
    group: str = ""
    """Name of the group; empty if not said."""
    engine: str = ""
    """Name of the engine; empty if not said."""
    step: int = -1
    """Training step that it belongs to; -1 if not said."""
    prompt: str = ""
    """Text; empty if not dumped."""
    response: str = ""
    """Text; empty if not dumped."""
    says_temperature: bool = True
    """False if `temperatures` are assumed."""
    says_top_p: bool = True
    """False if `top_ps` are assumed."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By name; `reward` is the one that is trained on. Empty if not said."""
    finish_reason: str = ""
    """Value of the contract's `FinishReason`; empty if not said."""
    kept_logmass: NDArray[np.float32] | None = None
    """float32 [S], nats; None if not said."""
    trajectory: Trajectory | None = None
    """The rollout of a dump of ours, as the contract has it; None for others."""

    def __len__(self) -> int:
        """Returns S, the number of tokens."""
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())

    @property
    def routed_rows(self) -> NDArray[np.bool_]:
        """`routed`, of each row of `expert_ids`, which must be there."""
        assert self.expert_ids is not None
        return np.ones(len(self.expert_ids), np.bool_) if self.routed is None else self.routed

    @property
    def num_prompt(self) -> int:
        """Tokens before the first sampled one."""
        return int(self.sampled.argmax())


@dataclass(slots=True)
class Unusable:
    """Rows of a dump that cannot be read: counts and the first example by reason. Filled while a dump is read."""

    counts: Counter[str] = field(default_factory=Counter)
    """Rows by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first row of each reason, and the value seen."""

    def add(self, reason: str, example: str) -> None:
        """Counts a row. reason: a short sentence without numbers, such as "log-probs missing". example: which row, and
        the value seen."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, example)

    def add_all(self, other: Unusable, prefix: str) -> None:
        """Adds the rows of another dump, each reason behind a prefix."""
        for reason, count in other.counts.items():
            self.counts[prefix + reason] += count
            self.examples.setdefault(prefix + reason, other.examples[reason])


@dataclass(frozen=True, slots=True)
class Dump:
    """A dump that is being read."""

    format: str
    """Name of the format, for people."""
    rollouts: Iterator[DumpedRollout]
    """Read once, one after the other."""
    unusable: Unusable
    """Rows that could not be read; complete when `rollouts` ends."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what the dump does not say ("no routes in this format"), each once; complete when `rollouts`
    ends."""


def turns_of(sampled: NDArray[np.bool_]) -> NDArray[np.int16]:
    """Returns int16 [S]: a new turn begins when `sampled` changes."""
    return np.concatenate([[0], np.cumsum(sampled[1:] != sampled[:-1])]).astype(np.int16)
