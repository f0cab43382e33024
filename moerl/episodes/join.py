"""Join of the turns of a session: one trajectory of all its tokens, each as it was sampled. Pure; numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moerl.contract.reasons import Reason
from moerl.contract.trajectory import KeptSets, Lineage, Trajectory, Turn, TurnKind
from moerl.errors import ContractError

_PER_TOKEN = ("token_ids", "sampled", "rollout_logprobs", "kept_logmass", "policy_versions", "truncated")


def join(turns: Sequence[Trajectory], lineage: Lineage) -> dict[str, Any]:
    """Returns the `Trajectory` fields of a session: of each turn, the tokens that are new with it.

    Rows of inputs before that are not looked at: a turn need not bring them (`RolloutRequest.known_rows`).
    Tokens that a turn has behind those of the turn before, and did not sample, are an observation. The experts of a
    token are those of the first turn in which it was an input: the last sampled token of a turn is one in the next
    turn. Timings are summed up.

    Args:
        turns: at least one, each checked by `check_answer`; the tokens sent for a turn begin with those of the turn
            before.

    Raises:
        ContractError: two turns are of different models.
    """
    parts: dict[str, list[Any]] = {name: [] for name in (*_PER_TOKEN, "expert_ids", "routed", "sizes", "ids")}
    spans: list[Turn] = []
    timings: dict[str, float] = {}
    before = 0
    for number, turn in enumerate(turns):
        if turn.spec != turns[0].spec:
            raise ContractError(Reason.SPEC_MISMATCH, field="spec", seen=turn.spec, expected=turns[0].spec)
        for name in _PER_TOKEN:
            parts[name].append(getattr(turn, name)[before:])
        rows = slice(max(before - 1, 0), None)
        parts["expert_ids"].append(turn.expert_ids[rows])
        parts["routed"].append(turn.routed[rows])
        parts["sizes"].append(turn.kept.sizes[before:])
        parts["ids"].append(turn.kept.ids[turn.kept.offsets[before] :])
        context, sampled = turn.turns
        if before < context.end:
            kind = TurnKind.OBSERVATION if number else TurnKind.PROMPT
            spans.append(Turn(before, context.end, kind))
        spans.append(sampled)
        for name, seconds in turn.timings.items():
            timings[name] = timings.get(name, 0.0) + seconds
        before = len(turn)
    sizes = np.concatenate(parts.pop("sizes"))
    kept = KeptSets(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), np.concatenate(parts.pop("ids")))
    return {
        **{name: np.concatenate(arrays) for name, arrays in parts.items()},
        "spec": turns[0].spec,
        "lineage": lineage,
        "turns": tuple(spans),
        "kept": kept,
        "finish_reason": turns[-1].finish_reason,
        "engine_id": turns[-1].engine_id,
        "attempt": sum(turn.attempt for turn in turns),
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
