"""Parts of a trajectory: the facts about model, sampling and turns, and all fields before they are checked.

Shape legend: S = tokens of the trajectory, L = MoE layers (dense layers are not counted), K = experts per token,
E = experts, V = vocabulary size. Pure data: numpy only, no torch. `moerl.contract.invariants` checks these fields;
`moerl.contract.trajectory.Trajectory` is what passed. Any process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_KEPT_IDS = 4096
"""Largest kept set an engine may return; the finite top-k used when only top_p or min_p was asked for."""
TURN_REWARDS = "turn_reward"
"""Name of the side score with what turns earned of the reward: on the last token of each turn, 0 on others."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts about a model that the contract needs; engines and trainer agree on them in a handshake."""

    num_moe_layers: int
    """L; dense layers are not counted."""
    experts_per_token: int
    """K."""
    num_experts: int
    """E, logical experts."""
    vocab_size: int
    """V, ids that may be sampled (padding rows of the embedding are not counted)."""
    fingerprint: str = ""
    """Hash of the architecture and vocabulary size, not of the tokenizer; equal on both sides or the data is
    refused."""

    @property
    def expert_dtype(self) -> np.dtype[Any]:
        """The smallest unsigned dtype that holds every expert id."""
        return np.dtype(np.uint8) if self.num_experts <= 256 else np.dtype(np.uint16)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters with which the tokens of one span were drawn. Joint semantics: docs/data_contract.md."""

    temperature: float = 1.0
    """> 0; 0 means greedy (a singleton kept set with log-prob 0; not trainable)."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]."""
    top_k: int | None = None
    """1 to `MAX_KEPT_IDS`; None with nothing else cut = full vocabulary; None with top_p < 1 or min_p > 0 means
    `MAX_KEPT_IDS`."""
    min_p: float = 0.0
    """In [0, 1); 0 cuts nothing."""
    seed: int = 0
    """Per-request seed, int64; draws depend on seed and position alone."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def cuts(self) -> bool:
        """True if the kept set can be smaller than the vocabulary."""
        return self.is_greedy or self.top_p < 1.0 or self.min_p > 0.0 or self.top_k is not None

    @property
    def effective_top_k(self) -> int | None:
        """The finite top-k in force; None only if nothing is cut."""
        if not self.cuts:
            return None
        return MAX_KEPT_IDS if self.top_k is None else self.top_k


class TurnKind(StrEnum):
    PROMPT = "prompt"
    SAMPLED = "sampled"
    OBSERVATION = "observation"


@dataclass(frozen=True, slots=True)
class Turn:
    """One span [start, end) of tokens."""

    start: int
    """First token."""
    end: int
    """Token behind the last."""
    kind: TurnKind
    """Origin of the tokens."""
    sampling: SamplingParams | None = None
    """Set if and only if `kind` is sampled."""


_TURN = re.compile(r"#[0-9]+\Z")
"""End of the id of a turn."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Origin of a trajectory."""

    rollout_id: str
    """Unique; the same for every attempt at the same rollout."""
    prompt_id: str
    """Id of the task's prompt, not empty."""
    group_id: str
    """Id that all responses of a group share, not empty."""
    episode_id: str = ""
    """Id that the trajectories of an episode share; empty if the trajectory is its own episode."""
    agent_id: str = ""
    """Id of the agent in the episode; may be empty."""
    parent_rollout_id: str = ""
    """Rollout that this one forks from; empty if it is no fork."""
    fork_at: int = -1
    """Place of the fork, from 0; -1 if it is no fork."""

    @property
    def episode(self) -> str:
        """Id of the rollout that was asked for: the episode, or the trajectory if it is its own episode."""
        return self.episode_id or self.rollout_id

    @property
    def session(self) -> str:
        """Id of the session that this is a turn of; the rollout's own if it is no turn."""
        return _TURN.sub("", self.rollout_id)

    def of_turn(self, number: int) -> Lineage:
        """Returns the lineage of a request for a turn of this session."""
        return replace(self, rollout_id=f"{self.rollout_id}#{number}")


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class KeptSets:
    """Ragged (CSR) kept sets: `ids[offsets[t]:offsets[t + 1]]` is the support from which token t was drawn."""

    offsets: NDArray[np.int64]
    """int64 [S + 1]; starts at 0, never falls, ends at nnz."""
    ids: NDArray[np.int32]
    """int32 [nnz]; strictly ascending in a row."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64 [S]: ids per row; 0 for rows that list nothing."""
        return self.offsets[1:] - self.offsets[:-1]

    @classmethod
    def empty(cls, num_rows: int) -> KeptSets:
        return cls(np.zeros(num_rows + 1, np.int64), np.zeros(0, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """Returns the rows of all parts, in order. No parts give no rows."""
        if not parts:
            return cls.empty(0)
        sizes = np.concatenate([part.sizes for part in parts])
        return cls(np.concatenate([[0], np.cumsum(sizes)]), np.concatenate([part.ids for part in parts]))

    def take(self, rows: NDArray[np.integer]) -> KeptSets:
        """Returns the kept sets of `rows`, in that order. Raises IndexError for a row that is not there."""
        sizes = self.sizes[rows]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        ids = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], sizes)
        return KeptSets(offsets, self.ids[ids])

    def cut(self, start: int, stop: int) -> KeptSets:
        """Returns rows [start, stop) with offsets that start at 0 again; `ids` is a view.

        Raises:
            IndexError: Not 0 <= start <= stop <= rows.
        """
        num_rows = len(self.offsets) - 1
        if not 0 <= start <= stop <= num_rows:
            raise IndexError(f"rows [{start}, {stop}) of {num_rows} kept sets")
        offsets = self.offsets[start : stop + 1]
        return KeptSets(offsets - offsets[0], self.ids[offsets[0] : offsets[-1]])


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryFields:
    """The fields of one trajectory, as they came. Only `moerl.contract.trajectory.Trajectory` is checked.

    The trainer feeds tokens 0..S-2 and scores tokens 1..S-1; inputs and routing rows match one to one.
    """

    spec: ModelSpec
    """The model facts that the arrays are checked against."""
    lineage: Lineage
    """Ids of rollout, prompt and group."""
    turns: tuple[Turn, ...]
    """Spans in order, covering 0..S without gaps."""
    token_ids: NDArray[np.int32]
    """int32 [S]."""
    sampled: NDArray[np.bool_]
    """bool [S]; True where the policy sampled this token. sampled[0] is False."""
    rollout_logprobs: NDArray[np.float32]
    """float32 [S], nats; log-prob of token t under the (tempered, truncated, renormalised) distribution it was drawn
    from; 0 on tokens that were not sampled."""
    kept_logmass: NDArray[np.float32]
    """float32 [S], nats; log of the mass of the kept set under the full tempered distribution; 0 if nothing was cut."""
    policy_versions: NDArray[np.int32]
    """int32 [S]; weight version that sampled token t, -1 on tokens that were not sampled."""
    expert_ids: NDArray[np.uint8] | NDArray[np.uint16]
    """uint8/uint16 [S-1, L, K]; row t = experts used for token t as an input."""
    routed: NDArray[np.bool_]
    """bool [S-1]; True where row t was really captured."""
    kept: KeptSets
    """Kept sets per token; empty for tokens that were not sampled or for which nothing was cut."""
    truncated: NDArray[np.bool_]
    """bool [S]; True where token t was drawn from a listed kept set."""
    finish_reason: FinishReason
    """Reason for which sampling ended."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named rewards, finite."""
    scores: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Named float32 [S] side scores, finite."""
    engine_id: str = ""
    """Engine or server that sampled the rollout."""
    attempt: int = 0
    """Attempts at the rollout before this one, from 0."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by stage, finite."""

    def __len__(self) -> int:
        """Returns S, the number of tokens."""
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())

    @property
    def sampled_turns(self) -> list[Turn]:
        """Spans that the policy sampled, in order."""
        return [turn for turn in self.turns if turn.kind is TurnKind.SAMPLED]

    @property
    def temperatures(self) -> NDArray[np.float32]:
        """float32 [S]: temperature under which token t was drawn; 1 on tokens that were not sampled."""
        out = np.ones(len(self), np.float32)
        for turn in self.turns:
            if turn.sampling is not None:
                out[turn.start : turn.end] = turn.sampling.temperature
        return out
