"""Join of the turns of a session: one trajectory of all its tokens, each as it was sampled. Pure; numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.contract.reasons import Reason
from moerl.contract.trajectory import FinishReason, KeptSets, Lineage, ModelSpec, Trajectory, Turn, TurnKind
from moerl.errors import ContractError

_PER_TOKEN = ("token_ids", "sampled", "rollout_logprobs", "kept_logmass", "policy_versions", "truncated")
_PER_ROW = ("expert_ids", "routed")


@dataclass(frozen=True, slots=True, eq=False)
class TurnPiece:
    """New part of a session that came with one turn: an observation, or the prompt, and what was sampled behind it."""

    arrays: Mapping[str, NDArray[Any]]
    """Fields of a trajectory by name: of the new tokens, and of the inputs that are new with them."""
    kept_sizes: NDArray[np.int64]
    """int64 [new tokens]; 0 if nothing was cut."""
    kept_ids: NDArray[np.int32]
    """int32 [sum of `kept_sizes`]."""
    turns: tuple[Turn, ...]
    """Spans of the new tokens, by their places in the session."""
    spec: ModelSpec
    """Model facts of the answer."""
    finish_reason: FinishReason
    """Reason for which the turn ended."""
    engine_id: str
    """Engine or server that sampled it."""
    attempt: int
    """Attempts before the one that was answered."""
    timings: Mapping[str, float]
    """Seconds by stage."""

    @classmethod
    def of(cls, turn: Trajectory, before: int, end: int, reason: FinishReason) -> TurnPiece:
        """Copies the new part of an answer that `check_answer` has passed.

        The experts of a token are those of the first turn in which it was an input: the last sampled token of a turn is
        one in the next turn. Rows of inputs before that are left out: an answer need not bring them
        (`RolloutRequest.known_rows`).

        Args:
            before: tokens of the session up to the last sampled one; 0 for the first turn.
            end: tokens up to the last one that counts; fewer than the answer has if a text ended the turn.
            reason: for which the turn ended.
        """
        context, sampled = turn.turns
        kind = TurnKind.OBSERVATION if before else TurnKind.PROMPT
        sampled = replace(sampled, end=end)
        spans = (Turn(before, context.end, kind), sampled) if before < context.end else (sampled,)
        return cls(
            arrays={
                **{name: getattr(turn, name)[before:end].copy() for name in _PER_TOKEN},
                **{name: getattr(turn, name)[max(before - 1, 0) : end - 1].copy() for name in _PER_ROW},
            },
            kept_sizes=turn.kept.sizes[before:end].copy(),
            kept_ids=turn.kept.ids[turn.kept.offsets[before] : turn.kept.offsets[end]].copy(),
            turns=spans,
            spec=turn.spec,
            finish_reason=reason,
            engine_id=turn.engine_id,
            attempt=turn.attempt,
            timings=turn.timings,
        )

    @property
    def end(self) -> int:
        """Tokens of the session up to the last one sampled in this turn."""
        return self.turns[-1].end


def join(pieces: Sequence[TurnPiece], lineage: Lineage) -> dict[str, Any]:
    """Returns the `Trajectory` fields of a session. Timings are summed up.

    Args:
        pieces: at least one, in order.

    Raises:
        ContractError: two turns are of different models.
    """
    spec, timings = pieces[0].spec, dict[str, float]()
    for piece in pieces:
        if piece.spec != spec:
            raise ContractError(Reason.SPEC_MISMATCH, field="spec", seen=piece.spec, expected=spec)
        for name, seconds in piece.timings.items():
            timings[name] = timings.get(name, 0.0) + seconds
    sizes = np.concatenate([piece.kept_sizes for piece in pieces])
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return {
        **{name: np.concatenate([piece.arrays[name] for piece in pieces]) for name in (*_PER_TOKEN, *_PER_ROW)},
        "spec": spec,
        "lineage": lineage,
        "turns": tuple(turn for piece in pieces for turn in piece.turns),
        "kept": KeptSets(offsets, np.concatenate([piece.kept_ids for piece in pieces])),
        "finish_reason": pieces[-1].finish_reason,
        "engine_id": pieces[-1].engine_id,
        "attempt": sum(piece.attempt for piece in pieces),
        "timings": timings,
    }


def check_answer(turn: Trajectory, prompt_ids: Sequence[int]) -> None:
    """Raises `ContractError` unless a turn is one sampled span behind exactly the tokens that were sent."""
    kinds = [span.kind for span in turn.turns]
    if kinds != [TurnKind.PROMPT, TurnKind.SAMPLED]:
        raise ContractError(
            Reason.TURN_KIND_DISAGREES, field="turns", seen=kinds, expected="a prompt and one sampled span"
        )
    seen, expected = turn.token_ids[: turn.turns[0].end], np.asarray(prompt_ids, np.int32)
    if not np.array_equal(seen, expected):
        at = np.flatnonzero(seen[: len(expected)] != expected[: len(seen)])
        raise ContractError(
            Reason.TURN_BREAKS_OFF,
            field="token_ids",
            seen=f"{len(seen)} tokens" + (f", another one at place {at[0]}" if len(at) else ""),
            expected=f"the {len(expected)} tokens before the turn",
        )
