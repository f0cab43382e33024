"""Spans of an episode with their texts, for people: who wrote which part of a session, and with which weights.

Pure; numpy alone. Dumps and tables of evaluations have them in a column `spans`, which is not read back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moerl.contract.trajectory import Trajectory, TurnKind

SHARED = "shared"
"""Kind of the tokens that a fork has from its parent; their text is with the parent."""


@dataclass(frozen=True, slots=True)
class ReadableSpan:
    """Part of a turn that one author wrote, and that one version sampled if the author is the policy."""

    kind: str
    """A `TurnKind`, or `SHARED`."""
    turn: int
    """Number of the sampled turn in its trajectory, from 1; 0 if it was not sampled."""
    version: int
    """Weight version that sampled it; -1 if it was not sampled."""
    num_tokens: int
    """Tokens."""
    has_end: bool
    """True if it ends with a token that ends a turn."""
    text: str
    """Text, without that token."""


def is_of_episode(trajectory: Trajectory) -> bool:
    """Returns whether a trajectory has several sampled turns, or is one of several sessions of its episode."""
    return bool(trajectory.lineage.episode_id) or len(trajectory.sampled_turns) > 1


def turn_numbers(trajectories: Sequence[Trajectory]) -> list[NDArray[np.int64]]:
    """Returns the number of the turn of each sampled token, from 0: int64 [sampled tokens] per trajectory. Turns of a
    fork go on from those that it begins with, if its parent is among the trajectories."""
    by_id = {trajectory.lineage.rollout_id: trajectory for trajectory in trajectories}

    def num_before(trajectory: Trajectory) -> int:
        num, seen = 0, {trajectory.lineage.rollout_id}
        while (parent := by_id.get(trajectory.lineage.parent_rollout_id)) and parent.lineage.rollout_id not in seen:
            num += sum(turn.end <= trajectory.lineage.fork_at for turn in parent.sampled_turns)
            seen.add(parent.lineage.rollout_id)
            trajectory = parent
        return num

    return [
        np.repeat(np.arange(len(turns)) + num_before(t), [turn.end - turn.start for turn in turns])
        for t in trajectories
        for turns in (t.sampled_turns,)
    ]


def spans_of(
    trajectory: Trajectory, decode: Callable[[Sequence[int]], str], ends: Collection[int]
) -> Iterator[ReadableSpan]:
    """Yields the spans of a trajectory, in order.

    Args:
        decode: returns the text of ids.
        ends: ids that end a turn.
    """
    ids, number = trajectory.token_ids.tolist(), 0
    for turn in trajectory.turns:
        start, end = turn.start, turn.end
        if turn.kind is not TurnKind.SAMPLED:
            shared = min(max(trajectory.lineage.fork_at, 0), end) if start == 0 else 0
            if shared:
                yield ReadableSpan(SHARED, 0, -1, shared, False, "")
            if start + shared < end:
                kind = TurnKind.OBSERVATION if shared else turn.kind
                text = decode(ids[start + shared : end])
                yield ReadableSpan(kind, 0, -1, end - start - shared, False, text)
            continue
        number += 1
        versions = trajectory.policy_versions[start:end]
        edges = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist(), end - start]
        has_end = ids[end - 1] in ends
        texts = _texts(ids[start : end - has_end], edges[1:-1], decode)
        for first, last, text in zip(edges[:-1], edges[1:], texts, strict=True):
            is_last = last == end - start
            version = int(versions[first])
            yield ReadableSpan(turn.kind, number, version, last - first, has_end and is_last, text)


def _texts(ids: Sequence[int], cuts: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Returns the text of ids in parts, which add up to it: a character whose tokens are cut is in the later part."""
    whole = decode(ids)
    places = [num_equal(decode(ids[:cut]), whole) for cut in cuts]
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


def num_equal(some: Sequence[object], others: Sequence[object]) -> int:
    """Returns the number of elements at the start, such as characters, that two sequences share."""
    differing = (place for place, (a, b) in enumerate(zip(some, others, strict=False)) if a != b)
    return next(differing, min(len(some), len(others)))
